//! Checks that the loss inputs of a batch are finite before the batch is sent.

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

/// Checks that no input of a built-in loss is NaN or infinite. A log-probability of −∞ is valid: it
/// is the value of a token that the sampler excluded, whose advantage is 0.
///
/// Servers check this too, but reject only the chunk that holds the invalid number: they would
/// accumulate the gradients of the other chunks.
///
/// # Errors
/// [`ErrorKind::InvalidInput`]. The message contains the indices of the datum and the element, and
/// the name of the input.
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
    // Scan all values without an early exit, so that the compiler vectorizes the loop. An early
    // exit would rarely help, because almost every batch is valid.
    let all_valid = values.iter().fold(true, |all, value| all & is_valid(*value));
    if all_valid { None } else { values.iter().position(|value| !is_valid(*value)) }
}
