//! [`MetricsLog`]: the figures of a run, as they come: in memory for the plot, in a file for others.

use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::CommandError;

/// The figures of a run.
#[derive(Debug, Default)]
pub(crate) struct MetricsLog {
    /// Where they are written as well, and what to call it.
    pub(super) file: Option<(BufWriter<File>, String)>,
    pub(crate) steps: Vec<StepLine>,
    pub(crate) evals: Vec<EvalLine>,
}

/// A step's line in the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StepLine {
    /// How many steps are done.
    pub(crate) step: u64,
    pub(crate) epoch: f64,
    pub(crate) loss: f64,
    pub(crate) learning_rate: f64,
    pub(crate) tokens: usize,
    pub(crate) tokens_per_second: f64,
}

/// An evaluation's line in the file.
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
    /// Goes on with a file: what came after the step is forgotten, since it is done again.
    pub(crate) fn open(path: &Path, until: u64) -> Result<Self, CommandError> {
        let mut record = Self::default();
        if let Ok(file) = File::open(path) {
            for line in BufReader::new(file).lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(MetricsLine::Step(line)) if line.step <= until => record.steps.push(line),
                    // What was evaluated at the step itself is not evaluated again.
                    Ok(MetricsLine::Eval(line)) if line.step <= until => record.evals.push(line),
                    _ => {}
                }
            }
        }
        let shown = path.display().to_string();
        let file = File::create(path).map_err(|why| CommandError::file("written", &shown, &why))?;
        record.file = Some((BufWriter::new(file), shown));
        let mut evals = record.evals.clone().into_iter().peekable();
        for step in record.steps.clone() {
            while let Some(eval) = evals.next_if(|eval| eval.step < step.step) {
                record.write(&eval)?;
            }
            record.write(&step)?;
        }
        for eval in evals {
            record.write(&eval)?;
        }
        Ok(record)
    }

    pub(crate) fn step(&mut self, line: StepLine) -> Result<(), CommandError> {
        self.write(&line)?;
        self.steps.push(line);
        Ok(())
    }

    pub(crate) fn eval(&mut self, line: EvalLine) -> Result<(), CommandError> {
        self.write(&line)?;
        self.evals.push(line);
        Ok(())
    }

    /// A line at a time, so that whoever follows the file sees whole ones.
    fn write(&mut self, line: &impl Serialize) -> Result<(), CommandError> {
        let Some((file, shown)) = &mut self.file else { return Ok(()) };
        let text = serde_json::to_string(line).unwrap_or_default();
        let written = writeln!(file, "{text}").and_then(|()| file.flush());
        written.map_err(|why| CommandError::file("written", shown, &why))
    }

    /// All tokens that were trained on.
    pub(crate) fn tokens(&self) -> usize {
        self.steps.iter().map(|line| line.tokens).sum()
    }
}
