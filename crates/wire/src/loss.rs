//! Loss functions and their settings.

use std::borrow::Cow;
use std::fmt;

use crate::ids::LossId;

/// Loss function of a training pass.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::LossFn;
///
/// assert_eq!(LossFn::from("ppo"), LossFn::Ppo);
/// assert_eq!(LossFn::from("brand_new").as_str(), "brand_new");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossFn {
    /// Negative log-likelihood of the targets.
    CrossEntropy,
    /// Policy gradient with importance sampling.
    ImportanceSampling,
    /// Proximal policy optimization: clipped policy gradient.
    Ppo,
    /// Policy gradient with clipped importance weights (CISPO).
    Cispo,
    /// Direct reward optimization.
    Dro,
    /// Group sequence policy optimization: clipping per sequence instead of per token.
    Gspo,
    /// Stabilized REINFORCE.
    StableReinforce,
    /// An uploaded custom loss; see [`LossConfig::custom`].
    Custom,
    /// A loss that this version does not know.
    Other(String),
}

impl LossFn {
    /// All losses except [`LossFn::Other`].
    pub const BUILT_IN: [Self; 8] = [
        Self::CrossEntropy,
        Self::ImportanceSampling,
        Self::Ppo,
        Self::Cispo,
        Self::Dro,
        Self::Gspo,
        Self::StableReinforce,
        Self::Custom,
    ];

    /// Returns the name in requests.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::CrossEntropy => "cross_entropy",
            Self::ImportanceSampling => "importance_sampling",
            Self::Ppo => "ppo",
            Self::Cispo => "cispo",
            Self::Dro => "dro",
            Self::Gspo => "gspo",
            Self::StableReinforce => "stable_reinforce",
            Self::Custom => "custom",
            Self::Other(name) => name,
        }
    }

    /// Returns the names of the [loss inputs](crate::loss_input) that the loss reads. Returns `None`
    /// if they are not known: for a custom loss, for [`LossFn::StableReinforce`], whose inputs are
    /// not documented, and for [`LossFn::Other`].
    ///
    /// ```
    /// # use tinkex_wire as tinkex;
    /// use tinkex::LossFn;
    ///
    /// assert_eq!(LossFn::CrossEntropy.inputs(), Some(&["target_tokens", "weights"][..]));
    /// assert_eq!(LossFn::Custom.inputs(), None);
    /// ```
    #[must_use]
    pub fn inputs(&self) -> Option<&'static [&'static str]> {
        use crate::loss_input::{
            ADVANTAGES, CLIP_HIGH, CLIP_LOW, LOGPROBS, SEQUENCE_RATIO_MASK, TARGET_TOKENS, WEIGHTS,
        };
        match self {
            Self::CrossEntropy => Some(&[TARGET_TOKENS, WEIGHTS]),
            Self::ImportanceSampling | Self::Dro => {
                Some(&[TARGET_TOKENS, LOGPROBS, ADVANTAGES, WEIGHTS])
            }
            Self::Ppo | Self::Cispo => {
                Some(&[TARGET_TOKENS, LOGPROBS, ADVANTAGES, WEIGHTS, CLIP_LOW, CLIP_HIGH])
            }
            Self::Gspo => Some(&[
                TARGET_TOKENS,
                LOGPROBS,
                ADVANTAGES,
                WEIGHTS,
                CLIP_LOW,
                CLIP_HIGH,
                SEQUENCE_RATIO_MASK,
            ]),
            Self::StableReinforce | Self::Custom | Self::Other(_) => None,
        }
    }
}

impl From<&str> for LossFn {
    fn from(name: &str) -> Self {
        Self::BUILT_IN
            .into_iter()
            .find(|loss| loss.as_str() == name)
            .unwrap_or_else(|| Self::Other(name.to_owned()))
    }
}

impl From<String> for LossFn {
    fn from(name: String) -> Self {
        Self::from(name.as_str())
    }
}

impl fmt::Display for LossFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Settings of a loss function by name.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::LossConfig;
///
/// let config = LossConfig::new().set("clip_low_threshold", 0.8).set("note", "run 7");
/// assert_eq!(config.number("clip_low_threshold"), Some(0.8));
/// assert_eq!(config.text("note"), Some("run 7"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossConfig(Vec<(Cow<'static, str>, LossSetting)>);

/// Value of a setting.
#[derive(Clone, Debug, PartialEq)]
pub enum LossSetting {
    /// A number.
    Number(f64),
    /// A string.
    Text(String),
}

impl From<f64> for LossSetting {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<f32> for LossSetting {
    fn from(number: f32) -> Self {
        Self::Number(number.into())
    }
}

impl From<i32> for LossSetting {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

impl From<u32> for LossSetting {
    fn from(number: u32) -> Self {
        Self::Number(number.into())
    }
}

impl From<bool> for LossSetting {
    /// Converts `true` to 1 and `false` to 0: the protocol has no Boolean settings.
    fn from(flag: bool) -> Self {
        Self::Number(flag.into())
    }
}

impl From<&str> for LossSetting {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for LossSetting {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl LossConfig {
    /// Name of the setting that identifies an uploaded loss.
    pub const LOSS_ID: &'static str = "loss_id";

    /// Creates an empty configuration, which selects the server's defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the configuration of [`LossFn::Custom`] for an uploaded loss.
    #[must_use]
    pub fn custom(loss: &LossId) -> Self {
        Self::new().set(Self::LOSS_ID, loss.as_str())
    }

    /// Sets a value. Replaces an existing value of that name.
    #[must_use]
    pub fn set(
        mut self,
        name: impl Into<Cow<'static, str>>,
        value: impl Into<LossSetting>,
    ) -> Self {
        self.insert(name.into(), value.into());
        self
    }

    pub(crate) fn insert(&mut self, name: Cow<'static, str>, value: LossSetting) {
        match self.0.iter_mut().find(|(key, _)| *key == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name, value)),
        }
    }

    /// Returns a numeric setting.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<f64> {
        self.iter().find_map(|(key, value)| match value {
            LossSetting::Number(number) if key == name => Some(*number),
            _ => None,
        })
    }

    /// Returns a string setting.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.iter().find_map(|(key, value)| match value {
            LossSetting::Text(text) if key == name => Some(&**text),
            _ => None,
        })
    }

    /// Iterates over all settings in insertion order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &LossSetting)> + ExactSizeIterator {
        self.0.iter().map(|(name, value)| (&**name, value))
    }

    /// Returns `true` if there are no settings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
