//! Rejects numbers that are not finite before they are sent.

use tinkex_wire::{Datum, TensorValues, loss_input};

use crate::error::{Error, ErrorKind, Result};

/// Inputs of the built-in losses that must be finite.
const FINITE: [&str; 5] = [
    loss_input::WEIGHTS,
    loss_input::ADVANTAGES,
    loss_input::CLIP_LOW,
    loss_input::CLIP_HIGH,
    loss_input::SEQUENCE_RATIO_MASK,
];

/// Checks that no input of a built-in loss is NaN or infinite. A log-probability of −∞ is valid: a
/// token that the sampler excluded has it, together with an advantage of 0.
///
/// Servers reject such a batch too, but only the chunk that holds the number: the gradients of the
/// other chunks would be accumulated.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] that names the datum, the input and the element.
pub(super) fn check(data: &[Datum]) -> Result<()> {
    for (i, datum) in data.iter().enumerate() {
        for (name, tensor) in datum.loss_inputs() {
            let TensorValues::Float32(values) = tensor.values() else { continue };
            let invalid = match name {
                loss_input::LOGPROBS => position_of_invalid(values, |value| value < f32::INFINITY),
                _ if FINITE.contains(&name) => position_of_invalid(values, f32::is_finite),
                _ => continue,
            };
            if let Some(at) = invalid {
                let value = values[at];
                let message = format!(
                    "invalid batch: data[{i}].loss_fn_inputs[{name:?}]: element {at} is {value}, \
                     expected a finite number"
                );
                return Err(Error::new(ErrorKind::InvalidInput, message));
            }
        }
    }
    Ok(())
}

/// Returns the position of the first value that is not valid.
fn position_of_invalid(values: &[f32], is_valid: impl Fn(f32) -> bool) -> Option<usize> {
    // Without an early exit the compiler vectorizes the loop, and almost every batch is valid.
    let all_valid = values.iter().fold(true, |all, value| all & is_valid(*value));
    if all_valid { None } else { values.iter().position(|value| !is_valid(*value)) }
}
