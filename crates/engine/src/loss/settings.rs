//! Which loss, and its settings.

use crate::{Error, Result};

/// A loss with its settings.
///
/// In the formulas `p` is the log-probability of a target under the current weights, `q` the one it
/// was sampled with, `r = exp(p - q)`, `A` its advantage; every term is multiplied by the token's
/// weight, which is 1 if no weights are given.
///
/// ```
/// use tinkex_engine::loss::{Guesses, Inputs, Loss};
///
/// let loss = Loss::parse("cross_entropy", &[], Guesses::Refuse)?;
/// let inputs = Inputs { weights: Some(&[0.0, 2.0]), ..Inputs::default() };
/// loss.check(&[2], &inputs)?;
/// let mut slope = [0.0; 2];
/// let out = loss.evaluate(&inputs, &[-3.0, -0.5], &mut slope)?;
/// assert_eq!((out.sum, slope), (1.0, [0.0, -2.0]));
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Loss {
    /// `-p`. The only one that takes several targets per position.
    CrossEntropy,
    /// `-r A`.
    ImportanceSampling,
    /// `-min(r A, clip(r) A)`.
    Ppo(Clip),
    /// `-clip(r) p A`, with no slope through `clip(r)`.
    Cispo(Clip),
    /// `-(p A - beta/2 (p - q)²)`.
    Dro {
        /// How hard `p` is held to `q`.
        beta: f64,
    },
    /// As [`Ppo`](Self::Ppo), with one ratio for all tokens of a datum: the exponential of the mean
    /// of `p - q` over the tokens of `sequence_ratio_mask`.
    Gspo(Clip),
    /// `-min(r, 1) p A + kl_coeff/2 (p - q)²` on sampled tokens, with no slope through `min(r, 1)`.
    ///
    /// A guess: the service's formula is not public. See [`Guesses`].
    StableReinforce {
        /// How hard `p` is held to `q`.
        kl_coeff: f64,
    },
}

/// Bounds of a ratio: themselves, not distances from 1. A ratio on a bound is inside.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// The lower bound.
    pub low: f64,
    /// The upper bound.
    pub high: f64,
}

/// Whether to run what we could only guess.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Guesses {
    /// No.
    #[default]
    Refuse,
    /// Yes; results are not comparable with the service's.
    Allow,
}

impl Loss {
    /// The loss `name` with the settings that the caller gave; the others have their defaults.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown name or setting, or a value outside its range;
    /// [`Error::Unavailable`] for a guess that was not switched on.
    pub fn parse(name: &str, settings: &[(&str, f64)], guesses: Guesses) -> Result<Self> {
        let mut loss = match name {
            "cross_entropy" => Self::CrossEntropy,
            "importance_sampling" => Self::ImportanceSampling,
            "ppo" => Self::Ppo(Clip { low: 0.8, high: 1.2 }),
            "cispo" => Self::Cispo(Clip { low: 0.0, high: 4.0 }),
            "dro" => Self::Dro { beta: 0.05 },
            "gspo" => Self::Gspo(Clip { low: 0.8, high: 1.2 }),
            "stable_reinforce" if guesses == Guesses::Allow => {
                Self::StableReinforce { kl_coeff: 0.0 }
            }
            "stable_reinforce" => {
                return Err(Error::Unavailable {
                    what: name.to_owned(),
                    reason: "its formula is not public; a guess can be switched on",
                });
            }
            other => {
                let known = "cross_entropy, importance_sampling, ppo, cispo, dro and gspo";
                return Err(Error::invalid("loss_fn", format!("{other:?} is not one of {known}")));
            }
        };
        for &(key, value) in settings {
            let slot = match (&mut loss, key) {
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
                let why = format!("{value} is not a finite number of at least 0");
                return Err(Error::invalid(format!("loss_fn_config.{key}"), why));
            }
            *slot = value;
        }
        if let Self::Ppo(clip) | Self::Cispo(clip) | Self::Gspo(clip) = loss
            && clip.low > clip.high
        {
            let why = format!("{} is above clip_high_threshold {}", clip.low, clip.high);
            return Err(Error::invalid("loss_fn_config.clip_low_threshold", why));
        }
        Ok(loss)
    }

    /// Its name.
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

    /// Its bounds of a ratio, if it has them.
    pub(super) fn clip(&self) -> Option<Clip> {
        match self {
            Self::Ppo(clip) | Self::Cispo(clip) | Self::Gspo(clip) => Some(*clip),
            _ => None,
        }
    }
}
