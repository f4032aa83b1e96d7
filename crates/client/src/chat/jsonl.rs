//! Training files in JSON Lines: one conversation, or one prompt and completion, per line.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value as Json;
use serde_json::value::RawValue;
use tinkex_wire::Datum;

use crate::error::{Error, ErrorKind, Result};

use super::{Chat, Message, TrainOn, TrainingExample};

/// Maximum length of a line in bytes.
const MAX_LINE: u64 = 256 << 20;

/// Iterator over the training examples in JSON Lines; created by [`Chat::read_jsonl`].
///
/// Each line is `{"messages": […]}`, optionally with `"tools"`, or `{"prompt": "…", "completion":
/// "…"}`. Empty lines and unknown fields are ignored. After an invalid line the iterator continues
/// with the next one, so the caller decides whether to stop.
///
/// ```no_run
/// # async fn run(model: tinkex::TrainingClient) -> Result<(), Box<dyn std::error::Error>> {
/// use tinkex::{LossFn, TooLong};
///
/// let chat = model.tokenizer().await?.chat()?;
/// let examples = chat.open_jsonl("conversations.jsonl")?.max_tokens(8192, TooLong::Truncate);
/// let batch: Vec<_> = examples.take(128).collect::<Result<_, _>>()?;
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
    /// Maximum number of tokens per example.
    limit: Option<(usize, TooLong)>,
    /// Examples of the current line.
    ready: VecDeque<Datum>,
    /// Number of examples that were truncated.
    truncated: usize,
    done: bool,
}

/// Policy for an example that has too many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TooLong {
    /// Returns an error for its line.
    Reject,
    /// Cuts off its end. Returns an error for its line if no token with weight 1 is left.
    Truncate,
}

/// Error returned for a line that is not a valid example.
#[derive(Debug)]
#[non_exhaustive]
pub struct JsonlError {
    /// Number of the line, from 1.
    pub line: u64,
    /// Cause of the error.
    pub error: Error,
    /// Whether the line is well-formed and only has too many tokens.
    pub too_long: bool,
}

impl Chat {
    /// Reads training examples from JSON Lines, one line at a time.
    pub fn read_jsonl<R: BufRead>(&self, reader: R) -> JsonlReader<R> {
        JsonlReader {
            chat: self.clone(),
            reader,
            line: 0,
            buffer: Vec::new(),
            train_on: TrainOn::default(),
            limit: None,
            ready: VecDeque::new(),
            truncated: 0,
            done: false,
        }
    }

    /// Reads training examples from a JSON Lines file.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the file cannot be opened.
    pub fn open_jsonl(&self, path: impl AsRef<Path>) -> Result<JsonlReader<BufReader<File>>> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|error| {
            let message = format!("cannot open training file {}: {error}", path.display());
            Error::new(ErrorKind::NotFound, message)
        })?;
        Ok(self.read_jsonl(BufReader::new(file)))
    }
}

impl<R: BufRead> JsonlReader<R> {
    /// Sets which messages are trained on. Defaults to [`TrainOn::AllAssistant`].
    pub fn train_on(mut self, train_on: TrainOn) -> Self {
        self.train_on = train_on;
        self
    }

    /// Sets the maximum number of tokens per example, and what to do with longer ones. Defaults to
    /// no limit.
    pub fn max_tokens(mut self, max: usize, too_long: TooLong) -> Self {
        self.limit = Some((max, too_long));
        self.chat = self.chat.max_example_tokens(max);
        self
    }

    /// Returns the number of examples so far that had too many tokens and were truncated.
    pub fn truncated(&self) -> usize {
        self.truncated
    }

    /// Reads the next line that is not empty into the buffer. Returns false at the end.
    fn next_line(&mut self) -> Result<bool> {
        loop {
            self.buffer.clear();
            let mut line = self.reader.by_ref().take(MAX_LINE + 1);
            let read = line.read_until(b'\n', &mut self.buffer).map_err(|error| {
                self.done = true;
                Error::new(ErrorKind::Io, format!("cannot read the file: {error}"))
            });
            self.line += 1;
            if read? == 0 {
                self.done = true;
                return Ok(false);
            }
            if self.buffer.len() as u64 > MAX_LINE {
                self.done = true;
                let message = format!(
                    "the line has more than {MAX_LINE} bytes; the rest of the file is not read"
                );
                return Err(Error::new(ErrorKind::InvalidInput, message));
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    /// Converts the line in the buffer to data.
    fn datums(&mut self) -> std::result::Result<VecDeque<Datum>, JsonlError> {
        let mut truncated = 0;
        let invalid = |error, too_long| JsonlError { line: self.line, error, too_long };
        let datums = self
            .chat
            .examples_of_line(self.buffer.trim_ascii(), self.train_on)
            .map_err(|error| invalid(error, false))?
            .into_iter()
            .map(|example| {
                let too_long = self.limit.is_some_and(|(max, _)| example.tokens.len() > max);
                let datum = example.limited(self.limit).and_then(|example| example.into_datum());
                truncated += usize::from(too_long);
                datum.map_err(|error| invalid(error, too_long))
            })
            .collect::<std::result::Result<_, _>>()?;
        self.truncated += truncated;
        Ok(datums)
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
                Err(error) => return Some(Err(error)),
            }
        }
        self.ready.pop_front().map(Ok)
    }
}

impl TrainingExample {
    /// Rejects or truncates the example if it has more tokens than `limit` allows; `None` is no
    /// limit.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the example is too long and [`TooLong::Reject`] is set, or if
    /// no token to learn is left.
    #[doc(hidden)]
    pub fn limited(self, limit: Option<(usize, TooLong)>) -> Result<Self> {
        let len = self.tokens.len();
        let example = match limit {
            Some((max, TooLong::Reject)) if len > max => {
                let message = format!("{len} tokens exceed the limit of {max}");
                return Err(Error::new(ErrorKind::InvalidInput, message));
            }
            Some((max, TooLong::Truncate)) => self.truncated(max),
            _ => self,
        };
        if example.has_targets() {
            return Ok(example);
        }
        let kept = example.tokens.len();
        let message = format!("the first {kept} of {len} tokens contain no token to learn");
        Err(Error::new(ErrorKind::InvalidInput, message))
    }
}

/// Fields of a line. Which of them are set determines the format.
#[derive(Deserialize)]
struct JsonlLine {
    messages: Option<Vec<Message>>,
    tools: Option<Box<RawValue>>,
    prompt: Option<String>,
    completion: Option<String>,
}

impl Chat {
    /// Parses a line and encodes its examples.
    fn examples_of_line(&self, line: &[u8], train_on: TrainOn) -> Result<Vec<TrainingExample>> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidInput, message);
        let line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line).trim_ascii_start();
        // Reject lists first: serde would accept a list of the field values in order.
        if !line.starts_with(b"{") {
            return Err(invalid(not_an_object(line)));
        }
        let line: JsonlLine =
            serde_json::from_slice(line).map_err(|error| invalid(describe(line, &error)))?;
        match (line.messages, line.prompt, line.completion) {
            (Some(messages), None, None) => {
                let chat = match line.tools {
                    Some(tools) => &self.clone().tools_json(tools.get())?,
                    None => self,
                };
                chat.examples(&messages, train_on)
            }
            (None, Some(prompt), Some(completion)) => Ok(vec![self.pair(&prompt, &completion)?]),
            _ => Err(invalid(r#"expected "messages", or "prompt" and "completion""#.to_owned())),
        }
    }

    /// Encodes a prompt, its completion and the end token. The tokens of the prompt have weight 0.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the completion is empty or the text cannot be encoded.
    pub fn pair(&self, prompt: &str, completion: &str) -> Result<TrainingExample> {
        if completion.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "\"completion\" is empty"));
        }
        let mut text = format!("{prompt}{completion}");
        if let Some(end) = self.tokenizer.inner().eos_token()
            && !text.ends_with(end)
        {
            text.push_str(end);
        }
        let learned = prompt.len()..text.len();
        self.encode(&text, &[learned], true)
    }
}

/// Describes a line that does not start with `{`.
fn not_an_object(line: &[u8]) -> String {
    match serde_json::from_slice::<Json>(line) {
        Ok(value) => format!("expected an object, found {}", type_name(&value)),
        Err(error) => not_json(&error),
    }
}

/// Describes why an object is not a valid line: names the first field of the wrong type.
fn describe(line: &[u8], error: &serde_json::Error) -> String {
    let fields = match serde_json::from_slice::<serde_json::Map<String, Json>>(line) {
        Ok(fields) => fields,
        Err(error) => return not_json(&error),
    };
    let mismatch = |name: &str, expected: &str, matches: fn(&Json) -> bool| {
        let value = fields.get(name).filter(|value| !value.is_null() && !matches(value))?;
        Some(format!("{name:?}: expected {expected}, found {}", type_name(value)))
    };
    mismatch("messages", "a list", Json::is_array)
        .or_else(|| mismatch("prompt", "a string", Json::is_string))
        .or_else(|| mismatch("completion", "a string", Json::is_string))
        // The parser sees a single line and calls it line 1.
        .unwrap_or_else(|| error.to_string().replace(" at line 1 column ", " at column "))
}

fn not_json(error: &serde_json::Error) -> String {
    let problem = if error.is_eof() { "incomplete" } else { "invalid" };
    format!("{problem} JSON at column {}", error.column())
}

fn type_name(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
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
    fn from(error: JsonlError) -> Self {
        Self::new(error.error.kind(), error.to_string()).with_source(error.error)
    }
}

impl<R> fmt::Debug for JsonlReader<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JsonlReader")
            .field("line", &self.line)
            .field("train_on", &self.train_on)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}
