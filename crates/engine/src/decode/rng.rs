//! [`SampleRng`]: the random numbers of one completion.

use crate::rng::ChaCha8;

/// Random numbers of one completion of a request.
///
/// Every token consumes exactly one number, even at temperature 0. A longer completion therefore
/// starts with the tokens of a shorter one, and the other completions of a batch have no influence.
///
/// ```
/// use tinkex_engine::decode::SampleRng;
///
/// let mut a = SampleRng::sample(7, 0);
/// let mut b = SampleRng::sample(7, 0);
/// assert_eq!(a.uniform(), b.uniform());
/// assert_ne!(SampleRng::sample(7, 1).uniform(), SampleRng::sample(7, 0).uniform());
/// ```
#[derive(Clone, Debug)]
pub struct SampleRng(ChaCha8);

impl SampleRng {
    /// Creates the generator for the completion with index `number` of a request.
    #[must_use]
    pub fn sample(seed: u64, number: u32) -> Self {
        Self(ChaCha8::new(seed, u64::from(number)))
    }

    /// Creates the generator for alternatives to the prompt's tokens. `number` distinguishes
    /// several lists of alternatives of one request.
    #[must_use]
    pub fn alternatives(seed: u64, number: u32) -> Self {
        Self(ChaCha8::new(seed, (1 << 32) + u64::from(number)))
    }

    /// Returns the next uniform number in [0, 1), a multiple of 2⁻⁵³.
    pub fn uniform(&mut self) -> f64 {
        let whole = self.0.next_u64() >> 11;
        whole as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_uniform_and_streams_differ() {
        let mut first_numbers = std::collections::BTreeSet::new();
        for number in 0..4 {
            for mut rng in [SampleRng::sample(3, number), SampleRng::alternatives(3, number)] {
                let draws: Vec<f64> = (0..2000).map(|_| rng.uniform()).collect();
                assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
                let mean = draws.iter().sum::<f64>() / 2000.0;
                assert!((mean - 0.5).abs() < 0.03, "{mean}");
                assert!(first_numbers.insert(draws[0].to_bits()));
            }
        }
    }
}
