//! Optimizers: from gradients to new weights.
//!
//! A step happens whole or not at all: it is refused before anything is written if a gradient, a
//! setting or a result is not a finite number. Gradients are the caller's; clearing them after a
//! step is too.

mod adam;
mod clip;
mod dimuon;
mod state;

pub use adam::AdamParams;
pub use dimuon::DimuonParams;

use self::adam::AdamState;
use self::dimuon::DimuonState;
use crate::{Error, Result};

/// Which family of optimizer; fixed for the life of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    Adam,
    /// Orthogonalised momentum for pairs of this rank.
    Dimuon {
        /// The rank of the adapter.
        rank: usize,
    },
}

impl OptimizerKind {
    /// Its name: `adamw` or `dimuon`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Adam => "adamw",
            Self::Dimuon { .. } => "dimuon",
        }
    }
}

/// The settings of one step; nothing carries over to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum StepParams {
    /// For [`OptimizerKind::Adam`].
    Adam(AdamParams),
    /// For [`OptimizerKind::Dimuon`].
    Dimuon(DimuonParams),
}

/// A tensor to be trained.
#[derive(Debug)]
pub struct Parameter<'a> {
    /// Its name, for errors and files.
    pub name: &'a str,
    /// Its rows.
    pub rows: usize,
    /// Its columns; 1 for a vector.
    pub columns: usize,
    /// Its numbers, row by row.
    pub weights: &'a mut [f32],
    /// The gradient of the loss by each of them.
    pub gradient: &'a [f32],
}

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The length of all gradients together, before clipping.
    pub grad_norm: f64,
    /// What they were multiplied by; 1 if they were not clipped.
    pub clip_scale: f64,
}

/// An optimizer and what it remembers.
///
/// ```
/// use tinkex_engine::optim::{AdamParams, Optimizer, OptimizerKind, Parameter, StepParams};
///
/// let mut weights = [1.0, -1.0];
/// let mut optimizer = Optimizer::new(OptimizerKind::Adam, &[2]);
/// let params = StepParams::Adam(AdamParams { learning_rate: 0.1, ..AdamParams::default() });
/// let gradient = [3.0, 4.0];
/// let tensor = Parameter { name: "w", rows: 1, columns: 2, weights: &mut weights, gradient: &gradient };
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
    /// A fresh optimizer for tensors of these lengths.
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

    /// Which family it is.
    #[must_use]
    pub fn kind(&self) -> OptimizerKind {
        match &self.state {
            OptimizerState::Adam(_) => OptimizerKind::Adam,
            OptimizerState::Dimuon(dimuon) => OptimizerKind::Dimuon { rank: dimuon.rank() },
        }
    }

    /// Steps taken so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Takes a step. `tensors` are always the same ones, in the order of [`new`](Self::new).
    ///
    /// # Errors
    /// [`Error::Invalid`] for settings out of range or of the other family; [`Error::Length`];
    /// [`Error::NonFiniteResult`] for a gradient or a new weight that is not a number. Weights and
    /// optimizer are then as they were.
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
                let why = format!("the model was made with {own}, these are settings of {other}");
                return Err(Error::invalid("optimizer", why));
            }
        };
        self.steps += 1;
        Ok(report)
    }
}

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

/// Refuses a setting that is not finite or below 0.
fn at_least_zero(field: &str, value: f64) -> Result<()> {
    // It is used as f32.
    if value >= 0.0 && value <= f64::from(f32::MAX) {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{value} is not a finite number of at least 0")))
}

/// Refuses a decay outside [0, 1).
fn fraction(field: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{value} is not in [0, 1)")))
}

fn check_clip(value: f64) -> Result<()> {
    if value.is_nan() {
        return Err(Error::invalid("grad_clip_norm", "NaN is not a bound"));
    }
    Ok(())
}
