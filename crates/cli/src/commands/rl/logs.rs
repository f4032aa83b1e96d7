//! [`RunLogs`]: the files of a run that grow with its steps.

use std::path::{Path, PathBuf};

use tinkex::recipes::StepLog;
use tinkex::recipes::rl::RlReport;

use crate::error::CommandError;

/// The files `metrics.jsonl` and `rollouts.jsonl`.
pub(super) struct RunLogs {
    metrics: StepLog,
    rollouts: StepLog,
    folder: PathBuf,
    pub(super) first: Option<RlReport>,
    pub(super) last: Option<RlReport>,
    pub(super) evals: Vec<f64>,
}

impl RunLogs {
    /// Opens the files of a run that continues after `from` steps.
    pub(super) fn open(folder: &Path, from: u64) -> Result<Self, CommandError> {
        let failed = |error| CommandError::file("open the logs in", folder.display(), &error);
        let mut kept: Vec<RlReport> = Vec::new();
        let keep = |line: &str| kept.extend(serde_json::from_str::<RlReport>(line));
        let metrics = StepLog::open(&folder.join("metrics.jsonl"), from, keep).map_err(failed)?;
        let rollouts =
            StepLog::open(&folder.join("rollouts.jsonl"), from, |_| ()).map_err(failed)?;
        let folder = folder.to_owned();
        let mut logs =
            Self { metrics, rollouts, folder, first: None, last: None, evals: Vec::new() };
        kept.into_iter().for_each(|report| logs.note(report));
        Ok(logs)
    }

    pub(super) fn add(&mut self, report: RlReport) -> Result<(), CommandError> {
        let written = report
            .rollouts
            .iter()
            .try_for_each(|rollout| self.rollouts.append(rollout))
            .and_then(|()| self.metrics.append(&report));
        written.map_err(|error| {
            CommandError::file("write the logs in", self.folder.display(), &error)
        })?;
        self.note(report);
        Ok(())
    }

    fn note(&mut self, report: RlReport) {
        self.evals.extend(report.eval_reward);
        if report.step > 0 {
            self.first.get_or_insert_with(|| report.clone());
            self.last = Some(report);
        }
    }
}
