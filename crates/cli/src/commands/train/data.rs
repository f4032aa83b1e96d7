//! Reads training examples from a file, and separates held-out examples.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use tinkex::recipes::dpo::{DpoPair, DpoReference};
use tinkex::recipes::rl::RlPrompt;
use tinkex::recipes::{TrainExample, shuffled};
use tinkex::{Chat, TooLong, TrainOn};

use crate::error::CommandError;
use crate::format;

/// Maximum number of invalid lines to report.
const MAX_REPORTED: usize = 5;

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
        let hint = if invalid.iter().all(|line| line.too_long) {
            "Raise --max-tokens, or shorten the examples."
        } else {
            "Each line must be {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, \
             {\"role\": \"assistant\", \"content\": \"…\"}]} or \
             {\"prompt\": \"…\", \"completion\": \"…\"}."
        };
        let invalid = invalid.iter().map(|line| (line.line, line.error.to_string()));
        return Err(invalid_lines(kind, path, &invalid.collect::<Vec<_>>()).hint(hint));
    }
    if examples.is_empty() {
        return Err(
            empty_file(kind, path).hint("Add at least one conversation or prompt/completion pair.")
        );
    }
    Ok(examples)
}

/// Reads the preference pairs of a file.
pub(crate) fn read_pairs(
    chat: &Chat,
    kind: DataFile,
    path: &Path,
    limit: Option<(usize, TooLong)>,
) -> Result<Vec<DpoPair>, CommandError> {
    check_readable(kind, path)?;
    let file = File::open(path)
        .map_err(|error| CommandError::file("read", kind.describe(path), &error))?;
    let pairs = DpoPair::read_jsonl(chat, BufReader::new(file), limit).map_err(|invalid| {
        invalid_lines(kind, path, &invalid).hint(
            "Each line must be {\"prompt\": \"…\", \"chosen\": \"…\", \"rejected\": \"…\"}; \
             prompt may be a list of messages, and the others messages of the assistant.",
        )
    })?;
    if pairs.is_empty() {
        return Err(empty_file(kind, path).hint("Add at least one preference pair."));
    }
    Ok(pairs)
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
pub(crate) fn read_prompts(
    kind: DataFile,
    path: &Path,
    chat: bool,
) -> Result<Vec<RlPrompt>, CommandError> {
    check_readable(kind, path)?;
    let file = File::open(path)
        .map_err(|error| CommandError::file("read", kind.describe(path), &error))?;
    let prompts = RlPrompt::read_jsonl(BufReader::new(file), chat).map_err(|invalid| {
        invalid_lines(kind, path, &invalid).hint(
            "Each line must be {\"prompt\": \"…\"} or {\"messages\": [{\"role\": \"user\", \
             \"content\": \"…\"}]}, with any other fields.",
        )
    })?;
    if prompts.is_empty() {
        return Err(empty_file(kind, path).hint("Add at least one prompt."));
    }
    Ok(prompts)
}

/// Returns an error that lists the first invalid lines of a file.
fn invalid_lines(kind: DataFile, path: &Path, invalid: &[(u64, String)]) -> CommandError {
    let shown = path.display();
    let reported = invalid.iter().take(MAX_REPORTED);
    let list: String =
        reported.map(|(line, reason)| format!("\n  {shown}:{line}: {reason}")).collect();
    let more = match invalid.len().saturating_sub(MAX_REPORTED) {
        0 => String::new(),
        more => format!("\n  and {more} more"),
    };
    let count = format::count(invalid.len(), "invalid line");
    CommandError::usage(format!("cannot read {}: {count}{list}{more}", kind.describe(path)))
}

fn empty_file(kind: DataFile, path: &Path) -> CommandError {
    CommandError::usage(format!("cannot read {}: the file is empty", kind.describe(path)))
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

/// Checks that a file has the checksum that it had when the run started.
pub(crate) fn check_unchanged(file: &Path, expected: &str) -> Result<(), CommandError> {
    if digest(file)? == expected {
        return Ok(());
    }
    let message = format!("cannot resume: {} has changed since the run started", file.display());
    let hint = "Restore the file, or start a new run with the changed one.";
    Err(CommandError::usage(message).hint(hint))
}
