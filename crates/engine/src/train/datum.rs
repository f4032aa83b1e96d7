//! [`Datum`]: one training example.

use tinkex_autodiff::TensorView;

use super::forward_pass::TrainingSequence;
use super::objective::TrainingObjective;
use crate::loss::LossInputs;
use crate::{Error, Result};
use tinkex_weights::ModelConfig;

/// One training example: the input tokens and the target tokens of each position.
#[derive(Clone, Copy, Debug, Default)]
pub struct Datum<'a> {
    /// Input tokens; not empty.
    pub tokens: &'a [u32],
    /// Target tokens, position by position: `columns` per position, or one if `columns` is `None`.
    pub targets: &'a [u32],
    /// Number of targets per position for two-dimensional targets; `None` for one target per
    /// position.
    pub columns: Option<usize>,
    /// Inputs of a built-in loss.
    pub inputs: LossInputs<'a>,
    /// Inputs of a custom loss after the log-probabilities, in the order of its parameters.
    pub graph_inputs: &'a [TensorView<'a>],
}

impl<'a> Datum<'a> {
    pub(super) fn sequence(&self) -> TrainingSequence<'a> {
        TrainingSequence { tokens: self.tokens, targets: self.targets }
    }

    /// Returns the shape of the targets.
    pub(super) fn shape(&self) -> Vec<usize> {
        match self.columns {
            None => vec![self.targets.len()],
            Some(columns) => vec![self.tokens.len(), columns],
        }
    }

    /// Returns the log-probabilities and all other inputs of a custom loss.
    pub(super) fn graph_inputs<'b>(&self, shape: &'b [usize], p: &'b [f32]) -> Vec<TensorView<'b>>
    where
        'a: 'b,
    {
        let mut inputs = vec![TensorView::f32(shape, p)];
        inputs.extend_from_slice(self.graph_inputs);
        inputs
    }

    /// Checks that a model of this configuration can run the datum.
    ///
    /// # Errors
    /// - [`Error::Invalid`] if the input is empty or longer than the model's context, or a position
    ///   has no targets.
    /// - [`Error::Length`] if the targets or an input of the loss have the wrong length.
    /// - [`Error::TokenOutOfRange`] if a token is not in the vocabulary.
    /// - [`Error::MissingInput`], [`Error::NonFiniteInput`] or [`Error::CustomLoss`] if the inputs
    ///   of the loss are missing or invalid.
    pub fn check(&self, model: &ModelConfig, objective: &TrainingObjective<'_>) -> Result<()> {
        let count = self.tokens.len();
        if count == 0 {
            return Err(Error::invalid("model_input", "must not be empty"));
        }
        if count > model.max_positions {
            let reason = format!("{count} tokens exceed the context of {}", model.max_positions);
            return Err(Error::invalid("model_input", reason));
        }
        let expected = count.saturating_mul(self.columns.unwrap_or(1));
        if self.columns == Some(0) {
            return Err(Error::invalid("target_tokens", "a position has no targets"));
        }
        if self.targets.len() != expected {
            let field = "target_tokens".to_owned();
            return Err(Error::Length { field, expected, got: self.targets.len() });
        }
        check_tokens("model_input", self.tokens, model.vocab_size)?;
        check_tokens("target_tokens", self.targets, model.vocab_size)?;
        match objective {
            TrainingObjective::Loss(loss) => loss.check(&self.shape(), &self.inputs),
            TrainingObjective::Graph(graph) => {
                let p = vec![0.0; self.targets.len()];
                Ok(graph.check_inputs(&self.graph_inputs(&self.shape(), &p))?)
            }
        }
    }
}

/// Checks that every token is in the vocabulary.
pub(crate) fn check_tokens(field: &str, tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().position(|token| *token as usize >= vocab) {
        None => Ok(()),
        Some(index) => Err(Error::TokenOutOfRange {
            field: field.to_owned(),
            index,
            // An id above `i32::MAX` is a negative number on the wire.
            token: i64::from(tokens[index].cast_signed()),
            vocab,
        }),
    }
}
