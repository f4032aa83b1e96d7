//! [`EvalExample`]: the tokens of an example, separated into the prompt and the expected answer.

use tinkex::Tokens;
use tinkex::loss_input::{TARGET_TOKENS, WEIGHTS};
use tinkex::{Logprobs, TensorData};
use tinkex_recipes::TrainExample;

use crate::error::{CommandError, Exit};

/// Example to evaluate.
#[derive(Debug)]
pub(super) struct EvalExample {
    pub(super) tokens: Tokens,
    /// Weight of each token in the loss. The first token has weight 0, because nothing predicts it.
    weights: Vec<f32>,
    /// Sum of the weights.
    pub(super) weight: f64,
    /// Index of the first token of the expected answer: the last run of tokens in the loss.
    answer: usize,
}

impl EvalExample {
    /// Separates an example for cross entropy into the prompt and the expected answer.
    ///
    /// # Errors
    ///
    /// Returns an error if the example has no tokens, or none of them has a weight.
    pub(super) fn new(example: &TrainExample) -> Result<Self, CommandError> {
        let invalid = || CommandError::new(Exit::Failed, "it has no tokens to learn");
        let datum = example.data.first().ok_or_else(invalid)?;
        let inputs = datum.model_input().to_tokens().ok_or_else(invalid)?;
        let targets = datum.loss_input(TARGET_TOKENS).and_then(TensorData::as_i64);
        let weights = datum.loss_input(WEIGHTS).and_then(TensorData::as_f32);
        let (Some([.., last]), Some(weights)) = (targets, weights) else { return Err(invalid()) };
        let mut tokens = inputs.to_vec();
        tokens.push(u32::try_from(*last).map_err(|_| invalid())?);
        let weights: Vec<f32> = std::iter::once(0.0).chain(weights.iter().copied()).collect();
        let end = weights.iter().rposition(|weight| *weight != 0.0).ok_or_else(invalid)?;
        let answer =
            weights[..end].iter().rposition(|weight| *weight == 0.0).map_or(0, |at| at + 1);
        Ok(Self { tokens: tokens.into(), weights, weight: example.weight, answer })
    }

    /// Returns whether there is a prompt to answer. A text that is learned from its first token on
    /// has none.
    pub(super) fn has_prompt(&self) -> bool {
        self.answer > 1
    }

    /// Returns the tokens before the expected answer.
    pub(super) fn prompt(&self) -> Tokens {
        self.tokens.slice(..self.answer)
    }

    /// Returns the tokens of the expected answer, including the one that ends it.
    pub(super) fn expected(&self) -> &[u32] {
        let learned = &self.weights[self.answer..];
        let length = learned.iter().take_while(|weight| **weight != 0.0).count();
        &self.tokens[self.answer..self.answer + length]
    }

    /// Returns the number of tokens that the loss covers.
    pub(super) fn learned(&self) -> u64 {
        self.weights.iter().filter(|weight| **weight != 0.0).count() as u64
    }

    /// Returns the weighted mean loss of the tokens.
    pub(super) fn loss(&self, logprobs: &Logprobs) -> Result<f64, CommandError> {
        let mut sum = 0.0;
        for (at, weight) in self.weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            let logprob = logprobs.get(at).ok_or_else(|| {
                CommandError::new(Exit::Failed, "the server returned too few log-probabilities")
            })?;
            sum -= f64::from(*weight) * f64::from(logprob);
        }
        Ok(sum / self.weight)
    }
}

#[cfg(test)]
mod tests {
    use tinkex::Datum;

    use super::*;

    fn example(tokens: &[u32], weights: &[f32]) -> EvalExample {
        let datum = Datum::supervised(tokens.to_vec(), weights.to_vec()).unwrap();
        EvalExample::new(&TrainExample::new(datum)).unwrap()
    }

    #[test]
    fn the_answer_is_the_last_learned_run_of_tokens() {
        let two = example(&[1, 2, 3, 4, 5, 6, 7], &[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]);
        assert_eq!(two.prompt()[..], [1, 2, 3, 4]);
        assert_eq!(two.expected(), [5, 6]);
        assert!(two.has_prompt());
        assert!((two.weight - 4.0).abs() < 1e-9);
        let text = example(&[1, 2, 3], &[1.0, 1.0, 1.0]);
        assert!(!text.has_prompt(), "a text has no prompt");
    }
}
