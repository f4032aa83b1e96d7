//! [`TrainPlan`]: the examples and the learning rate of every step.
//!
//! A plan depends only on its fields and is the same on every machine and in every version, so that
//! a resumed run computes what an uninterrupted run would have computed.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Learning-rate schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Schedule {
    /// Keep the learning rate constant
    Constant,
    /// Decrease it linearly to 0
    Linear,
    /// Decrease it to 0 along a cosine
    Cosine,
}

/// Plan of a run. Steps count from 0.
#[derive(Clone, Debug)]
pub(crate) struct TrainPlan {
    pub(crate) examples: usize,
    pub(crate) batch_size: usize,
    pub(crate) steps: u64,
    pub(crate) seed: u64,
    pub(crate) learning_rate: f64,
    pub(crate) schedule: Schedule,
    pub(crate) warmup: u64,
}

impl TrainPlan {
    /// Returns the number of steps of one pass over the examples.
    pub(crate) fn steps_per_epoch(&self) -> u64 {
        self.examples.div_ceil(self.batch_size.max(1)).max(1) as u64
    }

    /// Returns the indices of the examples of a step.
    pub(crate) fn batch(&self, step: u64) -> Vec<usize> {
        let (epoch, batch) = (step / self.steps_per_epoch(), step % self.steps_per_epoch());
        let start = usize::try_from(batch).unwrap_or(0) * self.batch_size;
        let order = shuffled(self.examples, self.seed, epoch);
        order.into_iter().skip(start).take(self.batch_size).collect()
    }

    /// Returns the number of passes over the examples after `steps` steps.
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    pub(crate) fn epochs(&self, steps: u64) -> f64 {
        steps as f64 / self.steps_per_epoch() as f64
    }

    /// Returns the learning rate of a step.
    #[expect(clippy::cast_precision_loss, reason = "a count of steps")]
    pub(crate) fn learning_rate_at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.learning_rate * (step + 1) as f64 / self.warmup as f64;
        }
        let decay_steps = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / decay_steps).min(1.0);
        let factor = match self.schedule {
            Schedule::Constant => 1.0,
            Schedule::Linear => 1.0 - done,
            Schedule::Cosine => (1.0 + (std::f64::consts::PI * done).cos()) / 2.0,
        };
        self.learning_rate * factor
    }
}

/// Returns the numbers below `count` in an order that depends only on `seed` and `epoch`.
pub(crate) fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = seed ^ epoch.wrapping_mul(0xD1B5_4A32_D192_ED03);
    for last in (1..count).rev() {
        // SplitMix64. A library might change its generator and with it the order of resumed runs.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        let choice = mixed % (last as u64 + 1);
        order.swap(last, usize::try_from(choice).unwrap_or(0));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> TrainPlan {
        TrainPlan {
            examples: 10,
            batch_size: 4,
            steps: 9,
            seed: 7,
            learning_rate: 1.0,
            schedule: Schedule::Linear,
            warmup: 3,
        }
    }

    #[test]
    fn every_epoch_has_all_examples_in_a_new_order() {
        let plan = plan();
        let epoch = |first: u64| (first..first + 3).flat_map(|step| plan.batch(step));
        let (one, two): (Vec<_>, Vec<_>) = (epoch(0).collect(), epoch(3).collect());
        assert_ne!(one, two);
        for mut order in [one, two] {
            order.sort_unstable();
            assert_eq!(order, (0..10).collect::<Vec<_>>());
        }
    }

    #[test]
    fn shuffles_never_change() {
        assert_eq!(shuffled(8, 1, 0), [4, 3, 2, 7, 5, 6, 0, 1]);
        assert_eq!(shuffled(8, 1, 1), [5, 1, 2, 4, 3, 0, 6, 7]);
    }

    #[test]
    fn the_learning_rate_warms_up_and_decays() {
        let rates: Vec<f64> = (0..9).map(|step| plan().learning_rate_at(step)).collect();
        assert_eq!(rates[2], 1.0);
        assert!(rates[0] < rates[1] && rates[1] < rates[2], "{rates:?}");
        assert!(rates.windows(2).skip(3).all(|pair| pair[0] > pair[1]), "{rates:?}");
        assert!(rates[8] > 0.0, "the last step has a positive rate");
        let cosine = TrainPlan { schedule: Schedule::Cosine, ..plan() };
        assert_eq!(cosine.learning_rate_at(3), 1.0);
        assert!(cosine.learning_rate_at(8) < plan().learning_rate_at(8));
        let constant = TrainPlan { schedule: Schedule::Constant, warmup: 0, ..plan() };
        assert!((0..9).all(|step| constant.learning_rate_at(step) == 1.0));
    }
}
