//! [`Environment`]: reacts to completions and computes the [`Reward`] of an episode.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tinkex_wire::{StopReason, Tokens};

use super::prompt::RlPrompt;

/// Error of a reward function or an environment. The error ends the run; a run with a run folder
/// can be resumed.
pub type RewardError = Box<dyn std::error::Error + Send + Sync>;

/// Completion that the model sampled.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Completion {
    /// Prompt, with its metadata.
    pub prompt: Arc<RlPrompt>,
    /// Text of the completion, without special tokens.
    pub text: String,
    /// Tokens of the completion, including the stop token, if one ended the completion.
    pub tokens: Tokens,
    /// Reason why sampling stopped.
    pub stop_reason: StopReason,
    /// Number of earlier completions in this episode.
    pub turn: u32,
}

impl Completion {
    /// Creates a completion without tokens, for example to score a text with a
    /// [`RewardProgram`](crate::RewardProgram).
    #[must_use]
    pub fn new(prompt: impl Into<Arc<RlPrompt>>, text: impl Into<String>) -> Self {
        Self {
            prompt: prompt.into(),
            text: text.into(),
            tokens: Tokens::default(),
            stop_reason: StopReason::Stop,
            turn: 0,
        }
    }
}

/// Reward of an episode.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Reward {
    /// Reward. Must be finite.
    pub value: f64,
    /// Other numbers about the episode. Reports contain their means.
    pub metrics: BTreeMap<String, f64>,
}

impl Reward {
    /// Creates a reward without metrics.
    #[must_use]
    pub fn new(value: f64) -> Self {
        Self { value, metrics: BTreeMap::new() }
    }

    /// Adds a metric.
    #[must_use]
    pub fn metric(mut self, name: impl Into<String>, value: f64) -> Self {
        self.metrics.insert(name.into(), value);
        self
    }
}

impl From<f64> for Reward {
    fn from(value: f64) -> Self {
        Self::new(value)
    }
}

impl From<bool> for Reward {
    /// Converts `true` to 1 and `false` to 0.
    fn from(success: bool) -> Self {
        Self::new(f64::from(u8::from(success)))
    }
}

/// Reaction of an environment to a completion.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Turn {
    /// Ends the episode.
    End(Reward),
    /// Appends text to the episode, such as the result of a tool, and lets the model continue. The
    /// model does not learn this text. `reward` is added to the reward of the episode.
    Reply {
        /// Text to append, with the special tokens that the model's template writes around it.
        text: String,
        /// Reward of this turn.
        reward: f64,
    },
}

/// Environment of one episode, for tasks with several turns or tools.
///
/// A run creates one environment for each completion of a group
/// ([`Rl::environment`](super::Rl::environment)).
///
/// ```
/// use futures_util::future::{BoxFuture, FutureExt};
/// use tinkex_recipes::rl::{Completion, Environment, Reward, RewardError, Turn};
///
/// /// Lets the model try again once.
/// struct SecondChance;
///
/// impl Environment for SecondChance {
///     fn step<'a>(
///         &'a mut self,
///         completion: &'a Completion,
///     ) -> BoxFuture<'a, Result<Turn, RewardError>> {
///         async move {
///             let is_right = completion.text.trim() == "4";
///             if is_right || completion.turn > 0 {
///                 return Ok(Turn::End(is_right.into()));
///             }
///             Ok(Turn::Reply { text: "\nWrong. Try again: ".to_owned(), reward: 0.0 })
///         }
///         .boxed()
///     }
/// }
/// ```
pub trait Environment: Send {
    /// Reacts to a completion of the model.
    ///
    /// # Errors
    /// An error ends the run.
    fn step<'a>(
        &'a mut self,
        completion: &'a Completion,
    ) -> BoxFuture<'a, Result<Turn, RewardError>>;
}

/// Creates the environment of each episode.
pub(super) type MakeEnvironment = Arc<dyn Fn(&RlPrompt) -> Box<dyn Environment> + Send + Sync>;

/// Environment that ends the episode after one completion. A function computes the reward.
struct SingleTurn<F>(Arc<F>);

impl<F, R> Environment for SingleTurn<F>
where
    F: Fn(Completion) -> R + Send + Sync,
    R: Future<Output = Result<Reward, RewardError>> + Send,
{
    fn step<'a>(
        &'a mut self,
        completion: &'a Completion,
    ) -> BoxFuture<'a, Result<Turn, RewardError>> {
        async move { Ok(Turn::End((self.0)(completion.clone()).await?)) }.boxed()
    }
}

/// Returns a constructor of environments that end the episode after one completion. `reward`
/// computes the reward.
pub(super) fn single_turn<F, R>(reward: F) -> MakeEnvironment
where
    F: Fn(Completion) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Reward, RewardError>> + Send + 'static,
{
    let reward = Arc::new(reward);
    Arc::new(move |_| Box::new(SingleTurn(Arc::clone(&reward))))
}
