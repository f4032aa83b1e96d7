//! Files of conversations, one per line.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;

use minijinja::Value;
use serde::Deserialize;
use serde_json::Value as Json;
use tinkex_wire::Datum;

use crate::error::{Error, ErrorKind, Result};

use super::train::encode;
use super::{Chat, Message, TrainOn, TrainingExample};

/// A longer line is not a conversation, whatever it is.
const LONGEST_LINE: u64 = 256 << 20;

/// Reads training examples from lines of JSON; made by [`Chat::read_jsonl`].
///
/// Each line is `{"messages": […]}`, perhaps with `"tools"`, or `{"prompt": "…", "completion": "…"}`.
/// Empty lines are skipped, and so are fields that mean nothing here. A bad line is reported and the
/// next one is read, so the caller decides whether to stop.
///
/// ```no_run
/// # async fn run(model: tinkex::TrainingClient) -> Result<(), Box<dyn std::error::Error>> {
/// use tinkex::{LossFn, TooLong};
///
/// let chat = model.tokenizer().await?.chat()?;
/// let lines = chat.open_jsonl("talks.jsonl")?.max_tokens(8192, TooLong::Truncate);
/// let batch: Vec<_> = lines.take(128).collect::<Result<_, _>>()?;
/// model.forward_backward(batch, LossFn::CrossEntropy).await?;
/// # Ok(()) }
/// ```
#[must_use]
pub struct JsonlReader<R> {
    chat: Chat,
    reader: R,
    line: u64,
    buffer: Vec<u8>,
    train_on: TrainOn,
    most: Option<(usize, TooLong)>,
    ready: VecDeque<Datum>,
    done: bool,
}

/// What happens to an example that is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TooLong {
    /// Its line is bad.
    Reject,
    /// Its end is cut off. If nothing is left to learn from, its line is bad.
    Truncate,
}

/// A line that no example could be made of, and why.
#[derive(Debug)]
#[non_exhaustive]
pub struct JsonlError {
    /// Which line, counted from 1.
    pub line: u64,
    /// What is wrong with it.
    pub error: Error,
    /// Whether it has the right form and only too many tokens.
    pub too_long: bool,
}

impl Chat {
    /// Reads training examples, line by line as they are asked for.
    pub fn read_jsonl<R: BufRead>(&self, reader: R) -> JsonlReader<R> {
        JsonlReader {
            chat: self.clone(),
            reader,
            line: 0,
            buffer: Vec::new(),
            train_on: TrainOn::default(),
            most: None,
            ready: VecDeque::new(),
            done: false,
        }
    }

    /// The same from a file.
    ///
    /// # Errors
    /// If there is no such file.
    pub fn open_jsonl(&self, path: impl AsRef<Path>) -> Result<JsonlReader<BufReader<File>>> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|why| {
            let what = format!("{} cannot be opened: {why}", path.display());
            Error::new(ErrorKind::NotFound, what)
        })?;
        Ok(self.read_jsonl(BufReader::new(file)))
    }
}

impl<R: BufRead> JsonlReader<R> {
    /// Which turns are learned; all that the assistant says unless this says otherwise.
    pub fn train_on(mut self, train_on: TrainOn) -> Self {
        self.train_on = train_on;
        self
    }

    /// How many tokens an example may have, and what happens to a longer one. Without this any
    /// length will do.
    pub fn max_tokens(mut self, most: usize, too_long: TooLong) -> Self {
        self.most = Some((most, too_long));
        self
    }

    /// The next line that is not empty, in the buffer.
    fn next_line(&mut self) -> Result<bool> {
        loop {
            self.buffer.clear();
            let mut line = self.reader.by_ref().take(LONGEST_LINE + 1);
            let read = line.read_until(b'\n', &mut self.buffer).map_err(|why| {
                self.done = true;
                Error::new(ErrorKind::Config, format!("it cannot be read: {why}"))
            });
            self.line += 1;
            if read? == 0 {
                self.done = true;
                return Ok(false);
            }
            if self.buffer.len() as u64 > LONGEST_LINE {
                self.done = true;
                let why =
                    format!("it has more than {LONGEST_LINE} bytes; nothing behind it is read");
                return Err(Error::new(ErrorKind::InvalidInput, why));
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    fn datums(&self) -> std::result::Result<VecDeque<Datum>, JsonlError> {
        let bad = |error, too_long| JsonlError { line: self.line, error, too_long };
        self.chat
            .examples_of_line(self.buffer.trim_ascii(), self.train_on)
            .map_err(|error| bad(error, false))?
            .into_iter()
            .map(|example| {
                let too_long = self.most.is_some_and(|(most, _)| example.tokens.len() > most);
                let datum = fit(example, self.most).and_then(|example| example.into_datum());
                datum.map_err(|error| bad(error, too_long))
            })
            .collect()
    }
}

impl<R: BufRead> Iterator for JsonlReader<R> {
    type Item = std::result::Result<Datum, JsonlError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() && !self.done {
            let read = match self.next_line() {
                Ok(true) => self.datums(),
                Ok(false) => Ok(VecDeque::new()),
                Err(error) => Err(JsonlError { line: self.line, error, too_long: false }),
            };
            match read {
                Ok(datums) => self.ready = datums,
                Err(bad) => return Some(Err(bad)),
            }
        }
        self.ready.pop_front().map(Ok)
    }
}

fn fit(example: TrainingExample, most: Option<(usize, TooLong)>) -> Result<TrainingExample> {
    let (len, example) = match most {
        Some((most, too_long)) if example.tokens.len() > most => {
            let len = example.tokens.len();
            if too_long == TooLong::Reject {
                let why = format!("it has {len} tokens, and {most} are allowed");
                return Err(Error::new(ErrorKind::InvalidInput, why));
            }
            (len, example.truncated(most))
        }
        _ => (example.tokens.len(), example),
    };
    if example.has_targets() {
        return Ok(example);
    }
    let why = format!("nothing to learn from is left in {} of {len} tokens", example.tokens.len());
    Err(Error::new(ErrorKind::InvalidInput, why))
}

#[derive(Deserialize)]
struct Line {
    messages: Option<Vec<Message>>,
    tools: Option<Value>,
    prompt: Option<String>,
    completion: Option<String>,
}

impl Chat {
    fn examples_of_line(&self, line: &[u8], train_on: TrainOn) -> Result<Vec<TrainingExample>> {
        let wrong = |why: String| Error::new(ErrorKind::InvalidInput, why);
        let line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line).trim_ascii_start();
        // A list would do for the parser, as the fields in their order.
        if !line.starts_with(b"{") {
            return Err(wrong(not_a_line(line)));
        }
        let line: Line = serde_json::from_slice(line).map_err(|why| wrong(reason(line, &why)))?;
        match (line.messages, line.prompt, line.completion) {
            (Some(messages), None, None) => {
                self.with_tools(line.tools).examples(&messages, train_on)
            }
            (None, Some(prompt), Some(completion)) => Ok(vec![self.pair(&prompt, &completion)?]),
            _ => {
                Err(wrong(r#"a line has "messages", or else "prompt" and "completion""#.to_owned()))
            }
        }
    }

    /// A prompt and what is to follow it, with the end token behind it.
    fn pair(&self, prompt: &str, completion: &str) -> Result<TrainingExample> {
        if completion.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "the completion is empty"));
        }
        let mut text = format!("{prompt}{completion}");
        if let Some(end) = &self.tokenizer.special().eos_token
            && !text.ends_with(end.as_str())
        {
            text.push_str(end);
        }
        let learned = prompt.len()..text.len();
        encode(&self.tokenizer, &text, &[learned], true)
    }
}

/// Why something that is no object is no line.
fn not_a_line(line: &[u8]) -> String {
    match serde_json::from_slice::<Json>(line) {
        Ok(value) => format!("it is {}, not an object", what(&value)),
        Err(why) => not_json(&why),
    }
}

/// Why an object is no line, in words that its writer knows.
fn reason(line: &[u8], why: &serde_json::Error) -> String {
    let fields = match serde_json::from_slice::<serde_json::Map<String, Json>>(line) {
        Ok(fields) => fields,
        Err(why) => return not_json(&why),
    };
    let wrong = |name: &str, wanted: &str, fits: fn(&Json) -> bool| {
        let value = fields.get(name).filter(|value| !value.is_null() && !fits(value))?;
        Some(format!("{name:?} is {}, not {wanted}", what(value)))
    };
    wrong("messages", "a list", Json::is_array)
        .or_else(|| wrong("prompt", "a text", Json::is_string))
        .or_else(|| wrong("completion", "a text", Json::is_string))
        // To the parser every line is the first.
        .unwrap_or_else(|| why.to_string().replace(" at line 1 column ", " at column "))
}

fn not_json(why: &serde_json::Error) -> String {
    let how = if why.is_eof() { "it ends too early" } else { "it is not JSON" };
    format!("{how} (column {})", why.column())
}

fn what(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "true or false",
        Json::Number(_) => "a number",
        Json::String(_) => "a text",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

impl fmt::Display for JsonlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.error)
    }
}

impl std::error::Error for JsonlError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<JsonlError> for Error {
    fn from(bad: JsonlError) -> Self {
        Self::new(bad.error.kind(), bad.to_string()).with_source(bad.error)
    }
}

impl<R> fmt::Debug for JsonlReader<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonlReader")
            .field("line", &self.line)
            .field("train_on", &self.train_on)
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}
