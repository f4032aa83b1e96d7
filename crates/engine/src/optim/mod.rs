//! Optimizers, which update weights from gradients.
//!
//! A step is atomic: if a gradient, a parameter or a result is not finite, it returns an error
//! before anything is written. The caller owns the gradients and resets them after a step.

mod adam;
mod clip;
mod dimuon;
mod state;

pub use adam::AdamParams;
pub use dimuon::DimuonParams;

use self::adam::AdamState;
use self::dimuon::DimuonState;
use crate::{Error, Result};

/// Kind of optimizer. Fixed for the lifetime of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    Adam,
    /// Orthogonalized momentum for LoRA matrices.
    Dimuon {
        /// Rank of the adapter.
        rank: usize,
    },
}

impl OptimizerKind {
    /// Returns the optimizer's name: `adamw` or `dimuon`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Adam => "adamw",
            Self::Dimuon { .. } => "dimuon",
        }
    }
}

/// Parameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum StepParams {
    /// Parameters for [`OptimizerKind::Adam`].
    Adam(AdamParams),
    /// Parameters for [`OptimizerKind::Dimuon`].
    Dimuon(DimuonParams),
}

/// A trained tensor with its gradient.
#[derive(Debug)]
pub struct Parameter<'a> {
    /// Name, for errors and files.
    pub name: &'a str,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns; 1 for a vector.
    pub columns: usize,
    /// Weights, row-major.
    pub weights: &'a mut [f32],
    /// Gradient of the loss with respect to each weight.
    pub gradient: &'a [f32],
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// L2 norm of the gradients of all tensors together, before clipping.
    pub grad_norm: f64,
    /// Factor that the gradients were multiplied by; 1 if they were not clipped.
    pub clip_scale: f64,
}

/// An optimizer with its state.
///
/// ```
/// use tinkex_engine::optim::{AdamParams, Optimizer, OptimizerKind, Parameter, StepParams};
///
/// let mut weights = [1.0, -1.0];
/// let mut optimizer = Optimizer::new(OptimizerKind::Adam, &[2]);
/// let params = StepParams::Adam(AdamParams { learning_rate: 0.1, ..AdamParams::default() });
/// let tensor = Parameter {
///     name: "w",
///     rows: 1,
///     columns: 2,
///     weights: &mut weights,
///     gradient: &[3.0, 4.0],
/// };
/// let report = optimizer.step(&params, &mut [tensor])?;
/// assert_eq!(report.grad_norm, 5.0);
/// assert!((weights[0] - 0.9).abs() < 1e-6 && (weights[1] + 1.1).abs() < 1e-6);
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    state: OptimizerState,
    steps: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum OptimizerState {
    Adam(AdamState),
    Dimuon(DimuonState),
}

impl Optimizer {
    /// Creates an optimizer for tensors of these lengths.
    #[must_use]
    pub fn new(kind: OptimizerKind, lengths: &[usize]) -> Self {
        let state = match kind {
            OptimizerKind::Adam => OptimizerState::Adam(AdamState::new(lengths)),
            OptimizerKind::Dimuon { rank } => {
                OptimizerState::Dimuon(DimuonState::new(rank, lengths))
            }
        };
        Self { state, steps: 0 }
    }

    /// Returns the kind of the optimizer.
    #[must_use]
    pub fn kind(&self) -> OptimizerKind {
        match &self.state {
            OptimizerState::Adam(_) => OptimizerKind::Adam,
            OptimizerState::Dimuon(dimuon) => OptimizerKind::Dimuon { rank: dimuon.rank() },
        }
    }

    /// Returns the number of steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Takes a step. `tensors` must be the tensors for which [`new`](Self::new) created the optimizer,
    /// in the same order.
    ///
    /// # Errors
    /// - [`Error::Invalid`] if a parameter is out of range, or the parameters are for another kind
    ///   of optimizer.
    /// - [`Error::Length`] or [`Error::Shape`] if the number or a shape of the tensors differs from
    ///   [`new`](Self::new).
    /// - [`Error::NonFiniteResult`] if a gradient or a new weight is not finite.
    ///
    /// Weights and optimizer state are unchanged after an error.
    pub fn step(
        &mut self,
        params: &StepParams,
        tensors: &mut [Parameter<'_>],
    ) -> Result<StepReport> {
        let report = match (&mut self.state, params) {
            (OptimizerState::Adam(adam), StepParams::Adam(params)) => {
                params.check()?;
                check_lengths(adam.lengths(), tensors)?;
                let report = clip::measure(tensors, params.grad_clip_norm)?;
                adam.step(params, self.steps + 1, tensors, report.clip_scale)?;
                report
            }
            (OptimizerState::Dimuon(dimuon), StepParams::Dimuon(params)) => {
                params.check()?;
                check_lengths(dimuon.lengths(), tensors)?;
                let report = clip::measure(tensors, params.grad_clip_norm)?;
                dimuon.step(params, tensors, report.clip_scale)?;
                report
            }
            (state, _) => {
                let (own, other) = match state {
                    OptimizerState::Adam(_) => ("adamw", "dimuon"),
                    OptimizerState::Dimuon(_) => ("dimuon", "adamw"),
                };
                let reason = format!("the optimizer is {own}, the parameters are for {other}");
                return Err(Error::invalid("optimizer", reason));
            }
        };
        self.steps += 1;
        Ok(report)
    }
}

/// Checks that the tensors have these lengths and consistent shapes.
fn check_lengths(
    lengths: impl ExactSizeIterator<Item = usize>,
    tensors: &[Parameter<'_>],
) -> Result<()> {
    let wrong = |field: String, expected, got| Err(Error::Length { field, expected, got });
    if lengths.len() != tensors.len() {
        return wrong("the list of tensors".to_owned(), lengths.len(), tensors.len());
    }
    for (length, tensor) in lengths.zip(tensors) {
        let name = || tensor.name.to_owned();
        if tensor.weights.len() != length {
            return wrong(name(), length, tensor.weights.len());
        }
        if tensor.gradient.len() != length {
            return wrong(
                format!("the gradient of {}", tensor.name),
                length,
                tensor.gradient.len(),
            );
        }
        if tensor.rows.checked_mul(tensor.columns) != Some(length) {
            return Err(Error::Shape {
                what: name(),
                expected: vec![tensor.rows, tensor.columns],
                got: vec![length],
            });
        }
    }
    Ok(())
}

/// Checks that a parameter is finite and at least 0.
fn at_least_zero(field: &str, value: f64) -> Result<()> {
    // The value is converted to f32, so a larger one would become infinite.
    if value >= 0.0 && value <= f64::from(f32::MAX) {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{value} is not a finite number of at least 0")))
}

/// Checks that a decay rate is in [0, 1).
fn decay_rate(field: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{value} is not in [0, 1)")))
}

/// Checks that the clipping norm is a number; 0, negative numbers and infinities are allowed.
fn check_clip(value: f64) -> Result<()> {
    if value.is_nan() {
        return Err(Error::invalid("grad_clip_norm", "NaN, expected a number"));
    }
    Ok(())
}
