//! Reads training examples, preference pairs and prompts from files, and separates held-out
//! examples.

use std::fs::File;
use std::io;
use std::path::Path;

use tinkex::{Chat, TooLong, TrainOn};
use tinkex_recipes::dpo::{DpoPair, DpoReference};
use tinkex_recipes::rl::RlPrompt;
use tinkex_recipes::{TrainExample, shuffled};

use crate::error::CommandError;
use crate::format;

use super::example_format::{self, Advice, ExampleFormat, InvalidRecord, Rejection};
use super::records::{JsonRecord, JsonRecords};
use super::source::InputFile;

/// Maximum number of invalid lines to report.
const MAX_REPORTED: usize = 5;

/// Examples of a file, and how they were read.
#[derive(Clone, Debug)]
pub(crate) struct FileExamples<T> {
    pub(crate) examples: Vec<T>,
    /// Format of supervised examples.
    pub(crate) format: Option<ExampleFormat>,
    /// Number of examples that had too many tokens and were truncated.
    pub(crate) truncated: usize,
}

impl<T> FileExamples<T> {
    fn new() -> Self {
        Self { examples: Vec::new(), format: None, truncated: 0 }
    }
}

/// Reads all examples of a file. `limit` is the maximum length in tokens and what to do with longer
/// examples.
///
/// # Errors
///
/// Returns an error that lists the invalid lines, if there are any, if lines have different formats,
/// or if the file is empty.
pub(crate) fn read(
    chat: &Chat,
    file: &InputFile,
    train_on: TrainOn,
    limit: Option<(usize, TooLong)>,
) -> Result<FileExamples<TrainExample>, CommandError> {
    let mut read = FileExamples::new();
    let mut formats: Vec<FormatLines> = Vec::new();
    read_records(file, |record| {
        let (format, json) = example_format::example(&record.json)?;
        match formats.iter_mut().find(|lines| lines.format == format) {
            Some(lines) => lines.add(record.line),
            None => formats.push(FormatLines { format, lines: vec![record.line], count: 1 }),
        }
        let mut lines = chat.read_jsonl(&*json).train_on(train_on);
        if let Some((max_tokens, too_long)) = limit {
            lines = lines.max_tokens(max_tokens, too_long);
        }
        for datum in &mut lines {
            let datum = datum.map_err(|invalid| {
                let advice = if invalid.too_long { Advice::Length } else { Advice::Formats };
                (invalid.error.to_string(), advice)
            })?;
            read.examples.push(TrainExample::new(datum));
        }
        read.truncated += lines.truncated();
        Ok(())
    })
    .map_err(|error| with_hint(error, file, EXAMPLE_FORMATS))?;
    match formats[..] {
        [] => {
            return Err(empty_file(file).hint(
                "Add at least one example, such as a conversation or a prompt with its completion.",
            ));
        }
        [FormatLines { format, .. }] => read.format = Some(format),
        _ => {
            let list: Vec<_> = formats.iter().map(ToString::to_string).collect();
            return Err(file.error(&format!("it mixes formats: {}", list.join("; "))).hint(
                "Use one format per file; several files can be given, each with its own format.",
            ));
        }
    }
    Ok(read)
}

/// Lines of one format.
struct FormatLines {
    format: ExampleFormat,
    /// The first lines.
    lines: Vec<u64>,
    count: usize,
}

impl FormatLines {
    fn add(&mut self, line: u64) {
        self.count += 1;
        if self.lines.len() < 3 {
            self.lines.push(line);
        }
    }
}

impl std::fmt::Display for FormatLines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines: Vec<_> = self.lines.iter().map(ToString::to_string).collect();
        let word = if self.count == 1 { "line" } else { "lines" };
        let more = if self.count > self.lines.len() { ", …" } else { "" };
        write!(f, "{} in {word} {}{more}", self.format, lines.join(", "))
    }
}

const EXAMPLE_FORMATS: &str = "Each example must be a conversation {\"messages\": [{\"role\": \
     \"user\", \"content\": \"…\"}, {\"role\": \"assistant\", \"content\": \"…\"}]}, \
     {\"prompt\": \"…\", \"completion\": \"…\"}, {\"text\": \"…\"}, Alpaca {\"instruction\": \
     \"…\", \"input\": \"…\", \"output\": \"…\"}, or ShareGPT {\"conversations\": [{\"from\": \
     \"human\", \"value\": \"…\"}, {\"from\": \"gpt\", \"value\": \"…\"}]}.";

const PAIR_FORMATS: &str = "Each pair must be {\"prompt\": \"…\", \"chosen\": \"…\", \"rejected\": \
     \"…\"}; prompt may be a list of messages, and the others messages of the assistant.";

const PROMPT_FORMATS: &str = "Each prompt must be {\"prompt\": \"…\"} or {\"messages\": [{\"role\": \
     \"user\", \"content\": \"…\"}]}, with any other fields.";

/// Reads the preference pairs of a file.
pub(crate) fn read_pairs(
    chat: &Chat,
    file: &InputFile,
    limit: Option<(usize, TooLong)>,
) -> Result<FileExamples<DpoPair>, CommandError> {
    let mut read = FileExamples::new();
    read_records(file, |record| {
        let json = example_format::pair(&record.json)?;
        for pair in DpoPair::read_jsonl(chat, &*json, limit).map_err(first_reason)? {
            read.truncated += usize::from(pair.truncated);
            read.examples.push(pair);
        }
        Ok(())
    })
    .map_err(|error| with_hint(error, file, PAIR_FORMATS))?;
    if read.examples.is_empty() {
        return Err(empty_file(file).hint("Add at least one preference pair."));
    }
    Ok(read)
}

/// Creates the examples of preference pairs, with their reference log-probabilities.
pub(crate) fn pair_examples(
    pairs: &[DpoPair],
    reference: &[DpoReference],
) -> Result<Vec<TrainExample>, CommandError> {
    let pairs = pairs.iter().zip(reference);
    pairs.map(|(pair, one)| Ok(TrainExample::of_pair(pair, *one)?)).collect()
}

/// Reads the prompts of a file. If `chat` is set, a text is a message of the user.
pub(crate) fn read_prompts(file: &InputFile, chat: bool) -> Result<Vec<RlPrompt>, CommandError> {
    let mut prompts = Vec::new();
    read_records(file, |record| {
        let json = example_format::prompt(&record.json)?;
        prompts.extend(RlPrompt::read_jsonl(json, chat).map_err(first_reason)?);
        Ok(())
    })
    .map_err(|error| with_hint(error, file, PROMPT_FORMATS))?;
    if prompts.is_empty() {
        return Err(empty_file(file).hint("Add at least one prompt."));
    }
    Ok(prompts)
}

/// Returns the reason why the only line of a record is invalid.
fn first_reason(invalid: Vec<(u64, String)>) -> Rejection {
    let reason = invalid.into_iter().next().map(|(_, reason)| reason);
    (reason.unwrap_or_default(), Advice::Formats)
}

/// Passes the records of a file to `read`.
///
/// # Errors
///
/// Returns an error if the file cannot be opened, and otherwise one that lists the first invalid
/// records, with the advice for them.
fn read_records(
    file: &InputFile,
    mut read: impl FnMut(&JsonRecord) -> Result<(), Rejection>,
) -> Result<(), InvalidFile> {
    let mut invalid = Vec::new();
    for record in JsonRecords::new(file.open()?) {
        let (line, rejected) = match record {
            Ok(record) => (record.line, read(&record).err()),
            Err(error) => (error.line, Some((error.reason, error.advice))),
        };
        invalid.extend(rejected.map(|(reason, advice)| InvalidRecord { line, reason, advice }));
    }
    if invalid.is_empty() { Ok(()) } else { Err(InvalidFile::JsonRecords(invalid)) }
}

/// Reason why a file cannot be read.
enum InvalidFile {
    /// The file cannot be opened.
    Other(CommandError),
    JsonRecords(Vec<InvalidRecord>),
}

impl From<CommandError> for InvalidFile {
    fn from(error: CommandError) -> Self {
        Self::Other(error)
    }
}

/// Creates the error for a file. `formats` is the hint for records of no accepted format.
fn with_hint(error: InvalidFile, file: &InputFile, formats: &str) -> CommandError {
    let invalid = match error {
        InvalidFile::Other(error) => return error,
        InvalidFile::JsonRecords(invalid) => invalid,
    };
    let reported = invalid.iter().take(MAX_REPORTED);
    let list: String = reported
        .map(|InvalidRecord { line, reason, .. }| format!("\n  {}:{line}: {reason}", file.name))
        .collect();
    let more = match invalid.len().saturating_sub(MAX_REPORTED) {
        0 => String::new(),
        more => format!("\n  and {more} more"),
    };
    let count = format::count(invalid.len(), "invalid line");
    let hint = match invalid.first().map(|record| record.advice) {
        Some(Advice::Encoding) => format!(
            "Convert the file to UTF-8, for example from Latin-1: iconv -f latin1 -t utf-8 {} > \
             utf8.jsonl",
            file.shell_name()
        ),
        Some(Advice::Layout) => {
            format!("Write each example on one line, or the whole file as a JSON array. {formats}")
        }
        Some(Advice::Damaged) => {
            "Check that the file is complete, for example that its download has finished."
                .to_owned()
        }
        Some(Advice::Length) => "Raise --max-tokens, or shorten the examples.".to_owned(),
        Some(Advice::UseDpo) => "Pass --method dpo to learn from preference pairs.".to_owned(),
        Some(Advice::UseSft) => "Omit --method dpo to learn from examples.".to_owned(),
        Some(Advice::Formats) | None => formats.to_owned(),
    };
    file.error(&format!("{count}{list}{more}")).hint(hint)
}

fn empty_file(file: &InputFile) -> CommandError {
    file.error("it contains no examples")
}

/// Splits the examples into training and held-out ones. `fraction` of them, rounded up and chosen by
/// `seed`, are held out.
pub(crate) fn split<T>(
    examples: Vec<T>,
    fraction: f64,
    seed: u64,
) -> Result<(Vec<T>, Vec<T>), CommandError> {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of a count"
    )]
    let count = (examples.len() as f64 * fraction).ceil() as usize;
    if count == 0 {
        return Ok((examples, Vec::new()));
    }
    if count >= examples.len() {
        let message = format!(
            "--eval-split {fraction} leaves no training examples: the file has {}",
            examples.len()
        );
        return Err(CommandError::usage(message)
            .hint("Pass a smaller fraction, or another file with --eval-file FILE."));
    }
    let mut held_out = vec![false; examples.len()];
    // Epochs count from 0, so no epoch has this order.
    for index in shuffled(examples.len(), seed, u64::MAX).into_iter().take(count) {
        held_out[index] = true;
    }
    let (eval, train): (Vec<_>, Vec<_>) =
        examples.into_iter().zip(held_out).partition(|(_, held_out)| *held_out);
    let unzip = |pairs: Vec<(T, bool)>| pairs.into_iter().map(|(example, _)| example).collect();
    Ok((unzip(train), unzip(eval)))
}

/// Returns a checksum of files, to detect changes.
pub(super) fn digest(files: &[impl AsRef<Path>]) -> Result<String, CommandError> {
    // FNV-1a, which is not cryptographic: it detects accidental edits only.
    let mut hash = Fnv(0xCBF2_9CE4_8422_2325);
    for path in files {
        let path = path.as_ref();
        File::open(path)
            .and_then(|mut file| io::copy(&mut file, &mut hash))
            .map_err(|error| CommandError::file("read", path.display(), &error))?;
    }
    Ok(format!("{:016x}", hash.0))
}

struct Fnv(u64);

impl io::Write for Fnv {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = bytes.iter().fold(self.0, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Checks that files have the checksum that they had when the run started.
pub(super) fn check_unchanged(
    files: &[impl AsRef<Path>],
    expected: &str,
) -> Result<(), CommandError> {
    if digest(files)? == expected {
        return Ok(());
    }
    let names: Vec<_> = files.iter().map(|file| file.as_ref().display().to_string()).collect();
    let several = if names.len() > 1 { "a file of " } else { "" };
    let names = names.join(", ");
    let message = format!("cannot resume: {several}{names} has changed since the run started");
    let hint = "Restore the file, or start a new run with the changed one.";
    Err(CommandError::usage(message).hint(hint))
}
