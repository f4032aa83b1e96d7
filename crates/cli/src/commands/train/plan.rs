//! [`TrainPlan`]: which examples a step sees and how far it goes, from a few numbers alone.
//!
//! The same numbers give the same plan on every machine and in every version, so that a run that
//! goes on after an interruption sees what it would have seen.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How the learning rate changes after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Schedule {
    /// It stays
    Constant,
    /// It falls evenly to 0
    Linear,
    /// It falls to 0, slowly at first and at the end
    Cosine,
}

/// What a run does, step by step. Steps are counted from 0.
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
    /// Steps until every example was seen once.
    pub(crate) fn steps_per_epoch(&self) -> u64 {
        self.examples.div_ceil(self.batch_size.max(1)).max(1) as u64
    }

    /// The examples of a step.
    pub(crate) fn batch(&self, step: u64) -> Vec<usize> {
        let (epoch, within) = (step / self.steps_per_epoch(), step % self.steps_per_epoch());
        let start = usize::try_from(within).unwrap_or(0) * self.batch_size;
        let order = shuffled(self.examples, self.seed, epoch);
        order.into_iter().skip(start).take(self.batch_size).collect()
    }

    /// How many passes over the examples are done after so many steps.
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    pub(crate) fn epochs(&self, steps: u64) -> f64 {
        steps as f64 / self.steps_per_epoch() as f64
    }

    /// How far a step goes.
    #[expect(clippy::cast_precision_loss, reason = "steps are few")]
    pub(crate) fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.learning_rate * (step + 1) as f64 / self.warmup as f64;
        }
        let rest = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / rest).min(1.0);
        let part = match self.schedule {
            Schedule::Constant => 1.0,
            Schedule::Linear => 1.0 - done,
            Schedule::Cosine => (1.0 + (std::f64::consts::PI * done).cos()) / 2.0,
        };
        self.learning_rate * part
    }
}

/// The numbers below `count` in an order that depends on the seed and the round alone.
pub(crate) fn shuffled(count: usize, seed: u64, round: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = seed ^ round.wrapping_mul(0xD1B5_4A32_D192_ED03);
    for last in (1..count).rev() {
        // SplitMix64, written out so that it never changes.
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
    fn an_epoch_sees_every_example_once_and_the_next_in_another_order() {
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
    fn shuffles_are_the_same_for_ever() {
        assert_eq!(shuffled(8, 1, 0), [4, 3, 2, 7, 5, 6, 0, 1]);
        assert_eq!(shuffled(8, 1, 1), [5, 1, 2, 4, 3, 0, 6, 7]);
    }

    #[test]
    fn rates_rise_and_fall() {
        let rates: Vec<f64> = (0..9).map(|step| plan().rate(step)).collect();
        assert_eq!(rates[2], 1.0);
        assert!(rates[0] < rates[1] && rates[1] < rates[2], "{rates:?}");
        assert!(rates.windows(2).skip(3).all(|pair| pair[0] > pair[1]), "{rates:?}");
        assert!(rates[8] > 0.0, "the last step moves too");
        let cosine = TrainPlan { schedule: Schedule::Cosine, ..plan() };
        assert_eq!(cosine.rate(3), 1.0);
        assert!(cosine.rate(8) < plan().rate(8));
        let constant = TrainPlan { schedule: Schedule::Constant, warmup: 0, ..plan() };
        assert!((0..9).all(|step| constant.rate(step) == 1.0));
    }
}
