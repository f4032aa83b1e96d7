//! Rows of the engine benchmark: workload, peer and target.

use super::engine::{Measurements, is_quantized};
use crate::step::XtaskError;

/// Program that runs a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Peer {
    /// The engine itself, with another workload or weight format.
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
    SpeedAndMemory { min_speed: f64, max_memory: f64 },
    /// Maximum time in seconds.
    Seconds(f64),
    /// Maximum peak memory relative to the size of the model's file and of the KV cache.
    FileMemory(f64),
    /// None: the row is only reported.
    ReportOnly,
}

/// Kind of workload. `benches/engine.rs` of the engine implements the workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkloadKind {
    /// A training step on 4 × 256 tokens.
    Train,
    /// A training step on 8 completions of different lengths for each of 4 prompts.
    Ragged,
    /// `decodeN`: N prompts of 64 tokens, 128 new tokens each, with the base model.
    Decode,
    /// `loraN`: the same with an adapter.
    Lora,
    /// `adaptersN`: one batch of 32 sequences that use N adapters.
    Adapters,
    /// `liveN`: N adapters are loaded, and requests use one after the other.
    LoadedAdapters,
    /// `contextN`: one token after a context of N tokens.
    LongContext,
    /// Opening the model, compared with reading its file; `cold` if the file is not in the page
    /// cache.
    Load,
}

impl WorkloadKind {
    const ALL: [Self; 8] = [
        Self::Train,
        Self::Ragged,
        Self::Decode,
        Self::Lora,
        Self::Adapters,
        Self::LoadedAdapters,
        Self::LongContext,
        Self::Load,
    ];

    /// Returns the label that selects the rows of this kind on the command line.
    fn label(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Ragged => "ragged",
            Self::Decode => "decode",
            Self::Lora => "lora",
            Self::Adapters => "adapters",
            Self::LoadedAdapters => "live",
            Self::LongContext => "context",
            Self::Load => "load",
        }
    }
}

/// Model and weight format of a row.
#[derive(Clone, Copy)]
struct BenchModel {
    name: &'static str,
    precision: &'static str,
}

/// Labels of the models, which `peer.py` defines: A has 4 million parameters, B has 600 million.
const MODELS: [&str; 2] = ["A", "B"];
/// Labels of the weight formats.
const PRECISIONS: [&str; 4] = ["f32", "bf16", "q8_0", "q4_k"];

const A_F32: BenchModel = BenchModel { name: "A", precision: "f32" };
const A_BF16: BenchModel = BenchModel { name: "A", precision: "bf16" };
const B_F32: BenchModel = BenchModel { name: "B", precision: "f32" };
const B_BF16: BenchModel = BenchModel { name: "B", precision: "bf16" };
const B_Q8_0: BenchModel = BenchModel { name: "B", precision: "q8_0" };
const B_Q4_K: BenchModel = BenchModel { name: "B", precision: "q4_k" };

/// One row of the table.
#[derive(Debug)]
pub(super) struct Row {
    kind: WorkloadKind,
    pub(super) model: &'static str,
    pub(super) precision: &'static str,
    /// Workload, an argument of the program, for example `decode8`.
    pub(super) work: &'static str,
    /// Number of repetitions inside one process, an argument of the program.
    pub(super) rounds: u32,
    pub(super) peer: Peer,
    /// Workload of the peer, if it differs from `work`.
    peer_work: Option<&'static str>,
    /// Weight format of the peer, if it differs from `precision`.
    peer_precision: Option<&'static str>,
    target: PerformanceTarget,
}

/// Creates a row that compares the engine with a peer under the same workload.
const fn row(
    kind: WorkloadKind,
    model: BenchModel,
    work: &'static str,
    rounds: u32,
    peer: Peer,
    target: PerformanceTarget,
) -> Row {
    let BenchModel { name: model, precision } = model;
    Row {
        kind,
        model,
        precision,
        work,
        rounds,
        peer,
        peer_work: None,
        peer_precision: None,
        target,
    }
}

/// Creates a row that compares the engine with itself under another workload, `peer_work`.
const fn engine_row(
    kind: WorkloadKind,
    model: BenchModel,
    work: &'static str,
    rounds: u32,
    peer_work: &'static str,
    target: PerformanceTarget,
) -> Row {
    let row = row(kind, model, work, rounds, Peer::Engine, target);
    Row { peer_work: Some(peer_work), ..row }
}

/// Creates a row that compares quantized weights with bf16 weights, both in the engine.
const fn bf16_row(
    kind: WorkloadKind,
    model: BenchModel,
    work: &'static str,
    target: PerformanceTarget,
) -> Row {
    let row = row(kind, model, work, 1, Peer::Engine, target);
    Row { peer_precision: Some("bf16"), ..row }
}

/// Training is at least as fast as the peer and uses at most half of its memory.
const TRAINING: PerformanceTarget =
    PerformanceTarget::SpeedAndMemory { min_speed: 1.0, max_memory: 0.5 };
/// The time per token grows at most linearly with the length of the context.
const LINEAR: PerformanceTarget = PerformanceTarget::Speed(2048.0 / 4032.0);

/// A model is loaded in at most 1.2 times the time that reading its file takes.
const LOADING: PerformanceTarget = PerformanceTarget::Speed(1.0 / 1.2);
/// A loaded model takes little more memory than its file.
const RESIDENT: PerformanceTarget = PerformanceTarget::FileMemory(1.15);

/// All rows, in the order in which they are printed. The columns are the parameters of [`row`],
/// [`engine_row`] and [`bf16_row`].
pub(super) const ROWS: [Row; 44] = {
    use Peer::{Llama, Torch};
    use PerformanceTarget::{ReportOnly, Seconds, Speed};
    use WorkloadKind::{Adapters, Decode, Load, LoadedAdapters, LongContext, Lora, Ragged, Train};

    [
        row(Train, A_F32, "train", 5, Torch, TRAINING),
        row(Train, A_BF16, "train", 5, Torch, TRAINING),
        row(Train, B_F32, "train", 2, Torch, TRAINING),
        row(Train, B_BF16, "train", 2, Torch, TRAINING),
        row(Ragged, A_F32, "ragged", 2, Torch, Speed(2.0)),
        row(Ragged, B_F32, "ragged", 1, Torch, Speed(2.0)),
        row(Decode, A_F32, "decode1", 3, Llama, ReportOnly),
        row(Decode, A_F32, "decode8", 3, Llama, ReportOnly),
        row(Decode, A_BF16, "decode1", 3, Llama, ReportOnly),
        row(Decode, A_BF16, "decode8", 3, Llama, ReportOnly),
        row(Decode, B_BF16, "decode1", 1, Llama, Speed(0.95)),
        row(Decode, B_BF16, "decode8", 1, Llama, Speed(1.2)),
        row(Decode, B_F32, "decode1", 1, Llama, Speed(0.9)),
        row(Decode, B_F32, "decode8", 1, Llama, Speed(0.9)),
        row(Decode, B_Q8_0, "decode1", 1, Llama, Speed(0.95)),
        row(Decode, B_Q8_0, "decode8", 1, Llama, Speed(1.0)),
        row(Decode, B_Q4_K, "decode1", 1, Llama, Speed(0.9)),
        row(Decode, B_Q4_K, "decode8", 1, Llama, Speed(1.0)),
        bf16_row(Decode, B_Q8_0, "decode1", Speed(1.6)),
        bf16_row(Decode, B_Q4_K, "decode1", Speed(2.2)),
        row(Decode, B_BF16, "decode1", 1, Peer::None, RESIDENT),
        row(Decode, B_Q8_0, "decode1", 1, Peer::None, RESIDENT),
        row(Decode, B_Q4_K, "decode1", 1, Peer::None, RESIDENT),
        row(Lora, A_F32, "lora1", 3, Torch, ReportOnly),
        row(Lora, B_BF16, "lora1", 1, Torch, Speed(1.8)),
        row(Lora, B_BF16, "lora1", 1, Llama, Speed(0.95)),
        row(Lora, B_Q8_0, "lora1", 1, Llama, Speed(0.95)),
        row(Lora, B_Q4_K, "lora1", 1, Llama, Speed(0.9)),
        bf16_row(Train, B_Q8_0, "train", Speed(0.9)),
        engine_row(Adapters, A_F32, "adapters8", 3, "adapters1", Speed(0.8)),
        engine_row(Adapters, B_BF16, "adapters8", 1, "adapters1", Speed(0.8)),
        engine_row(Adapters, A_F32, "adapters32", 3, "adapters1", ReportOnly),
        engine_row(LoadedAdapters, A_F32, "live8", 3, "live1", Speed(0.9)),
        engine_row(LoadedAdapters, A_F32, "live64", 3, "live1", Speed(0.9)),
        engine_row(LongContext, A_F32, "context2048", 3, "context512", ReportOnly),
        engine_row(LongContext, A_F32, "context4032", 3, "context2048", LINEAR),
        row(Load, B_BF16, "load", 1, Peer::None, Seconds(2.0)),
        row(Load, B_F32, "load", 1, Peer::None, ReportOnly),
        engine_row(Load, B_BF16, "load", 1, "read", ReportOnly),
        engine_row(Load, B_Q8_0, "load", 1, "read", ReportOnly),
        engine_row(Load, B_Q4_K, "load", 1, "read", ReportOnly),
        engine_row(Load, B_BF16, "coldload", 1, "coldread", LOADING),
        engine_row(Load, B_Q8_0, "coldload", 1, "coldread", LOADING),
        engine_row(Load, B_Q4_K, "coldload", 1, "coldread", LOADING),
    ]
};

/// Labels that select rows: workloads, models and weight formats.
pub(super) fn labels() -> impl Iterator<Item = &'static str> {
    WorkloadKind::ALL.into_iter().map(WorkloadKind::label).chain(MODELS).chain(PRECISIONS)
}

impl Row {
    /// Returns the workload of the peer.
    pub(super) fn peer_work(&self) -> &'static str {
        self.peer_work.unwrap_or(self.work)
    }

    /// Returns whether the row is measured with llama.cpp, or on a file that llama.cpp quantized.
    pub(super) fn needs_llama(&self) -> bool {
        self.peer == Peer::Llama || is_quantized(self.precision)
    }

    /// Returns the weight format of the peer.
    pub(super) fn peer_precision(&self) -> &'static str {
        self.peer_precision.unwrap_or(self.precision)
    }

    /// Returns whether the row matches the labels `wanted`: for each group of labels (workload,
    /// model, weight format) that `wanted` names, the row has a wanted label. For example,
    /// `decode train B` selects the rows of both workloads for model B, in all formats.
    pub(super) fn matches(&self, wanted: &[&str]) -> bool {
        let kinds = WorkloadKind::ALL.map(WorkloadKind::label);
        let groups: [(&[&str], &str); 3] =
            [(&kinds, self.kind.label()), (&MODELS, self.model), (&PRECISIONS, self.precision)];
        groups.into_iter().all(|(group, own)| {
            let mut wanted = wanted.iter().filter(|label| group.contains(label)).peekable();
            wanted.peek().is_none() || wanted.any(|label| *label == own)
        })
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
            PerformanceTarget::ReportOnly => (String::new(), true),
            PerformanceTarget::Speed(min) => (format!("≥ {min:.2}×"), speed >= Some(min)),
            PerformanceTarget::Seconds(max) => (format!("≤ {max} s"), seconds <= max),
            PerformanceTarget::FileMemory(max) => {
                let size = get(ours, "file").zip(get(ours, "cache")).map(|(a, b)| a + b);
                let met = size.is_some_and(|size| peak <= max * size);
                (format!("memory ≤ {max:.2}× of {:.0} MiB", size.unwrap_or(0.0)), met)
            }
            PerformanceTarget::SpeedAndMemory { min_speed, max_memory } => (
                format!("≥ {min_speed:.2}×, memory ≤ {max_memory}×"),
                speed >= Some(min_speed) && memory.is_some_and(|memory| memory <= max_memory),
            ),
        };
        let peer = match (self.peer, self.peer_work.or(self.peer_precision)) {
            (_, Some(difference)) => format!("{difference} "),
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
        let longer = if theirs.contains_key("longer") { "> " } else { "" };
        let first_token_ms = get(ours, "first").map(|seconds| seconds * 1e3);
        let first_token = number(first_token_ms, " ms to first token");
        println!(
            "| {} | {} | {} | {} {first_token} | {peer}{longer}{} | {longer}{} | {target} \
             | {peak:.0} {} | {} |",
            self.model,
            self.precision,
            self.work,
            time(seconds),
            get(theirs, "wall").map_or_else(String::new, time),
            number(speed, "×"),
            number(memory, "× of the peer"),
            match self.target {
                PerformanceTarget::ReportOnly => "",
                _ if met => "met",
                _ => "missed",
            }
        );
        Ok(met)
    }
}
