//! [`RunRecord`]: the contents of `run.json`.

use serde::{Deserialize, Serialize};
use tinkex_wire::{ModelId, Timestamp, TinkerPath};

use crate::checkpoint::SavedCheckpoint;
use crate::error::RunError;
use crate::settings::RunSettings;

/// Version of the run format that this crate writes and reads.
///
/// A change that makes an older program misread a folder raises the version. A new optional field
/// that an older program may ignore does not.
pub const FORMAT_VERSION: u32 = 1;

/// Contents of `run.json`: settings and progress of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunRecord {
    version: u32,
    /// Name of the run.
    pub name: String,
    /// Time at which the run was started.
    pub created: Timestamp,
    /// Settings.
    pub settings: RunSettings,
    /// Changes of the settings when the run was resumed, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<SettingChange>,
    /// Progress.
    pub progress: RunProgress,
}

/// Change of a setting when a run was resumed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "setting", rename_all = "snake_case")]
#[non_exhaustive]
pub enum SettingChange {
    /// Total number of steps.
    Steps {
        /// Time of the resumption.
        time: Timestamp,
        /// Number of steps that were finished at that time.
        at_step: u64,
        /// Total number of steps before the change.
        from: u64,
        /// Total number of steps after the change.
        to: u64,
    },
}

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunProgress {
    /// Id of the training run on the server. Every resumption creates a new training run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<ModelId>,
    /// Checkpoints, oldest first. The run resumes from the last one.
    pub checkpoints: Vec<SavedCheckpoint>,
    /// Sampler checkpoint of the last weights. Set when the run is stopped or finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampler: Option<TinkerPath>,
    /// Whether all steps are finished.
    pub finished: bool,
}

impl RunProgress {
    /// Returns the number of steps to resume from: the step of the last checkpoint, or 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.checkpoints.last().map_or(0, |checkpoint| checkpoint.step)
    }
}

impl RunRecord {
    /// Creates the record of a new run, which starts now.
    #[must_use]
    pub fn new(name: impl Into<String>, settings: RunSettings) -> Self {
        Self {
            version: FORMAT_VERSION,
            name: name.into(),
            created: Timestamp::now(),
            settings,
            changes: Vec::new(),
            progress: RunProgress::default(),
        }
    }

    /// Changes the total number of steps of a resumed run, and records the change. Returns the old
    /// number if it differs.
    ///
    /// # Errors
    /// [`RunError::TooFewSteps`] if the run has already finished `steps` steps.
    pub fn change_steps(&mut self, steps: u64) -> Result<Option<u64>, RunError> {
        let finished = self.progress.step();
        let old = self.settings.steps;
        if steps == old {
            return Ok(None);
        }
        if steps <= finished {
            return Err(RunError::TooFewSteps { steps, finished });
        }
        self.changes.push(SettingChange::Steps {
            time: Timestamp::now(),
            at_step: finished,
            from: old,
            to: steps,
        });
        self.settings.steps = steps;
        self.progress.finished = false;
        Ok(Some(old))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{MethodSettings, SftSettings};

    #[test]
    fn a_run_is_extended_beyond_its_finished_steps_only() {
        let settings = RunSettings::new("m", MethodSettings::Sft(SftSettings::default()));
        let mut record = RunRecord::new("a", settings);
        let path: TinkerPath = "tinker://r:train:0/weights/step-000100".parse().unwrap();
        record.progress.checkpoints.push(SavedCheckpoint::new(100, path));
        record.progress.finished = true;
        assert_eq!(record.change_steps(100).unwrap(), None);
        assert!(record.progress.finished);
        assert!(matches!(
            record.change_steps(50),
            Err(RunError::TooFewSteps { steps: 50, finished: 100 })
        ));
        assert_eq!(record.change_steps(120).unwrap(), Some(100));
        assert!(!record.progress.finished);
        let [SettingChange::Steps { at_step, from, to, .. }] = record.changes[..] else {
            panic!("{:?}", record.changes);
        };
        assert_eq!((at_step, from, to), (100, 100, 120));
    }
}
