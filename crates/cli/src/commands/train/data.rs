//! Reads training examples from a file, and separates held-out examples.

use std::fs::File;
use std::path::Path;

use tinkex::{Chat, Datum, TooLong, TrainOn};

use crate::error::CommandError;
use crate::format;

use super::plan::shuffled;

/// Maximum number of invalid lines to report.
const MAX_REPORTED: usize = 5;

/// Training example with its counts.
#[derive(Clone, Debug)]
pub(crate) struct TrainExample {
    pub(crate) datum: Datum,
    pub(crate) tokens: usize,
    /// Sum of the loss weights: the number of tokens to learn.
    pub(crate) weight: f64,
}

impl TrainExample {
    pub(crate) fn new(datum: Datum) -> Self {
        let tokens = datum.model_input().token_count().unwrap_or(0);
        let weights = datum.loss_input("weights").and_then(|weights| weights.as_f32());
        let weight = weights.unwrap_or_default().iter().map(|weight| f64::from(*weight)).sum();
        Self { datum, tokens, weight }
    }
}

/// What the examples of a file are used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataFile {
    Training,
    Evaluation,
}

impl DataFile {
    /// Describes a file of this kind in a message: `training file examples.jsonl`.
    fn describe(self, path: &Path) -> String {
        let kind = match self {
            Self::Training => "training",
            Self::Evaluation => "evaluation",
        };
        format!("{kind} file {}", path.display())
    }
}

/// Reads all examples of a file. `limit` is the maximum length in tokens and what to do with longer
/// examples.
///
/// # Errors
///
/// Returns an error that lists the invalid lines, if there are any, or if the file is empty.
pub(crate) fn read(
    chat: &Chat,
    kind: DataFile,
    path: &Path,
    train_on: TrainOn,
    limit: Option<(usize, TooLong)>,
) -> Result<Vec<TrainExample>, CommandError> {
    let shown = path.display();
    let mut lines = chat.open_jsonl(path)?.train_on(train_on);
    if let Some((max_tokens, too_long)) = limit {
        lines = lines.max_tokens(max_tokens, too_long);
    }
    let (mut examples, mut invalid) = (Vec::new(), Vec::new());
    for line in lines {
        match line {
            Ok(datum) => examples.push(TrainExample::new(datum)),
            Err(line) => invalid.push(line),
        }
    }
    if !invalid.is_empty() {
        let reported = invalid.iter().take(MAX_REPORTED);
        let list: String =
            reported.map(|line| format!("\n  {shown}:{}: {}", line.line, line.error)).collect();
        let more = match invalid.len().saturating_sub(MAX_REPORTED) {
            0 => String::new(),
            more => format!("\n  and {more} more"),
        };
        let hint = if invalid.iter().all(|line| line.too_long) {
            "Raise --max-tokens, or shorten the examples."
        } else {
            "Each line must be {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, \
             {\"role\": \"assistant\", \"content\": \"…\"}]} or \
             {\"prompt\": \"…\", \"completion\": \"…\"}."
        };
        let count = format::count(invalid.len(), "invalid line");
        let message = format!("cannot read {}: {count}{list}{more}", kind.describe(path));
        return Err(CommandError::usage(message).hint(hint));
    }
    if examples.is_empty() {
        let message = format!("cannot read {}: the file is empty", kind.describe(path));
        return Err(CommandError::usage(message)
            .hint("Add at least one conversation or prompt/completion pair."));
    }
    Ok(examples)
}

/// Splits the examples into training and held-out ones. `fraction` of them, rounded up and chosen by
/// `seed`, are held out.
pub(crate) fn split(
    examples: Vec<TrainExample>,
    fraction: f64,
    seed: u64,
) -> Result<(Vec<TrainExample>, Vec<TrainExample>), CommandError> {
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
    let unzip =
        |pairs: Vec<(TrainExample, bool)>| pairs.into_iter().map(|(example, _)| example).collect();
    Ok((unzip(train), unzip(eval)))
}

/// Checks that a file exists and can be read.
pub(crate) fn check_readable(kind: DataFile, path: &Path) -> Result<(), CommandError> {
    let shown = kind.describe(path);
    let metadata = File::open(path).and_then(|file| file.metadata()).map_err(|error| {
        CommandError::file("read", &shown, &error).hint("Pass the path of a JSON Lines file.")
    })?;
    if metadata.is_dir() {
        let message = format!("cannot read {shown}: it is a folder");
        return Err(CommandError::usage(message)
            .hint("Pass a JSON Lines file. To resume the run in a folder, pass --resume DIR."));
    }
    Ok(())
}

/// Returns a checksum of a file, to detect changes.
pub(crate) fn digest(path: &Path) -> Result<String, CommandError> {
    let bytes =
        std::fs::read(path).map_err(|error| CommandError::file("read", path.display(), &error))?;
    // FNV-1a, which is not cryptographic: it detects accidental edits only.
    let hash = bytes.iter().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    Ok(format!("{hash:016x}"))
}
