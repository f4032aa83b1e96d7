//! [`MassHistogram`]: the probability mass of a row of logits by distance from the highest logit.

use super::select::{Candidate, Crossing, best_first, find_crossing};

/// Number of bins.
const BINS: usize = 128;

/// Probability mass (relative to the most probable token) per bin of logits.
///
/// To find the token at which the cumulative mass, in descending order of probability, crosses a
/// threshold, only the tokens of the bin that contains the crossing must be sorted.
#[derive(Clone, Debug, Default)]
pub(super) struct MassHistogram {
    masses: Vec<f64>,
    /// The highest logit.
    top: f32,
    temperature: f64,
    /// Bins per unit of logit.
    density: f32,
    /// Logits below this value are not in the histogram.
    floor: f32,
}

/// Returns the probability of a token divided by the probability of the most probable token, whose
/// logit is `top`.
pub(super) fn weight(logit: f32, top: f32, temperature: f64) -> f64 {
    ((f64::from(logit) - f64::from(top)) / temperature).exp()
}

impl MassHistogram {
    /// Builds the histogram, down to a logit that suffices for a cumulative mass above `goal`.
    pub(super) fn fill(&mut self, logits: &[f32], top: f32, temperature: f64, goal: f64) {
        self.top = top;
        self.temperature = temperature;
        // In a trained model a few tokens near the highest logit have most of the mass. The first
        // pass therefore skips the exponentials of all other tokens.
        // `depth` is the distance of the floor from the highest logit, and `range` is what the bins
        // divide. Both are multiples of the temperature.
        for (depth, range) in [(4.0, 4.0), (f64::INFINITY, 16.0)] {
            #[expect(clippy::cast_possible_truncation, reason = "bins need not be exact")]
            {
                self.floor = (f64::from(top) - depth * temperature) as f32;
                self.density = (BINS as f64 / (range * temperature)) as f32;
            }
            self.masses.clear();
            self.masses.resize(BINS, 0.0);
            let inverse = temperature.recip();
            for &logit in logits {
                if let Some(bin) = self.bin(logit) {
                    self.masses[bin] += ((f64::from(logit) - f64::from(top)) * inverse).exp();
                }
            }
            // The margin covers the rounding errors of sums in another order.
            if self.masses.iter().sum::<f64>() > goal * (1.0 + 1e-9) {
                return;
            }
        }
    }

    /// Returns the bin of a logit, or `None` below the floor. Higher logits have lower bins; the
    /// last bin has no lower bound.
    fn bin(&self, logit: f32) -> Option<usize> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "no logit is above the top, and a cast beyond the range stops at its end"
        )]
        (logit >= self.floor).then(|| (((self.top - logit) * self.density) as usize).min(BINS - 1))
    }

    /// Finds the token at which the cumulative mass, in descending order of probability, exceeds
    /// `goal` (or reaches it, if `reach`). If it never does, returns the last token with nonzero
    /// mass. Tokens after `last`, in the order of [`best_first`], are excluded.
    pub(super) fn find_crossing(
        &self,
        logits: &[f32],
        goal: f64,
        reach: bool,
        last: Option<Candidate>,
        items: &mut Vec<Candidate>,
    ) -> Option<Crossing> {
        let mut before = 0.0;
        let mut found = None;
        for (bin, &mass) in self.masses.iter().enumerate().filter(|(_, mass)| **mass > 0.0) {
            before += found.map_or(0.0, |(_, mass)| mass);
            found = Some((bin, mass));
            let sum = before + mass;
            if if reach { sum >= goal } else { sum > goal } {
                break;
            }
        }
        let (bin, _) = found?;
        let in_bin = |item: &Candidate| {
            self.bin(item.0) == Some(bin) && last.is_none_or(|last| best_first(item, &last).is_le())
        };
        items.clear();
        items.extend(logits.iter().copied().zip(0..).filter(in_bin));
        let weight = |logit: f32| weight(logit, self.top, self.temperature);
        let crossing = find_crossing(items, goal - before, reach, weight)?;
        Some(Crossing { token: crossing.token, through: before + crossing.through })
    }
}
