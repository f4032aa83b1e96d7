//! [`MetricsLog`]: the metrics of a run, in memory for the plot and in `metrics.jsonl`.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::CommandError;

/// Metrics of a run.
#[derive(Debug, Default)]
pub(crate) struct MetricsLog {
    /// Open file and its path for messages; `None` in tests of the plot.
    pub(super) file: Option<(File, String)>,
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
}

/// Line of the file for an evaluation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EvalLine {
    pub(crate) step: u64,
    pub(crate) eval_loss: f64,
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
        if let Ok(file) = File::open(path) {
            for line in BufReader::new(file).lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(MetricsLine::Step(line)) if line.step <= from => log.steps.push(line),
                    // The evaluation at `from` is not repeated.
                    Ok(MetricsLine::Eval(line)) if line.step <= from => log.evals.push(line),
                    _ => {}
                }
            }
        }
        // Replace the file atomically: a crash must not lose the lines of the earlier steps.
        let mut text = String::new();
        let mut evals = log.evals.iter().peekable();
        for step in &log.steps {
            while let Some(eval) = evals.next_if(|eval| eval.step < step.step) {
                text += &json_line(eval);
            }
            text += &json_line(step);
        }
        text.extend(evals.map(json_line));
        let shown = path.display().to_string();
        let file = tinkex_files::write(path, text)
            .and_then(|()| OpenOptions::new().append(true).open(path))
            .map_err(|error| CommandError::file("write", &shown, &error))?;
        log.file = Some((file, shown));
        Ok(log)
    }

    /// Appends the line of a step to the file and keeps it for the plot.
    pub(crate) fn add_step(&mut self, line: StepLine) -> Result<(), CommandError> {
        self.write(&line)?;
        self.steps.push(line);
        Ok(())
    }

    /// Appends the line of an evaluation to the file and keeps it for the plot.
    pub(crate) fn add_eval(&mut self, line: EvalLine) -> Result<(), CommandError> {
        self.write(&line)?;
        self.evals.push(line);
        Ok(())
    }

    /// Appends a line in one write, so that readers that follow the file see complete lines.
    fn write(&mut self, line: &impl Serialize) -> Result<(), CommandError> {
        let Some((file, shown)) = &mut self.file else { return Ok(()) };
        let written = file.write_all(json_line(line).as_bytes());
        written.map_err(|error| CommandError::file("write", shown, &error))
    }

    /// Returns the number of tokens in all steps.
    pub(crate) fn tokens(&self) -> usize {
        self.steps.iter().map(|line| line.tokens).sum()
    }
}

/// Returns a line of the file.
fn json_line(line: &impl Serialize) -> String {
    serde_json::to_string(line).unwrap_or_default() + "\n"
}
