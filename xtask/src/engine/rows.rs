//! What is measured, against whom, and how good it has to be.

use super::{Failure, Measured};

/// Who does a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Who {
    Ours,
    /// torch, transformers and peft.
    Torch,
    Llama,
    /// There is nobody to compare with: the bar is about ours alone.
    Nobody,
}

/// How good a row has to be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bar {
    /// At least so many times as fast as the peer.
    Speed(f64),
    /// The same, and at most so much of the peer's memory.
    SpeedAndMemory(f64, f64),
    /// At most so many seconds.
    Seconds(f64),
    /// For knowing only.
    None,
}

/// One row of the table.
#[derive(Debug)]
pub(super) struct Row {
    /// What it is chosen by.
    kind: &'static str,
    pub(super) model: &'static str,
    pub(super) precision: &'static str,
    pub(super) work: &'static str,
    /// How often in each process.
    pub(super) rounds: &'static str,
    pub(super) peer: Who,
    /// The peer's work, where it is ours that is compared with ours.
    other: Option<&'static str>,
    bar: Bar,
}

const fn row(
    kind: &'static str,
    (model, precision): (&'static str, &'static str),
    (work, rounds): (&'static str, &'static str),
    peer: Who,
    bar: Bar,
) -> Row {
    Row { kind, model, precision, work, rounds, peer, other: None, bar }
}

/// Ours against ours with other work.
const fn own(
    kind: &'static str,
    (model, precision): (&'static str, &'static str),
    (work, rounds): (&'static str, &'static str),
    other: &'static str,
    bar: Bar,
) -> Row {
    Row { kind, model, precision, work, rounds, peer: Who::Ours, other: Some(other), bar }
}

const TRAINING: Bar = Bar::SpeedAndMemory(1.0, 0.5);
const AF: (&str, &str) = ("A", "f32");
const AB: (&str, &str) = ("A", "bf16");
const BF: (&str, &str) = ("B", "f32");
const BB: (&str, &str) = ("B", "bf16");

pub(super) const ROWS: [Row; 25] = [
    row("train", AF, ("train", "5"), Who::Torch, TRAINING),
    row("train", AB, ("train", "5"), Who::Torch, TRAINING),
    row("train", BF, ("train", "1"), Who::Torch, TRAINING),
    row("train", BB, ("train", "1"), Who::Torch, TRAINING),
    row("ragged", AF, ("ragged", "2"), Who::Torch, Bar::Speed(2.0)),
    row("ragged", BF, ("ragged", "1"), Who::Torch, Bar::Speed(2.0)),
    row("decode", AF, ("decode1", "3"), Who::Torch, Bar::None),
    row("decode", AF, ("decode1", "3"), Who::Llama, Bar::None),
    row("decode", AF, ("decode8", "3"), Who::Llama, Bar::None),
    row("decode", AB, ("decode1", "3"), Who::Llama, Bar::None),
    row("decode", AB, ("decode8", "3"), Who::Llama, Bar::None),
    row("decode", BB, ("decode1", "1"), Who::Torch, Bar::Speed(1.8)),
    row("decode", BB, ("decode1", "1"), Who::Llama, Bar::Speed(0.95)),
    row("decode", BB, ("decode8", "1"), Who::Llama, Bar::Speed(1.2)),
    row("decode", BF, ("decode1", "1"), Who::Llama, Bar::Speed(0.9)),
    row("decode", BF, ("decode8", "1"), Who::Llama, Bar::Speed(0.9)),
    own("adapters", AF, ("adapters8", "3"), "adapters1", Bar::Speed(0.8)),
    own("adapters", BB, ("adapters8", "1"), "adapters1", Bar::Speed(0.8)),
    own("adapters", AF, ("adapters32", "3"), "adapters1", Bar::None),
    own("live", AF, ("live8", "3"), "live1", Bar::Speed(0.9)),
    own("live", AF, ("live64", "3"), "live1", Bar::Speed(0.9)),
    own("context", AF, ("context2048", "3"), "context512", Bar::None),
    own("context", AF, ("context4032", "3"), "context2048", LINEAR),
    row("load", BB, ("load", "2"), Who::Nobody, Bar::Seconds(2.0)),
    row("load", BF, ("load", "2"), Who::Nobody, Bar::None),
];

/// Twice the context costs at most twice as much a token: what it costs does not grow faster than
/// the context does.
const LINEAR: Bar = Bar::Speed(2048.0 / 4032.0);

/// All that rows can be chosen by.
pub(super) fn labels() -> impl Iterator<Item = &'static str> {
    let kinds = ["train", "ragged", "decode", "adapters", "live", "context", "load"];
    kinds.into_iter().chain(["A", "B", "f32", "bf16"])
}

impl Row {
    pub(super) fn peer_work(&self) -> &'static str {
        self.other.unwrap_or(self.work)
    }

    /// Whether it is one of those wanted: of every sort of label that is named it has one.
    pub(super) fn is_wanted(&self, wanted: &[&str]) -> bool {
        let models: &[&str] = &["A", "B"];
        let precisions: &[&str] = &["f32", "bf16"];
        let is_kind = |label: &&&str| !models.contains(label) && !precisions.contains(label);
        let one_of = |named: Vec<&&str>, own| named.is_empty() || named.contains(&&own);
        one_of(wanted.iter().filter(is_kind).collect(), self.kind)
            && one_of(wanted.iter().filter(|label| models.contains(label)).collect(), self.model)
            && one_of(
                wanted.iter().filter(|label| precisions.contains(label)).collect(),
                self.precision,
            )
    }

    /// Prints the row; says whether it holds its bar.
    pub(super) fn print(&self, ours: &Measured, theirs: &Measured) -> Result<bool, Failure> {
        let get = |side: &Measured, field: &str| side.get(field).copied();
        let missing = || Failure::new(format!("{self:?} was not measured"));
        let seconds = get(ours, "wall").ok_or_else(missing)?;
        let speed = get(theirs, "wall").map(|other| other / seconds);
        let peak = get(ours, "peak").ok_or_else(missing)?;
        let memory = get(theirs, "peak").map(|other| peak / other);
        let (bar, held) = match self.bar {
            Bar::None => (String::new(), true),
            Bar::Speed(least) => (format!("≥ {least:.2}×"), speed >= Some(least)),
            Bar::Seconds(most) => (format!("≤ {most} s"), seconds <= most),
            Bar::SpeedAndMemory(least, most) => (
                format!("≥ {least:.2}×, memory ≤ {most}×"),
                speed >= Some(least) && memory.is_some_and(|memory| memory <= most),
            ),
        };
        let peer = match (self.peer, self.other) {
            (_, Some(work)) => format!("{work} "),
            (Who::Torch, _) => "torch ".to_owned(),
            (Who::Llama, _) => "llama.cpp ".to_owned(),
            _ => String::new(),
        };
        let number = |value: Option<f64>, unit: &str| {
            value.map_or_else(String::new, |value| format!("{value:.3}{unit}"))
        };
        let time = |seconds: f64| match seconds {
            ..0.1 => format!("{:.2} ms", seconds * 1e3),
            _ => format!("{seconds:.3} s"),
        };
        let more = if theirs.contains_key("longer") { "> " } else { "" };
        let first = number(get(ours, "first").map(|first| first * 1e3), " ms to the first token");
        println!(
            "| {} | {} | {} | {} {first} | {peer}{more}{} | {more}{} | {bar} | {peak:.0} {} | {} |",
            self.model,
            self.precision,
            self.work,
            time(seconds),
            get(theirs, "wall").map_or_else(String::new, time),
            number(speed, "×"),
            number(memory, "× of the peer's"),
            match self.bar {
                Bar::None => "",
                _ if held => "met",
                _ => "missed",
            }
        );
        Ok(held)
    }
}
