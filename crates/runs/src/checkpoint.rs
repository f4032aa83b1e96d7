//! [`SavedCheckpoint`]: the checkpoints of a run, and which of them to delete.

use serde::{Deserialize, Serialize};
use tinkex_wire::TinkerPath;

/// Checkpoint to resume a run from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SavedCheckpoint {
    /// Number of steps after which the checkpoint was saved.
    pub step: u64,
    /// Path of the training checkpoint.
    pub path: TinkerPath,
    /// Mean reward of the checkpoint's weights, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
}

impl SavedCheckpoint {
    /// Creates the record of a checkpoint that was saved after `step` steps.
    #[must_use]
    pub fn new(step: u64, path: TinkerPath) -> Self {
        Self { step, path, reward: None }
    }
}

/// Returns the name of the checkpoint after `step` steps: `step-000030`.
#[must_use]
pub fn checkpoint_name(step: u64) -> String {
    format!("step-{step:06}")
}

/// Removes checkpoints from `saved` except the latest `keep` (at least 1) and the best,
/// which has the highest reward. Returns the removed ones. `saved` is in the order of steps.
///
/// Store the shortened list durably before you delete the checkpoints on the server: after a crash
/// in between, the list must not refer only to deleted checkpoints.
pub fn rotate_checkpoints(saved: &mut Vec<SavedCheckpoint>, keep: usize) -> Vec<SavedCheckpoint> {
    let best = best_checkpoint(saved).map(|best| best.step);
    let excess = saved.len().saturating_sub(keep.max(1));
    let mut index = 0;
    saved
        .extract_if(.., |checkpoint| {
            index += 1;
            index <= excess && Some(checkpoint.step) != best
        })
        .collect()
}

/// Returns the checkpoint with the highest reward. If several have the same reward, returns the
/// latest of them.
#[must_use]
pub fn best_checkpoint(saved: &[SavedCheckpoint]) -> Option<&SavedCheckpoint> {
    let measured = saved.iter().filter(|checkpoint| checkpoint.reward.is_some());
    measured.max_by(|a, b| {
        let a = a.reward.unwrap_or(f64::MIN);
        let b = b.reward.unwrap_or(f64::MIN);
        a.total_cmp(&b)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(rewards: &[Option<f64>]) -> Vec<SavedCheckpoint> {
        let path: TinkerPath = "tinker://run/weights/x".parse().unwrap();
        let checkpoint = |(step, reward): (usize, &Option<f64>)| SavedCheckpoint {
            reward: *reward,
            ..SavedCheckpoint::new(step as u64, path.clone())
        };
        rewards.iter().enumerate().map(checkpoint).collect()
    }

    #[test]
    fn the_last_checkpoints_and_the_best_are_kept() {
        let steps = |list: &[SavedCheckpoint]| list.iter().map(|one| one.step).collect::<Vec<_>>();
        let mut list = saved(&[Some(0.1), Some(0.9), Some(0.3), None]);
        assert_eq!(steps(&rotate_checkpoints(&mut list, 2)), [0]);
        assert_eq!(steps(&list), [1, 2, 3]);
        let mut list = saved(&[None, None, None]);
        assert_eq!(steps(&rotate_checkpoints(&mut list, 0)), [0, 1]);
        let list = saved(&[Some(0.5), Some(0.5), None]);
        assert_eq!(best_checkpoint(&list).unwrap().step, 1);
    }
}
