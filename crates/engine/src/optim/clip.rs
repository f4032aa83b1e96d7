//! Gradient norm and clipping.

use super::{Parameter, StepReport};
use crate::{Error, Result};

/// Computes the norm of all gradients together and the factor that limits it to `bound`. A bound of
/// 0 or less disables clipping.
pub(super) fn measure(tensors: &[Parameter<'_>], bound: f64) -> Result<StepReport> {
    let mut total = 0.0;
    for tensor in tensors {
        let squares = sum_of_squares(tensor.gradient);
        if !squares.is_finite() {
            return Err(non_finite_error(tensor));
        }
        total += squares;
    }
    let grad_norm = total.sqrt();
    // torch's `clip_grad_norm_` adds the same constant.
    let clip_scale = if bound > 0.0 { (bound / (grad_norm + 1e-6)).min(1.0) } else { 1.0 };
    Ok(StepReport { grad_norm, clip_scale })
}

/// Returns the sum of squares in f64, where squares of f32 neither overflow nor underflow, in a
/// fixed order.
pub(super) fn sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; 8];
    let (blocks, rest) = values.as_chunks::<8>();
    for block in blocks {
        for (lane, &value) in lanes.iter_mut().zip(block) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    let rest: f64 = rest.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    lanes.iter().sum::<f64>() + rest
}

fn non_finite_error(tensor: &Parameter<'_>) -> Error {
    let index = tensor.gradient.iter().position(|value| !value.is_finite()).unwrap_or(0);
    Error::NonFiniteResult {
        what: format!("the gradient of {}", tensor.name),
        index,
        value: tensor.gradient.get(index).map_or(f64::NAN, |&value| f64::from(value)),
        hint: "no step was taken; drop the gradients and lower the learning rate",
    }
}
