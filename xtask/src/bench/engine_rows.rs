//! Rows of the engine benchmark: workload, peer and target.

use super::engine::Measurements;
use crate::step::XtaskError;

/// Program that runs a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Peer {
    /// The engine itself, with another workload.
    Engine,
    /// torch, transformers and peft.
    Torch,
    /// llama.cpp.
    Llama,
    /// No peer: the target is absolute.
    None,
}

/// Condition that a row must meet.
#[derive(Clone, Copy, Debug)]
pub(super) enum PerformanceTarget {
    /// Minimum speed relative to the peer.
    Speed(f64),
    /// Minimum speed and maximum peak memory, both relative to the peer.
    SpeedAndMemory(f64, f64),
    /// Maximum time in seconds.
    Seconds(f64),
    /// Reported only.
    None,
}

/// One row of the table.
#[derive(Debug)]
pub(super) struct Row {
    /// Kind of workload, a label that selects the row.
    kind: &'static str,
    pub(super) model: &'static str,
    pub(super) precision: &'static str,
    pub(super) work: &'static str,
    /// Number of repetitions inside one process, an argument of the program.
    pub(super) rounds: &'static str,
    pub(super) peer: Peer,
    /// Workload of the peer, if it differs from `work`.
    peer_work: Option<&'static str>,
    target: PerformanceTarget,
}

/// Creates a row that compares the engine with a peer under the same workload.
const fn row(
    kind: &'static str,
    (model, precision): (&'static str, &'static str),
    (work, rounds): (&'static str, &'static str),
    peer: Peer,
    target: PerformanceTarget,
) -> Row {
    Row { kind, model, precision, work, rounds, peer, peer_work: None, target }
}

/// Creates a row that compares the engine with itself under another workload, `peer_work`.
const fn engine_row(
    kind: &'static str,
    (model, precision): (&'static str, &'static str),
    (work, rounds): (&'static str, &'static str),
    peer_work: &'static str,
    target: PerformanceTarget,
) -> Row {
    let peer_work = Some(peer_work);
    Row { kind, model, precision, work, rounds, peer: Peer::Engine, peer_work, target }
}

const TRAINING: PerformanceTarget = PerformanceTarget::SpeedAndMemory(1.0, 0.5);
// Model and weight format. `peer.py` defines the models A (4 million parameters) and B (600 million).
const AF: (&str, &str) = ("A", "f32");
const AB: (&str, &str) = ("A", "bf16");
const BF: (&str, &str) = ("B", "f32");
const BB: (&str, &str) = ("B", "bf16");

pub(super) const ROWS: [Row; 25] = [
    row("train", AF, ("train", "5"), Peer::Torch, TRAINING),
    row("train", AB, ("train", "5"), Peer::Torch, TRAINING),
    row("train", BF, ("train", "1"), Peer::Torch, TRAINING),
    row("train", BB, ("train", "1"), Peer::Torch, TRAINING),
    row("ragged", AF, ("ragged", "2"), Peer::Torch, PerformanceTarget::Speed(2.0)),
    row("ragged", BF, ("ragged", "1"), Peer::Torch, PerformanceTarget::Speed(2.0)),
    row("decode", AF, ("decode1", "3"), Peer::Torch, PerformanceTarget::None),
    row("decode", AF, ("decode1", "3"), Peer::Llama, PerformanceTarget::None),
    row("decode", AF, ("decode8", "3"), Peer::Llama, PerformanceTarget::None),
    row("decode", AB, ("decode1", "3"), Peer::Llama, PerformanceTarget::None),
    row("decode", AB, ("decode8", "3"), Peer::Llama, PerformanceTarget::None),
    row("decode", BB, ("decode1", "1"), Peer::Torch, PerformanceTarget::Speed(1.8)),
    row("decode", BB, ("decode1", "1"), Peer::Llama, PerformanceTarget::Speed(0.95)),
    row("decode", BB, ("decode8", "1"), Peer::Llama, PerformanceTarget::Speed(1.2)),
    row("decode", BF, ("decode1", "1"), Peer::Llama, PerformanceTarget::Speed(0.9)),
    row("decode", BF, ("decode8", "1"), Peer::Llama, PerformanceTarget::Speed(0.9)),
    engine_row("adapters", AF, ("adapters8", "3"), "adapters1", PerformanceTarget::Speed(0.8)),
    engine_row("adapters", BB, ("adapters8", "1"), "adapters1", PerformanceTarget::Speed(0.8)),
    engine_row("adapters", AF, ("adapters32", "3"), "adapters1", PerformanceTarget::None),
    engine_row("live", AF, ("live8", "3"), "live1", PerformanceTarget::Speed(0.9)),
    engine_row("live", AF, ("live64", "3"), "live1", PerformanceTarget::Speed(0.9)),
    engine_row("context", AF, ("context2048", "3"), "context512", PerformanceTarget::None),
    engine_row("context", AF, ("context4032", "3"), "context2048", LINEAR),
    row("load", BB, ("load", "2"), Peer::None, PerformanceTarget::Seconds(2.0)),
    row("load", BF, ("load", "2"), Peer::None, PerformanceTarget::None),
];

/// The time per token grows at most linearly with the length of the context.
const LINEAR: PerformanceTarget = PerformanceTarget::Speed(2048.0 / 4032.0);

/// Labels that select rows: workloads, models and weight formats.
pub(super) fn labels() -> impl Iterator<Item = &'static str> {
    let kinds = ["train", "ragged", "decode", "adapters", "live", "context", "load"];
    kinds.into_iter().chain(["A", "B", "f32", "bf16"])
}

impl Row {
    pub(super) fn peer_work(&self) -> &'static str {
        self.peer_work.unwrap_or(self.work)
    }

    /// Returns whether the row matches: for each group of labels (workload, model, weight format)
    /// that is given at all, the row has one of them.
    pub(super) fn matches(&self, wanted: &[&str]) -> bool {
        let models: &[&str] = &["A", "B"];
        let precisions: &[&str] = &["f32", "bf16"];
        let is_kind = |label: &&&str| !models.contains(label) && !precisions.contains(label);
        let one_of = |labels: Vec<&&str>, value| labels.is_empty() || labels.contains(&&value);
        one_of(wanted.iter().filter(is_kind).collect(), self.kind)
            && one_of(wanted.iter().filter(|label| models.contains(label)).collect(), self.model)
            && one_of(
                wanted.iter().filter(|label| precisions.contains(label)).collect(),
                self.precision,
            )
    }

    /// Prints the row and returns whether it meets its target.
    pub(super) fn print(
        &self,
        ours: &Measurements,
        theirs: &Measurements,
    ) -> Result<bool, XtaskError> {
        let get = |measured: &Measurements, field: &str| measured.get(field).copied();
        let missing = || XtaskError::new(format!("no measurement for {self:?}"));
        let seconds = get(ours, "wall").ok_or_else(missing)?;
        let speed = get(theirs, "wall").map(|other| other / seconds);
        let peak = get(ours, "peak").ok_or_else(missing)?;
        let memory = get(theirs, "peak").map(|other| peak / other);
        let (target, met) = match self.target {
            PerformanceTarget::None => (String::new(), true),
            PerformanceTarget::Speed(least) => (format!("≥ {least:.2}×"), speed >= Some(least)),
            PerformanceTarget::Seconds(most) => (format!("≤ {most} s"), seconds <= most),
            PerformanceTarget::SpeedAndMemory(least, most) => (
                format!("≥ {least:.2}×, memory ≤ {most}×"),
                speed >= Some(least) && memory.is_some_and(|memory| memory <= most),
            ),
        };
        let peer = match (self.peer, self.peer_work) {
            (_, Some(work)) => format!("{work} "),
            (Peer::Torch, _) => "torch ".to_owned(),
            (Peer::Llama, _) => "llama.cpp ".to_owned(),
            _ => String::new(),
        };
        let number = |value: Option<f64>, unit: &str| {
            value.map_or_else(String::new, |value| format!("{value:.3}{unit}"))
        };
        let time = |seconds: f64| match seconds {
            ..0.1 => format!("{:.2} ms", seconds * 1e3),
            _ => format!("{seconds:.3} s"),
        };
        // A peer that was stopped at its timeout takes longer than the time shown.
        let more = if theirs.contains_key("longer") { "> " } else { "" };
        let first = number(get(ours, "first").map(|first| first * 1e3), " ms to first token");
        println!(
            "| {} | {} | {} | {} {first} | {peer}{more}{} | {more}{} | {target} | {peak:.0} {} | {} |",
            self.model,
            self.precision,
            self.work,
            time(seconds),
            get(theirs, "wall").map_or_else(String::new, time),
            number(speed, "×"),
            number(memory, "× of the peer"),
            match self.target {
                PerformanceTarget::None => "",
                _ if met => "met",
                _ => "missed",
            }
        );
        Ok(met)
    }
}
