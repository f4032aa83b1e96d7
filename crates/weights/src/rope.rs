//! [`Rope`]: the rotary position embedding of a model and its context extension.

use std::f64::consts::TAU;

use serde::Deserialize;

/// The rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths; more than 1.
    pub theta: f64,
    /// Extension to contexts longer than the one the model was pre-trained with.
    pub scaling: RopeScaling,
}

/// Method of extending a [`Rope`] to longer contexts.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No extension.
    None,
    /// Multiplies every wavelength by the same factor.
    Linear {
        /// Factor of the wavelengths.
        factor: f64,
    },
    /// Llama 3.1: multiplies long wavelengths by the factor, keeps short ones, and interpolates
    /// between them.
    Llama3 {
        /// Factor of the wavelengths.
        factor: f64,
        /// Wavelengths above `original / low` are multiplied by the whole factor.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Context length of the pre-training, in tokens.
        original: f64,
    },
    /// YaRN: multiplies the wavelengths of slow dimensions by the factor, keeps those of fast ones,
    /// interpolates between them, and scales the attention scores.
    Yarn {
        /// Factor of the wavelengths.
        factor: f64,
        /// Number of rotations within the original context above which a dimension keeps its
        /// wavelength.
        beta_fast: f64,
        /// Number of rotations within the original context below which the whole factor is applied.
        beta_slow: f64,
        /// Context length of the pre-training, in tokens.
        original: f64,
        /// Factor of the cosines and sines.
        attention_factor: f64,
        /// Whether the ends of the interpolation range are rounded to whole dimensions.
        truncate: bool,
    },
}

impl Rope {
    /// Returns the frequency of each of the `head_dim / 2` pairs of dimensions, in radians per
    /// position.
    #[must_use]
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = (0..head_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / head_dim as f64));
        match self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Llama3 { factor, low, high, original } => plain
                .map(|frequency| {
                    let wavelength = TAU / frequency;
                    if wavelength < original / high {
                        frequency
                    } else if wavelength > original / low {
                        frequency / factor
                    } else {
                        let keep = (original / wavelength - low) / (high - low);
                        (1.0 - keep) * frequency / factor + keep * frequency
                    }
                })
                .collect(),
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original, truncate, .. } => {
                // The dimension that makes this many rotations within the original context.
                let dimension = |rotations: f64| {
                    head_dim as f64 * (original / (rotations * TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(head_dim as f64 - 1.0);
                if low == high {
                    high += 0.001;
                }
                plain
                    .enumerate()
                    .map(|(i, frequency)| {
                        let weight = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        frequency / factor * weight + frequency * (1.0 - weight)
                    })
                    .collect()
            }
        }
    }

    /// Returns the factor of the cosines and sines, which is 1 except for [`RopeScaling::Yarn`].
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

/// Rotary settings of a `config.json`, in either of the two forms that `transformers` has used.
#[derive(Debug, Default, Deserialize)]
pub(super) struct RawRope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    partial_rotary_factor: Option<f64>,
}

impl RawRope {
    /// Validates the settings. `theta` is the top-level `rope_theta` of the older form; `positions`
    /// is the model's context length.
    pub(super) fn validate(self, theta: Option<f64>, positions: usize) -> Result<Rope, String> {
        let theta = self.rope_theta.or(theta).unwrap_or(10_000.0);
        positive("rope_theta", Some(theta))?;
        if theta <= 1.0 {
            return Err(format!("rope_theta is {theta}, expected more than 1"));
        }
        if self.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            return Err("partial_rotary_factor other than 1 is not supported".to_owned());
        }
        let original = self.original_max_position_embeddings;
        let kind = self.rope_type.as_deref().unwrap_or("default");
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: positive("factor", self.factor)? },
            "llama3" => {
                let low = positive("low_freq_factor", self.low_freq_factor)?;
                let high = positive("high_freq_factor", self.high_freq_factor)?;
                if high <= low {
                    return Err(format!(
                        "high_freq_factor is {high}, expected more than low_freq_factor {low}"
                    ));
                }
                let factor = positive("factor", self.factor)?;
                let original = positive("original_max_position_embeddings", original)?;
                RopeScaling::Llama3 { factor, low, high, original }
            }
            "yarn" => {
                if self.mscale.is_some() || self.mscale_all_dim.is_some() {
                    return Err("yarn with mscale is not supported".to_owned());
                }
                let factor = positive("factor", self.factor)?;
                let attention = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
                RopeScaling::Yarn {
                    factor,
                    beta_fast: positive("beta_fast", self.beta_fast.or(Some(32.0)))?,
                    beta_slow: positive("beta_slow", self.beta_slow.or(Some(1.0)))?,
                    original: positive(
                        "original_max_position_embeddings",
                        original.or(Some(positions as f64)),
                    )?,
                    attention_factor: positive(
                        "attention_factor",
                        self.attention_factor.or(Some(attention)),
                    )?,
                    truncate: self.truncate.unwrap_or(true),
                }
            }
            other => {
                return Err(format!(
                    "rope_type {other:?} is not supported, expected default, linear, llama3 or yarn"
                ));
            }
        };
        Ok(Rope { theta, scaling })
    }
}

/// Returns the value of a setting, which must be present, finite and positive.
fn positive(name: &str, value: Option<f64>) -> Result<f64, String> {
    match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => Err(format!("{name} is {value}, expected a positive number")),
        None => Err(format!("{name} is missing")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_high_frequencies_and_scales_low_ones() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
        let scaled = Rope { theta: 10_000.0, scaling }.frequencies(10);
        let plain = Rope { theta: 10_000.0, scaling: RopeScaling::None }.frequencies(10);
        assert_eq!(scaled[0], plain[0]);
        assert!(scaled[1] < plain[1] && scaled[1] > plain[1] / 8.0);
        assert_eq!(scaled[4], plain[4] / 8.0);
    }

    /// The expected values were computed by `transformers` with the same settings.
    #[test]
    fn yarn_matches_transformers() {
        let raw: RawRope = serde_json::from_str(
            r#"{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}"#,
        )
        .unwrap();
        let rope = raw.validate(Some(1_000_000.0), 131_072).unwrap();
        let frequencies = rope.frequencies(16);
        for (got, want) in frequencies.iter().zip(YARN) {
            assert!((got - want).abs() <= 1e-6 * want, "{got} instead of {want}");
        }
        assert!((rope.attention_factor() - 1.138_629_436_111_989).abs() < 1e-12);
    }

    const YARN: [f64; 8] = [
        1.0,
        0.177_827_94,
        0.031_622_778,
        0.004_217_559_9,
        0.000_5,
        4.445_698_5e-5,
        7.905_693_6e-6,
        1.405_853_4e-6,
    ];
}
