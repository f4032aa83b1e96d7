//! The format of a run folder: settings, progress, checkpoints, metrics and samples of a training
//! run.
//!
//! All programs that write or read a run use these types: `tinkex train` and `tinkex rl`, the
//! training loops of the library, `tinkex export`, and the dashboard of `tinkex ui`.
//!
//! | File | Type | Written |
//! |---|---|---|
//! | [`run.json`](RUN_FILE) | [`RunRecord`] | replaced with every checkpoint |
//! | [`metrics.jsonl`](METRICS_FILE) | [`MetricsLine`] | one line per step and per evaluation |
//! | [`samples.jsonl`](SAMPLES_FILE) | [`SampleLine`] | one line per sampled completion |
//! | [`evaluations.jsonl`](EVALUATIONS_FILE) | [`EvaluationLine`] | one line per `tinkex eval` of the run |
//!
//! `docs/run-folder.md` describes every field. `run.json` has the [version](FORMAT_VERSION) of the
//! format for the whole folder; a program refuses a folder of a newer version.
//!
//! All functions block. Inside an async runtime, call them from a blocking task.
//!
//! ```
//! use tinkex_runs::{MetricsLine, RunFolder, metric};
//! # use tinkex_runs::{MethodSettings, RunRecord, RunSettings, SftSettings};
//! # let parent = tempfile::tempdir().unwrap();
//! # let path = parent.path().join("animals-run");
//! # let settings = RunSettings::new("tinkex/tiny", MethodSettings::Sft(SftSettings::default()));
//!
//! let mut folder = RunFolder::new(&path, RunRecord::new("animals", settings))?;
//! folder.store()?;
//! let mut metrics = folder.metrics(0, |_| ())?;
//! metrics.append(&MetricsLine::new(1).with(metric::LOSS, 2.5))?;
//! drop(folder);
//!
//! let record = RunFolder::read(&path)?;
//! assert_eq!((record.name.as_str(), record.progress.step()), ("animals", 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod checkpoint;
mod error;
mod evaluation;
mod folder;
pub mod metric;
mod metrics;
mod record;
mod sample;
mod settings;
mod step_log;

pub use checkpoint::{SavedCheckpoint, best_checkpoint, checkpoint_name, rotate_checkpoints};
pub use error::RunError;
pub use evaluation::EvaluationLine;
pub use folder::{
    EVALUATIONS_FILE, METRICS_FILE, PLOT_FILE, REFERENCE_FILE, RUN_FILE, RunFolder, SAMPLES_FILE,
};
pub use metrics::MetricsLine;
pub use record::{FORMAT_VERSION, RunProgress, RunRecord, SettingChange};
pub use sample::SampleLine;
pub use settings::{
    Advantage, CheckpointSettings, DataSettings, DpoSettings, EvaluationSettings, EventLogFormat,
    LearnedMessages, LongExamples, LossOption, LossSettings, MethodSettings, RewardSettings,
    RlSettings, RunMethod, RunSettings, SampleSettings, Schedule, SftSettings, StartCheckpoint,
};
pub use step_log::StepLog;
