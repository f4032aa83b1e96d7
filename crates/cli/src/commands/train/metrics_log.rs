//! [`MetricsLog`]: the metrics of a run, in memory for the plot and in `metrics.jsonl`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tinkex::recipes::StepLog;

use crate::error::CommandError;

use super::event_log::{EVENT_FILE, EventLog};

/// Metrics of a loss besides its value, by name.
pub(crate) type StepMetrics = BTreeMap<String, f64>;

/// Metrics of a run.
#[derive(Debug, Default)]
pub(crate) struct MetricsLog {
    /// Open `metrics.jsonl`, and its path for messages.
    file: Option<(StepLog, String)>,
    /// Open event file with the same metrics, and its path for messages.
    events: Option<(EventLog, String)>,
    pub(crate) steps: Vec<StepLine>,
    pub(crate) evals: Vec<EvalLine>,
}

/// Line of the file for a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StepLine {
    /// Number of finished steps.
    pub(crate) step: u64,
    pub(crate) epoch: f64,
    pub(crate) loss: f64,
    pub(crate) learning_rate: f64,
    pub(crate) tokens: usize,
    pub(crate) tokens_per_second: f64,
    /// Metrics of the loss, such as the accuracy of DPO.
    #[serde(flatten)]
    pub(crate) metrics: StepMetrics,
}

/// Line of the file for an evaluation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EvalLine {
    pub(crate) step: u64,
    pub(crate) eval_loss: f64,
    /// Metrics of the loss, such as the accuracy of DPO.
    #[serde(flatten)]
    pub(crate) metrics: StepMetrics,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum MetricsLine {
    Step(StepLine),
    Eval(EvalLine),
}

impl MetricsLog {
    /// Opens the file of a run that continues at step `from`. Later lines are discarded, because
    /// their steps are repeated.
    pub(crate) fn open(path: &Path, from: u64) -> Result<Self, CommandError> {
        let mut log = Self::default();
        let keep = |line: &str| match serde_json::from_str(line) {
            Ok(MetricsLine::Step(line)) => log.steps.push(line),
            // The evaluation at `from` is not repeated.
            Ok(MetricsLine::Eval(line)) => log.evals.push(line),
            Err(_) => {}
        };
        let shown = path.display().to_string();
        let file = StepLog::open(path, from, keep)
            .map_err(|error| CommandError::file("write", &shown, &error))?;
        log.file = Some((file, shown));
        Ok(log)
    }

    /// Also writes the metrics to an event file in `folder`.
    pub(crate) fn with_events(mut self, folder: &Path, from: u64) -> Result<Self, CommandError> {
        let path = folder.join(EVENT_FILE);
        let shown = path.display().to_string();
        let events = EventLog::open(&path, from)
            .map_err(|error| CommandError::file("write", &shown, &error))?;
        self.events = Some((events, shown));
        Ok(self)
    }

    /// Appends the line of a step to the files and keeps it for the plot.
    pub(crate) fn add_step(&mut self, line: StepLine) -> Result<(), CommandError> {
        self.write(&line)?;
        let values = [
            ("loss", line.loss),
            ("learning_rate", line.learning_rate),
            ("tokens_per_second", line.tokens_per_second),
        ];
        self.write_event(line.step, "train", &values, &line.metrics)?;
        self.steps.push(line);
        Ok(())
    }

    /// Appends the line of an evaluation to the files and keeps it for the plot.
    pub(crate) fn add_eval(&mut self, line: EvalLine) -> Result<(), CommandError> {
        self.write(&line)?;
        self.write_event(line.step, "eval", &[("loss", line.eval_loss)], &line.metrics)?;
        self.evals.push(line);
        Ok(())
    }

    fn write(&mut self, line: &impl Serialize) -> Result<(), CommandError> {
        let Some((file, shown)) = &mut self.file else { return Ok(()) };
        file.append(line).map_err(|error| CommandError::file("write", shown, &error))
    }

    fn write_event(
        &mut self,
        step: u64,
        prefix: &str,
        values: &[(&str, f64)],
        metrics: &StepMetrics,
    ) -> Result<(), CommandError> {
        let Some((events, shown)) = &mut self.events else { return Ok(()) };
        let metrics = metrics.iter().map(|(name, value)| (name.as_str(), *value));
        let written = events.append(step, prefix, values.iter().copied().chain(metrics));
        written.map_err(|error| CommandError::file("write", shown, &error))
    }

    /// Returns the number of tokens in all steps.
    pub(crate) fn tokens(&self) -> usize {
        self.steps.iter().map(|line| line.tokens).sum()
    }
}
