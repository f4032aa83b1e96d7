//! Advantages of the completions of one group.

use tinkex_runs::Advantage;

/// Computes the advantage of each reward. Returns `None` if all rewards are equal: such a group has
/// no gradient.
pub(super) fn estimate(advantage: Advantage, rewards: &[f64]) -> Option<Vec<f64>> {
    let (mean, std) = mean_and_std(rewards);
    if rewards.windows(2).all(|pair| pair[0] == pair[1]) {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "no group has 2^53 completions")]
    let count = rewards.len() as f64;
    let factor = match advantage {
        Advantage::GroupNormalized => 1.0 / std.max(1e-12),
        // r − (n·mean − r) / (n − 1) = (r − mean) · n / (n − 1)
        Advantage::LeaveOneOut => count / (count - 1.0),
        // The mean of the group is the baseline of every other estimator.
        _ => 1.0,
    };
    Some(rewards.iter().map(|reward| (reward - mean) * factor).collect())
}

/// Returns the mean and the population standard deviation; 0 for no numbers.
pub(super) fn mean_and_std(numbers: &[f64]) -> (f64, f64) {
    if numbers.is_empty() {
        return (0.0, 0.0);
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of completions")]
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let variance = numbers.iter().map(|number| (number - mean).powi(2)).sum::<f64>() / count;
    (mean, variance.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advantages_are_relative_to_the_group() {
        let rewards = [1.0, 0.0, 0.0, 1.0];
        assert_eq!(estimate(Advantage::GroupMean, &rewards).unwrap(), [0.5, -0.5, -0.5, 0.5]);
        assert_eq!(estimate(Advantage::GroupNormalized, &rewards).unwrap(), [1.0, -1.0, -1.0, 1.0]);
        let rloo = estimate(Advantage::LeaveOneOut, &rewards).unwrap();
        assert!((rloo[0] - (1.0 - 1.0 / 3.0)).abs() < 1e-12, "{rloo:?}");
    }

    #[test]
    fn constant_groups_have_no_advantages() {
        for rewards in [&[0.3, 0.3, 0.3][..], &[1.0], &[]] {
            assert_eq!(estimate(Advantage::GroupNormalized, rewards), None);
        }
    }
}
