//! The mass of a row of logits, roughly sorted.

use super::select::{Candidate, Crossing, best_first, pass};

const BINS: usize = 128;

/// How much mass lies how far below the highest logit.
///
/// To find the token at which a running sum over all tokens, best first, passes a goal, only the
/// bin in which that happens has to be sorted.
#[derive(Clone, Debug, Default)]
pub(super) struct MassHistogram {
    masses: Vec<f64>,
    top: f32,
    temperature: f64,
    /// MassHistogram per unit of logits.
    density: f32,
    /// Logits below were not looked at.
    floor: f32,
}

/// What a token weighs beside the likeliest one.
pub(super) fn weight(logit: f32, top: f32, temperature: f64) -> f64 {
    ((f64::from(logit) - f64::from(top)) / temperature).exp()
}

impl MassHistogram {
    /// Takes in logits, as far down as is surely needed to go past `goal`.
    pub(super) fn fill(&mut self, logits: &[f32], top: f32, temperature: f64, goal: f64) {
        (self.top, self.temperature) = (top, temperature);
        // A trained model's mass is within a few units of its highest logit; most tokens are not,
        // and need no exponential.
        for (depth, reach) in [(4.0, 4.0), (f64::INFINITY, 16.0)] {
            #[expect(clippy::cast_possible_truncation, reason = "bins need not be exact")]
            let (floor, density) = (
                (f64::from(top) - depth * temperature) as f32,
                (BINS as f64 / (reach * temperature)) as f32,
            );
            (self.floor, self.density) = (floor, density);
            self.masses.clear();
            self.masses.resize(BINS, 0.0);
            let inverse = temperature.recip();
            for &logit in logits {
                if let Some(bin) = self.bin(logit) {
                    self.masses[bin] += ((f64::from(logit) - f64::from(top)) * inverse).exp();
                }
            }
            // With room for the roundings of sums in another order.
            if self.masses.iter().sum::<f64>() > goal * (1.0 + 1e-9) {
                return;
            }
        }
    }

    /// Which bin a logit is in: better ones in lower bins. The last has all that is beyond.
    fn bin(&self, logit: f32) -> Option<usize> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "no logit is above the top, and a cast beyond the range stops at its end"
        )]
        (logit >= self.floor).then(|| (((self.top - logit) * self.density) as usize).min(BINS - 1))
    }

    /// Finds where the sum over tokens, best first, exceeds `goal` (or reaches it, if `reach`); the
    /// last token of any weight if it never does. Tokens after `last` are not there.
    pub(super) fn pass(
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
        let there = |item: &Candidate| {
            self.bin(item.0) == Some(bin) && last.is_none_or(|last| best_first(item, &last).is_le())
        };
        items.clear();
        items.extend(logits.iter().copied().zip(0..).filter(there));
        let weight = |logit: f32| weight(logit, self.top, self.temperature);
        let passed = pass(items, goal - before, reach, weight)?;
        Some(Crossing { token: passed.token, through: before + passed.through })
    }
}
