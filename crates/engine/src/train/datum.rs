//! [`Datum`]: one training example.

use tinkex_autodiff::TensorView;

use super::forward_pass::TrainingSequence;
use super::objective::TrainingObjective;
use crate::file::ModelConfig;
use crate::loss::LossInputs;
use crate::{Error, Result};

/// One training example: what the model reads, and which tokens should follow each position.
#[derive(Clone, Copy, Debug, Default)]
pub struct Datum<'a> {
    /// What the model reads; not empty.
    pub tokens: &'a [u32],
    /// What should follow each position, `columns` tokens for each.
    pub targets: &'a [u32],
    /// Targets of a position in a two-dimensional datum; `None` for the usual one.
    pub columns: Option<usize>,
    /// What a built-in loss reads besides.
    pub inputs: LossInputs<'a>,
    /// What a custom loss reads besides the log-probabilities, in the order of its inputs.
    pub graph_inputs: &'a [TensorView<'a>],
}

impl<'a> Datum<'a> {
    pub(super) fn sequence(&self) -> TrainingSequence<'a> {
        TrainingSequence { tokens: self.tokens, targets: self.targets }
    }

    /// The shape of the targets.
    pub(super) fn shape(&self) -> Vec<usize> {
        match self.columns {
            None => vec![self.targets.len()],
            Some(columns) => vec![self.tokens.len(), columns],
        }
    }

    /// The log-probabilities as a custom loss reads them, and what else it reads.
    pub(super) fn graph_inputs<'b>(&self, shape: &'b [usize], p: &'b [f32]) -> Vec<TensorView<'b>>
    where
        'a: 'b,
    {
        let mut inputs = vec![TensorView::f32(shape, p)];
        inputs.extend_from_slice(self.graph_inputs);
        inputs
    }

    /// Whether a model of this form can run it at all; asked without running it.
    ///
    /// # Errors
    /// If it is empty or too long, has a token that there is not, or lacks what the loss reads.
    pub fn check(&self, model: &ModelConfig, objective: &TrainingObjective<'_>) -> Result<()> {
        let count = self.tokens.len();
        if count == 0 {
            return Err(Error::invalid("model_input", "it is empty"));
        }
        if count > model.max_positions {
            let why = format!("{count} tokens exceed the context of {}", model.max_positions);
            return Err(Error::invalid("model_input", why));
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

/// Every token exists.
pub(crate) fn check_tokens(field: &str, tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().position(|token| *token as usize >= vocab) {
        None => Ok(()),
        Some(index) => Err(Error::TokenOutOfRange {
            field: field.to_owned(),
            index,
            token: i64::from(tokens[index]),
            vocab,
        }),
    }
}
