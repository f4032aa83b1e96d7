//! [`RunLog`]: the metrics of a run, in memory for plots and reports and in the files of the run
//! folder.

use std::path::{Path, PathBuf};

use tinkex_runs::{
    EventLogFormat, METRICS_FILE, MetricsLine, PLOT_FILE, RunFolder, RunMethod, RunRecord, StepLog,
    metric,
};

use crate::args::OutputFormat;
use crate::commands::plot::{Plot, TerminalPlot};
use crate::context::CommandContext;
use crate::error::CommandError;

use super::event_log::{EVENT_FILE, EventLog};

/// Metric that a method optimizes, for plots and reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MainMetric {
    pub(crate) name: &'static str,
    /// Name of the metric of the evaluation data.
    pub(crate) eval_name: &'static str,
    /// Name with its unit, for the axis of a plot.
    axis: &'static str,
}

impl MainMetric {
    pub(crate) fn of(method: RunMethod) -> Self {
        match method {
            RunMethod::Rl => {
                Self { name: metric::REWARD, eval_name: metric::EVAL_REWARD, axis: "reward" }
            }
            RunMethod::Dpo => {
                Self { name: metric::LOSS, eval_name: metric::EVAL_LOSS, axis: "loss per pair" }
            }
            _ => Self { name: metric::LOSS, eval_name: metric::EVAL_LOSS, axis: "loss per token" },
        }
    }
}

/// Metrics of a run.
pub(crate) struct RunLog {
    folder: PathBuf,
    /// File of the plot.
    pub(crate) plot_file: PathBuf,
    title: String,
    pub(crate) main: MainMetric,
    /// Open `metrics.jsonl`; `None` if the training loop writes it.
    metrics: Option<StepLog>,
    /// Open event file with the same metrics.
    events: Option<EventLog>,
    steps: Vec<MetricsLine>,
    evaluations: Vec<MetricsLine>,
}

impl RunLog {
    /// Opens the files of a run that continues after its last checkpoint. Later lines are removed,
    /// because their steps are repeated.
    pub(crate) fn open(folder: &RunFolder) -> Result<Self, CommandError> {
        let step = folder.record.progress.step();
        let mut log = Self::new(folder.path(), &folder.record)?;
        log.metrics = Some(folder.metrics(step, |line| log.keep(line))?);
        Ok(log)
    }

    /// Reads the metrics of a run whose training loop has opened the files and writes them.
    pub(crate) fn follow(folder: &Path, record: &RunRecord) -> Result<Self, CommandError> {
        let mut log = Self::new(folder, record)?;
        let path = folder.join(METRICS_FILE);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| CommandError::file("read", path.display(), &error))?;
        for line in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
            log.keep(line);
        }
        Ok(log)
    }

    fn new(folder: &Path, record: &RunRecord) -> Result<Self, CommandError> {
        let settings = &record.settings;
        let files = settings.data.files.iter().filter_map(|file| file.file_name());
        let names: Vec<_> = files.map(|name| name.to_string_lossy()).collect();
        let events = match settings.event_log {
            Some(EventLogFormat::Tensorboard) => {
                let path = folder.join(EVENT_FILE);
                let events = EventLog::open(&path, record.progress.step());
                Some(events.map_err(|error| CommandError::file("write", path.display(), &error))?)
            }
            _ => None,
        };
        Ok(Self {
            folder: folder.to_owned(),
            plot_file: settings.plot.clone().unwrap_or_else(|| folder.join(PLOT_FILE)),
            title: format!("{} on {}", settings.base_model, names.join(", ")),
            main: MainMetric::of(settings.method.method()),
            metrics: None,
            events,
            steps: Vec::new(),
            evaluations: Vec::new(),
        })
    }

    fn keep(&mut self, line: MetricsLine) {
        if line.is_evaluation() {
            self.evaluations.push(line);
        } else {
            self.steps.push(line);
        }
    }

    /// Appends a line to the files and keeps it for the plot.
    pub(crate) fn add(&mut self, line: MetricsLine) -> Result<(), CommandError> {
        if let Some(metrics) = &mut self.metrics {
            let written = metrics.append(&line);
            written.map_err(|error| self.write_error(METRICS_FILE, &error))?;
        }
        if let Some(events) = &mut self.events {
            let written = events.append(&line);
            written.map_err(|error| self.write_error(EVENT_FILE, &error))?;
        }
        self.keep(line);
        Ok(())
    }

    fn write_error(&self, name: &str, error: &std::io::Error) -> CommandError {
        CommandError::file("write", self.folder.join(name).display(), error)
    }

    /// Returns the path of the event file, if the run has one.
    pub(crate) fn event_file(&self) -> Option<PathBuf> {
        self.events.as_ref().map(|_| self.folder.join(EVENT_FILE))
    }

    /// Returns the metrics of the first step.
    pub(crate) fn first_step(&self) -> Option<&MetricsLine> {
        self.steps.first()
    }

    /// Returns the metrics of the last step.
    pub(crate) fn last_step(&self) -> Option<&MetricsLine> {
        self.steps.last()
    }

    /// Returns the metrics of the first evaluation.
    pub(crate) fn first_evaluation(&self) -> Option<&MetricsLine> {
        self.evaluations.first()
    }

    /// Returns the metrics of the last evaluation.
    pub(crate) fn last_evaluation(&self) -> Option<&MetricsLine> {
        self.evaluations.last()
    }

    /// Returns the number of tokens of all steps.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a sum of counts, far below 2^53"
    )]
    pub(crate) fn tokens(&self) -> u64 {
        self.steps.iter().filter_map(|line| line.get(metric::TOKENS)).sum::<f64>() as u64
    }

    /// Replaces the file of the plot.
    pub(crate) fn plot(&self) -> Result<(), CommandError> {
        self.plot_of(self.title.clone()).write(&self.plot_file)
    }

    #[expect(clippy::cast_precision_loss, reason = "coordinates of a plot")]
    fn plot_of(&self, title: String) -> Plot {
        let steps = self.steps.iter().filter_map(|line| {
            let value = line.get(self.main.name)?;
            Some((line.step as f64, value))
        });
        let evaluations = self.evaluations.iter().filter_map(|line| {
            let value = line.get(self.main.eval_name)?;
            Some((line.step as f64, value))
        });
        Plot::new(title, self.main.axis, steps, evaluations)
    }

    /// Returns the curve of the run for a terminal; `None` if the result goes elsewhere.
    pub(crate) fn curve(&self, context: &CommandContext<'_>) -> Option<String> {
        let wanted = !context.globals.quiet && context.settings.format == OutputFormat::Table;
        context.environment.terminals.out.filter(|_| wanted)?;
        Some(TerminalPlot::for_output(context).draw(&self.plot_of(String::new())))
    }
}
