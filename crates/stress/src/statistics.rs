//! Statistics of measurements.

use std::time::Duration;

/// Returns the value below which the fraction `share` of all values lies; zero without values.
pub(crate) fn quantile(values: &mut [Duration], share: f64) -> Duration {
    values.sort_unstable();
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a number of values is small and not negative"
    )]
    let index = (values.len() as f64 * share) as usize;
    values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// Returns Jain's fairness index: 1 if all values are equal, and 1/n if one of n values is not zero.
pub(crate) fn jain_index(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    if squares <= 0.0 {
        return 1.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "a small number of users")]
    let count = values.len() as f64;
    sum * sum / (count * squares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_set() {
        let mut values: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!(quantile(&mut values, 0.5), Duration::from_millis(51));
        assert_eq!(quantile(&mut values, 0.99), Duration::from_millis(100));
        assert_eq!(quantile(&mut values, 1.0), Duration::from_millis(100));
        assert_eq!(quantile(&mut [], 0.5), Duration::ZERO);
    }

    #[test]
    fn the_index_is_one_for_equal_values() {
        assert!((jain_index(&[3.0; 20]) - 1.0).abs() < 1e-12);
        assert!((jain_index(&[5.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert!((jain_index(&[0.0; 3]) - 1.0).abs() < 1e-12);
    }
}
