//! [`Loss`]: the built-in losses and their settings.

use crate::{Error, Result};

/// Built-in loss with its settings.
///
/// In the formulas, `p` is the log-probability of a target token under the current weights, `q` its
/// log-probability when it was sampled, `r = exp(p - q)`, and `A` its advantage. Every term is
/// multiplied by the token's weight, which is 1 if no weights are given.
///
/// ```
/// use tinkex_engine::loss::{UnverifiedLosses, LossInputs, Loss};
///
/// let loss = Loss::parse("cross_entropy", &[], UnverifiedLosses::Reject)?;
/// let inputs = LossInputs { weights: Some(&[0.0, 2.0]), ..LossInputs::default() };
/// loss.check(&[2], &inputs)?;
/// let mut gradient = [0.0; 2];
/// let sums = loss.evaluate(&inputs, &[-3.0, -0.5], &mut gradient)?;
/// assert_eq!((sums.loss, gradient), (1.0, [0.0, -2.0]));
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Loss {
    /// `-p`. The only loss that accepts several targets per position.
    CrossEntropy,
    /// `-r A`.
    ImportanceSampling,
    /// `-min(r A, clip(r) A)`.
    Ppo(ClipBounds),
    /// `-clip(r) p A`, where `clip(r)` is a constant.
    Cispo(ClipBounds),
    /// `-(p A - beta/2 (p - q)²)`.
    Dro {
        /// Coefficient of the squared distance between `p` and `q`.
        beta: f64,
    },
    /// [`Ppo`](Self::Ppo) with one ratio for all tokens of a datum: the exponential of the mean of
    /// `p - q` over the tokens of `sequence_ratio_mask`.
    Gspo(ClipBounds),
    /// `-min(r, 1) p A + kl_coeff/2 (p - q)²` on sampled tokens, where `min(r, 1)` is a constant.
    ///
    /// The formula of the hosted service is not public, so this one is unverified. See
    /// [`UnverifiedLosses`].
    StableReinforce {
        /// Coefficient of the squared distance between `p` and `q`.
        kl_coeff: f64,
    },
}

/// Clipping bounds of the ratio `r`. The bounds are ratios, not distances from 1. A ratio equal to a
/// bound is not clipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipBounds {
    /// Lower bound, at least 0.
    pub low: f64,
    /// Upper bound, at least `low`.
    pub high: f64,
}

/// Availability of losses whose formula could not be verified against the hosted service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnverifiedLosses {
    /// Such losses are rejected.
    #[default]
    Reject,
    /// Such losses are available; the service may compute other results.
    Allow,
}

impl Loss {
    /// Returns the loss `name` with these settings. Settings that are not listed have their
    /// defaults: bounds 0.8 and 1.2 for `ppo` and `gspo`, 0 and 4 for `cispo`; `beta` 0.05 for
    /// `dro`; `kl_coeff` 0 for `stable_reinforce`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown name or setting, or a value outside its range;
    /// [`Error::Unavailable`] for an unverified loss that is not allowed.
    pub fn parse(
        name: &str,
        settings: &[(&str, f64)],
        unverified: UnverifiedLosses,
    ) -> Result<Self> {
        let mut loss = match name {
            "cross_entropy" => Self::CrossEntropy,
            "importance_sampling" => Self::ImportanceSampling,
            "ppo" => Self::Ppo(ClipBounds { low: 0.8, high: 1.2 }),
            "cispo" => Self::Cispo(ClipBounds { low: 0.0, high: 4.0 }),
            "dro" => Self::Dro { beta: 0.05 },
            "gspo" => Self::Gspo(ClipBounds { low: 0.8, high: 1.2 }),
            "stable_reinforce" if unverified == UnverifiedLosses::Allow => {
                Self::StableReinforce { kl_coeff: 0.0 }
            }
            "stable_reinforce" => {
                return Err(Error::Unavailable {
                    what: name.to_owned(),
                    reason: "its formula is not public; use another loss, or enable an unverified \
                             formula with `UnverifiedLosses::Allow`",
                });
            }
            other => {
                let known = "cross_entropy, importance_sampling, ppo, cispo, dro and gspo";
                return Err(Error::invalid(
                    "loss_fn",
                    format!("unknown loss {other:?}, expected one of {known}"),
                ));
            }
        };
        for &(key, value) in settings {
            let setting = match (&mut loss, key) {
                (Self::Ppo(clip) | Self::Cispo(clip) | Self::Gspo(clip), "clip_low_threshold") => {
                    &mut clip.low
                }
                (Self::Ppo(clip) | Self::Cispo(clip) | Self::Gspo(clip), "clip_high_threshold") => {
                    &mut clip.high
                }
                (Self::Dro { beta }, "beta") => beta,
                (Self::StableReinforce { kl_coeff }, "kl_coeff") => kl_coeff,
                _ => {
                    let field = format!("loss_fn_config.{key}");
                    return Err(Error::invalid(field, format!("{name} has no such setting")));
                }
            };
            if !(value.is_finite() && value >= 0.0) {
                let reason = format!("{value} is not a finite number of at least 0");
                return Err(Error::invalid(format!("loss_fn_config.{key}"), reason));
            }
            *setting = value;
        }
        if let Self::Ppo(clip) | Self::Cispo(clip) | Self::Gspo(clip) = loss
            && clip.low > clip.high
        {
            let reason = format!("{} exceeds clip_high_threshold {}", clip.low, clip.high);
            return Err(Error::invalid("loss_fn_config.clip_low_threshold", reason));
        }
        Ok(loss)
    }

    /// Returns the name of the loss in the API.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::CrossEntropy => "cross_entropy",
            Self::ImportanceSampling => "importance_sampling",
            Self::Ppo(_) => "ppo",
            Self::Cispo(_) => "cispo",
            Self::Dro { .. } => "dro",
            Self::Gspo(_) => "gspo",
            Self::StableReinforce { .. } => "stable_reinforce",
        }
    }

    /// Returns the clipping bounds, if the loss has any.
    pub(super) fn clip(&self) -> Option<ClipBounds> {
        match self {
            Self::Ppo(clip) | Self::Cispo(clip) | Self::Gspo(clip) => Some(*clip),
            _ => None,
        }
    }
}
