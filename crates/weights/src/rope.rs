//! [`Rope`]: the rotary position embedding of a model and its context extension.

use std::f64::consts::TAU;

use crate::json_fields::JsonFields;

/// The rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths; more than 1.
    pub theta: f64,
    /// Extension to contexts longer than the context of the pre-training.
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
    /// Llama 3.1: multiplies long wavelengths by the factor, keeps short wavelengths, and
    /// interpolates in between.
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
    /// Divides the frequency of each pair of dimensions by its own factor. GGUF files store
    /// Llama 3.1's extension in this form.
    Factors(Vec<f64>),
    /// YaRN: multiplies the wavelengths of slow dimensions by the factor, keeps the wavelengths of
    /// fast dimensions, interpolates in between, and scales the attention scores.
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
    /// Reads the rotary settings of a `config.json`, in any of the forms that `transformers` has
    /// used. `max_positions` is the model's context length.
    ///
    /// `rope_scaling` replaces `rope_parameters` as a whole, and `rope_type` replaces `type`.
    pub(super) fn parse(config: JsonFields<'_>, max_positions: usize) -> Result<Self, String> {
        let empty = serde_json::Map::new();
        let settings = match config.object("rope_scaling")? {
            Some(settings) => settings,
            None => config.object("rope_parameters")?.unwrap_or(JsonFields::new(&empty)),
        };
        if let Some(part) = settings
            .number("partial_rotary_factor")?
            .or(config.number("partial_rotary_factor")?)
            .filter(|part| *part != 1.0)
        {
            return Err(format!("partial_rotary_factor is {part}, expected 1"));
        }
        if settings.contains("full_attention") {
            return Err("rotary settings for each type of layer are not supported".to_owned());
        }
        let theta = match settings.number("rope_theta")? {
            Some(theta) => theta,
            None => config.number("rope_theta")?.unwrap_or(10_000.0),
        };
        if !(theta.is_finite() && theta > 1.0) {
            return Err(format!("rope_theta is {theta}, expected more than 1"));
        }
        let kind = match settings.text("rope_type")? {
            Some(kind) => kind,
            None => settings.text("type")?.unwrap_or("default"),
        };
        let original = || {
            let name = "original_max_position_embeddings";
            match config.number(name)? {
                Some(length) => check_positive(&config.path(name), length),
                None => positive_or(settings, name, max_positions as f64),
            }
        };
        let factor = || positive(settings, "factor");
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: factor()? },
            "dynamic" => {
                // Dynamic scaling changes the frequencies only beyond the context length.
                factor()?;
                RopeScaling::None
            }
            "llama3" => {
                let low = positive(settings, "low_freq_factor")?;
                let high = positive(settings, "high_freq_factor")?;
                if high <= low {
                    return Err(format!(
                        "{} is {high}, expected more than low_freq_factor {low}",
                        settings.path("high_freq_factor")
                    ));
                }
                RopeScaling::Llama3 { factor: factor()?, low, high, original: original()? }
            }
            "yarn" => yarn(settings, original()?, max_positions)?,
            other => {
                return Err(format!(
                    "{} {other:?} is not supported, expected default, linear, dynamic, llama3 or \
                     yarn",
                    settings.path("rope_type")
                ));
            }
        };
        Ok(Self { theta, scaling })
    }

    /// Returns the frequency of each of the `head_dim / 2` pairs of dimensions, in radians per
    /// position.
    #[must_use]
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = (0..head_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / head_dim as f64));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Factors(factors) => {
                plain.zip(factors).map(|(frequency, factor)| frequency / factor).collect()
            }
            &RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            &RopeScaling::Llama3 { factor, low, high, original } => plain
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
            &RopeScaling::Yarn { factor, beta_fast, beta_slow, original, truncate, .. } => {
                // Index of the pair of dimensions that makes `rotations` rotations within the
                // original context.
                let dimension = |rotations: f64| {
                    head_dim as f64 * (original / (rotations * TAU)).ln() / (2.0 * self.theta.ln())
                };
                let mut low = dimension(beta_fast);
                let mut high = dimension(beta_slow);
                if truncate {
                    low = low.floor();
                    high = high.ceil();
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

/// Reads the settings of [`RopeScaling::Yarn`].
fn yarn(
    settings: JsonFields<'_>,
    original: f64,
    max_positions: usize,
) -> Result<RopeScaling, String> {
    let factor = match settings.number("factor")? {
        None if settings.contains("factor") => max_positions as f64 / original,
        _ => positive(settings, "factor")?,
    };
    // `transformers` treats 0 in these fields as a missing value.
    let nonzero =
        |name: &str| Ok::<_, String>(settings.number(name)?.filter(|value| *value != 0.0));
    let beta = |name: &str, default: f64| match nonzero(name)? {
        Some(beta) => check_positive(&settings.path(name), beta),
        None => Ok(default),
    };
    let magnitude = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
    let attention = match (nonzero("mscale")?, nonzero("mscale_all_dim")?) {
        (Some(scale), Some(all)) => magnitude(scale) / magnitude(all),
        _ => magnitude(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
        original,
        attention_factor: positive_or(settings, "attention_factor", attention)?,
        truncate: match settings.flag("truncate")? {
            Some(truncate) => truncate,
            None => !settings.contains("truncate"),
        },
    })
}

/// Returns the value of a setting, which must be present, finite and positive.
fn positive(settings: JsonFields<'_>, name: &str) -> Result<f64, String> {
    let path = settings.path(name);
    check_positive(&path, settings.number(name)?.ok_or_else(|| format!("{path} is missing"))?)
}

/// Returns the value of a setting or its default, which must be finite and positive.
fn positive_or(settings: JsonFields<'_>, name: &str, default: f64) -> Result<f64, String> {
    check_positive(&settings.path(name), settings.number(name)?.unwrap_or(default))
}

fn check_positive(path: &str, value: f64) -> Result<f64, String> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(format!("{path} is {value}, expected a positive number"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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

    fn parse(config: &serde_json::Value) -> Result<Rope, String> {
        let fields = config.as_object().unwrap();
        Rope::parse(JsonFields::new(fields), 512)
    }

    /// The expected values were computed by `transformers` 5.22 with the same settings, a head
    /// dimension of 8 and a context of 512 tokens.
    #[test]
    fn settings_are_read_as_by_transformers() {
        let llama3 = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        });
        let with = |mut object: serde_json::Value, name: &str, value: serde_json::Value| {
            object[name] = value;
            object
        };
        let yarn = json!({"rope_type": "yarn", "factor": 4.0});
        let linear = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6});
        let plain = [1.0, 0.100_000_001, 0.009_999_999_78, 0.001_000_000_05];
        let of_llama3 = [1.0, 0.013_042_256_2, 0.001_249_999_97, 0.000_125_000_006];
        let of_yarn = [1.0, 0.0625, 0.002_499_999_94, 0.000_250_000_012];
        let of_linear = [0.5, 0.015_811_389_3, 0.000_500_000_024, 1.581_138_71e-5];
        let log = 1.138_629_436_111_989;
        for (config, frequencies, attention) in [
            (json!({}), plain, 1.0),
            (
                json!({"rope_theta": 500}),
                [1.0, 0.211_474_24, 0.044_721_361_2, 0.009_457_415_9],
                1.0,
            ),
            // Both names of the type: `rope_type` counts.
            (
                json!({"rope_scaling": with(llama3.clone(), "type", json!("llama3"))}),
                of_llama3,
                1.0,
            ),
            (json!({"rope_parameters": with(yarn.clone(), "type", json!("linear"))}), of_yarn, log),
            (
                json!({"rope_scaling": {"type": "linear", "factor": 4.0}}),
                [0.25, 0.025_000_000_4, 0.002_499_999_94, 0.000_250_000_012],
                1.0,
            ),
            (json!({"rope_scaling": {"factor": 2.0}}), plain, 1.0),
            // Both objects: `rope_scaling` counts, and the theta of `rope_parameters` does not.
            (json!({"rope_parameters": linear, "rope_scaling": llama3}), of_llama3, 1.0),
            (
                json!({"rope_parameters": linear, "rope_scaling": llama3, "rope_theta": 5e5}),
                [1.0, 0.004_700_753_84, 0.000_176_776_681, 6.647_869_67e-6],
                1.0,
            ),
            (json!({"rope_parameters": linear, "rope_scaling": {}}), of_linear, 1.0),
            (json!({"rope_parameters": linear, "rope_scaling": false}), of_linear, 1.0),
            (
                json!({"rope_parameters": linear, "rope_scaling": null, "rope_theta": 123.0}),
                of_linear,
                1.0,
            ),
            (
                json!({"rope_parameters": {"rope_type": "default"}, "rope_theta": 123.0}),
                [1.0, 0.300_278_127, 0.090_166_963_6, 0.027_075_167_7],
                1.0,
            ),
            (json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), plain, 1.0),
            // The original context: the top-level field counts, then the field of the object, then
            // the context of the model.
            (
                json!({"rope_scaling": llama3, "original_max_position_embeddings": 100}),
                [1.0, 0.029_753_524_8, 0.001_249_999_97, 0.000_125_000_006],
                1.0,
            ),
            (
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
                [1.0, 0.100_000_001, 0.001_249_999_97, 0.000_125_000_006],
                1.0,
            ),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": null,
                    "original_max_position_embeddings": 128}}),
                of_yarn,
                log,
            ),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7,
                    "mscale_all_dim": 1.0}}),
                of_yarn,
                0.963_474_656_886_082_6,
            ),
            (json!({"rope_scaling": with(yarn.clone(), "mscale", json!(0.7))}), of_yarn, log),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.0,
                    "mscale_all_dim": 1.0, "beta_fast": 0, "beta_slow": null}}),
                of_yarn,
                log,
            ),
            (
                json!({"rope_scaling": with(yarn.clone(), "truncate", json!(null))}),
                [1.0, 0.070_398_636_2, 0.002_499_999_94, 0.000_250_000_012],
                log,
            ),
        ] {
            let rope = parse(&config).unwrap_or_else(|error| panic!("{config}: {error}"));
            for (got, want) in rope.frequencies(8).iter().zip(frequencies) {
                assert!((got - want).abs() <= 1e-6 * want, "{config}: {got} instead of {want}");
            }
            assert!((rope.attention_factor() - attention).abs() < 1e-12, "{config}");
        }
    }

    #[test]
    fn invalid_settings_are_named() {
        for (config, want) in [
            (json!({"rope_scaling": [1]}), "rope_scaling is [1], expected an object"),
            (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor is missing"),
            (json!({"rope_scaling": {"type": "yarn"}}), "rope_scaling.factor is missing"),
            (
                json!({"rope_parameters": {"rope_type": "linear", "factor": 0}}),
                "rope_parameters.factor is 0, expected a positive number",
            ),
            (
                json!({"rope_scaling": {"type": "linear", "factor": "2.0"}}),
                "rope_scaling.factor is \"2.0\", expected a number",
            ),
            (json!({"rope_theta": 1.0}), "rope_theta is 1, expected more than 1"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5, expected 1"),
            (
                json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
                "rotary settings for each type of layer are not supported",
            ),
            (
                json!({"rope_scaling": {"rope_type": "longrope"}}),
                "rope_scaling.rope_type \"longrope\" is not supported, expected default, linear, \
                 dynamic, llama3 or yarn",
            ),
        ] {
            assert_eq!(parse(&config).unwrap_err(), want);
        }
    }

    /// The expected values were computed by `transformers` with the same settings.
    #[test]
    fn yarn_matches_transformers() {
        let config = json!({
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 32768},
        });
        let rope = parse(&config).unwrap();
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
