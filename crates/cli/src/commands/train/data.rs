//! Training examples from a file, all of them or none.

use std::fs::File;
use std::path::Path;

use tinkex::{Chat, Datum, TooLong, TrainOn};

use crate::error::CommandError;

use super::plan::shuffled;

/// How many bad lines are told about; whoever wrote one wrote many.
const TOLD: usize = 5;

/// An example, and what is counted about it.
#[derive(Clone, Debug)]
pub(crate) struct TrainExample {
    pub(crate) datum: Datum,
    pub(crate) tokens: usize,
    /// How many tokens of it are learned.
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

/// Reads every line of a file. One that makes no sense refuses the file.
pub(crate) fn read(
    chat: &Chat,
    path: &Path,
    train_on: TrainOn,
    most: Option<(usize, TooLong)>,
) -> Result<Vec<TrainExample>, CommandError> {
    let shown = path.display();
    let mut lines = chat.open_jsonl(path)?.train_on(train_on);
    if let Some((most, too_long)) = most {
        lines = lines.max_tokens(most, too_long);
    }
    let (mut pieces, mut bad) = (Vec::new(), Vec::new());
    for line in lines {
        match line {
            Ok(datum) => pieces.push(TrainExample::new(datum)),
            Err(line) => bad.push(line),
        }
    }
    if !bad.is_empty() {
        let told =
            bad.iter().take(TOLD).map(|line| format!("\n  {shown}:{}: {}", line.line, line.error));
        let told: String = told.collect();
        let more = bad.len().saturating_sub(TOLD);
        let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
        let lines = if bad.len() == 1 { "1 line" } else { &format!("{} lines", bad.len()) };
        let hint = if bad.iter().all(|line| line.too_long) {
            "raise --max-tokens, or make them shorter"
        } else {
            "a line is {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, \
             {\"role\": \"assistant\", \"content\": \"…\"}]} or \
             {\"prompt\": \"…\", \"completion\": \"…\"}"
        };
        let why = format!("{shown} has {lines} to put right:{told}{more}");
        return Err(CommandError::usage(why).hint(hint));
    }
    if pieces.is_empty() {
        return Err(CommandError::usage(format!("{shown} is empty"))
            .hint("it needs at least one conversation, or one prompt with its completion"));
    }
    Ok(pieces)
}

/// Holds a part of the examples back, to be evaluated on.
pub(crate) fn split(
    pieces: Vec<TrainExample>,
    part: f64,
    seed: u64,
) -> Result<(Vec<TrainExample>, Vec<TrainExample>), CommandError> {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a part of a count"
    )]
    let held = (pieces.len() as f64 * part).ceil() as usize;
    if held == 0 {
        return Ok((pieces, Vec::new()));
    }
    if held >= pieces.len() {
        let why = format!("--eval-split {part} leaves nothing of {} examples", pieces.len());
        return Err(
            CommandError::usage(why).hint("hold less back, or name a file: --eval-file FILE")
        );
    }
    let mut held_back = vec![false; pieces.len()];
    // A round of its own, which no epoch has.
    for at in shuffled(pieces.len(), seed, u64::MAX).into_iter().take(held) {
        held_back[at] = true;
    }
    let (eval, train): (Vec<_>, Vec<_>) =
        pieces.into_iter().zip(held_back).partition(|(_, held)| *held);
    let plain =
        |pairs: Vec<(TrainExample, bool)>| pairs.into_iter().map(|(piece, _)| piece).collect();
    Ok((plain(train), plain(eval)))
}

/// Whether a file is there and can be read.
pub(crate) fn look_at(path: &Path) -> Result<(), CommandError> {
    let shown = path.display().to_string();
    let found = File::open(path).and_then(|file| file.metadata());
    let about = found.map_err(|why| CommandError::file("read", &shown, &why))?;
    if about.is_dir() {
        return Err(CommandError::usage(format!("{shown} is a folder")).hint(
            "name a file with one example on each line; --resume goes on with a run's folder",
        ));
    }
    Ok(())
}

/// A number that changes when a file does.
pub(crate) fn digest(path: &Path) -> Result<String, CommandError> {
    let shown = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|why| CommandError::file("read", &shown, &why))?;
    // FNV-1a: it need not withstand anyone, only notice an edit.
    let hash = bytes.iter().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    Ok(format!("{hash:016x}"))
}
