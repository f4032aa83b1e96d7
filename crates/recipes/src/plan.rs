//! [`TrainPlan`]: the examples and the learning rate of every step.
//!
//! A plan depends only on its fields and is the same on every machine and in every version, so that
//! a resumed run computes what an uninterrupted run would have computed.

use tinkex_runs::Schedule;

/// Examples and learning rate of every step of a run. Steps count from 0.
#[derive(Clone, Debug)]
pub struct TrainPlan {
    /// Number of examples.
    pub examples: usize,
    /// Number of examples per step.
    pub batch_size: usize,
    /// Number of steps.
    pub steps: u64,
    /// Seed of the order of the examples.
    pub seed: u64,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Schedule after the warm-up.
    pub schedule: Schedule,
    /// Number of steps over which the learning rate rises to its peak.
    pub warmup: u64,
}

impl TrainPlan {
    /// Returns the number of steps of one pass over the examples.
    #[must_use]
    pub fn steps_per_epoch(&self) -> u64 {
        self.examples.div_ceil(self.batch_size.max(1)).max(1) as u64
    }

    /// Returns the indices of the examples of a step.
    #[must_use]
    pub fn batch(&self, step: u64) -> Vec<usize> {
        let epoch = step / self.steps_per_epoch();
        let batch = step % self.steps_per_epoch();
        let start = usize::try_from(batch).unwrap_or(0) * self.batch_size;
        let order = shuffled(self.examples, self.seed, epoch);
        order.into_iter().skip(start).take(self.batch_size).collect()
    }

    /// Returns the number of passes over the examples after `steps` steps.
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    #[must_use]
    pub fn epochs(&self, steps: u64) -> f64 {
        steps as f64 / self.steps_per_epoch() as f64
    }

    /// Returns the learning rate of a step.
    #[expect(clippy::cast_precision_loss, reason = "a count of steps")]
    #[must_use]
    pub fn learning_rate_at(&self, step: u64) -> f64 {
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
#[must_use]
pub fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = seed ^ epoch.wrapping_mul(0xD1B5_4A32_D192_ED03);
    for last in (1..count).rev() {
        state = state.wrapping_add(GOLDEN_RATIO);
        let choice = mix(state) % (last as u64 + 1);
        order.swap(last, usize::try_from(choice).unwrap_or(0));
    }
    order
}

/// Increment of the SplitMix64 generator.
const GOLDEN_RATIO: u64 = 0x9E37_79B9_7F4A_7C15;

/// Applies the output function of SplitMix64 to `state`. Implemented here, because a new version of
/// a library might use another generator, which would change the order of the examples in resumed
/// runs.
fn mix(mut state: u64) -> u64 {
    state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

/// Returns a seed that depends only on `seed` and `path`, where `path` is for example the step,
/// group and turn. Seeds of different paths are statistically independent.
pub(super) fn derive_seed(seed: u64, path: &[u64]) -> u64 {
    path.iter().fold(mix(seed.wrapping_add(GOLDEN_RATIO)), |state, part| {
        mix(state.wrapping_add(GOLDEN_RATIO) ^ part.wrapping_mul(0xD1B5_4A32_D192_ED03))
    })
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
        let one: Vec<_> = epoch(0).collect();
        let two: Vec<_> = epoch(3).collect();
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
