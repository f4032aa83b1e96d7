//! Random numbers that belong to one sample of one request.

use crate::rng::ChaCha8;

/// The random numbers of one sample: number `n` is the same whatever was drawn elsewhere.
///
/// One number is used per token, also where none is needed, so a longer sample begins like a
/// shorter one.
///
/// ```
/// use tinkex_engine::decode::SampleRng;
///
/// let (mut a, mut b) = (SampleRng::sample(7, 0), SampleRng::sample(7, 0));
/// assert_eq!(a.uniform(), b.uniform());
/// assert_ne!(SampleRng::sample(7, 1).uniform(), SampleRng::sample(7, 0).uniform());
/// ```
#[derive(Clone, Debug)]
pub struct SampleRng(ChaCha8);

impl SampleRng {
    /// For sample `number` of a request.
    #[must_use]
    pub fn sample(seed: u64, number: u32) -> Self {
        Self(ChaCha8::new(seed, u64::from(number)))
    }

    /// For alternatives to the tokens of a prompt; `number` tells lists of one request apart.
    #[must_use]
    pub fn alternatives(seed: u64, number: u32) -> Self {
        Self(ChaCha8::new(seed, (1 << 32) + u64::from(number)))
    }

    /// The next number: from 0 up to but not including 1, in steps of 2⁻⁵³.
    pub fn uniform(&mut self) -> f64 {
        let whole = self.0.next_u64() >> 11;
        whole as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_evenly_and_streams_differ() {
        let mut seen = std::collections::BTreeSet::new();
        for number in 0..4 {
            for mut stream in [SampleRng::sample(3, number), SampleRng::alternatives(3, number)] {
                let draws: Vec<f64> = (0..2000).map(|_| stream.uniform()).collect();
                assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
                let mean = draws.iter().sum::<f64>() / 2000.0;
                assert!((mean - 0.5).abs() < 0.03, "{mean}");
                assert!(seen.insert(draws[0].to_bits()));
            }
        }
    }
}
