//! Checks that the loss inputs of a batch are inputs of its built-in loss before the batch is sent.

use tinkex_suggest::nearest_names;
use tinkex_wire::{Datum, LossFn};

use crate::error::{Error, ErrorKind, Result};

/// Checks that `loss` reads every loss input of `data`. Servers ignore other inputs: with `weight` in
/// place of `weights`, cross entropy would train the prompt too. Accepts all inputs of a loss whose
/// inputs are not known.
///
/// # Errors
/// [`ErrorKind::InvalidInput`]. The message contains the index of the datum, the name of the input,
/// and the most similar input of the loss.
pub(super) fn check(data: &[Datum], loss: &LossFn) -> Result<()> {
    let Some(inputs) = loss.inputs() else { return Ok(()) };
    for (i, datum) in data.iter().enumerate() {
        let mut names = datum.loss_inputs().map(|(name, _)| name);
        let Some(name) = names.find(|name| !inputs.contains(name)) else { continue };
        let advice = match nearest_names(name, inputs.iter().copied()).first() {
            Some(nearest) => format!("did you mean {nearest:?}?"),
            None => format!("its inputs are {}", inputs.join(", ")),
        };
        let message = format!(
            "invalid batch: data[{i}].loss_fn_inputs[{name:?}]: {loss} has no such input; {advice}"
        );
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    Ok(())
}
