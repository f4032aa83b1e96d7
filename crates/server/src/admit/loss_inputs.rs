//! Checks the names of the loss inputs of a pass.
//!
//! The protocol allows inputs that a loss does not read. A misspelt name would silently change the
//! loss: without `weights`, cross entropy trains the prompt too. A name that is at most two edits
//! from the name of an input is therefore rejected (see [`misspelt_name`]), unless another loss has
//! an input of that name. Any other unknown name is ignored, with one warning per session.

use std::collections::HashSet;

use parking_lot::Mutex;
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_suggest::misspelt_name;
use tinkex_wire::{ForwardBackward, LossFn, SessionId};

/// Maximum number of warnings, because a client chooses the names.
const MAX_WARNINGS: usize = 1_024;
/// Maximum number of characters of a name in messages.
const MAX_NAME: usize = 64;

/// Ignored inputs for which a warning was logged, by session.
#[derive(Default)]
pub(crate) struct IgnoredInputs(Mutex<HashSet<(SessionId, String)>>);

impl IgnoredInputs {
    /// Checks the names of the loss inputs of `request`, and logs a warning for an unknown name.
    /// Accepts all names for a custom loss.
    ///
    /// # Errors
    /// If a name is misspelt.
    pub(super) fn check(
        &self,
        session: &SessionId,
        request: &ForwardBackward,
    ) -> Result<(), ServerError> {
        let Some(inputs) = request.loss_fn.inputs() else { return Ok(()) };
        let mut unknown: HashSet<&str> = HashSet::new();
        for (at, datum) in request.data.iter().enumerate() {
            for (name, _) in datum.loss_inputs() {
                if inputs.contains(&name) || !unknown.insert(name) {
                    continue;
                }
                // An input of another loss is not misspelt.
                let of_other_loss = || {
                    let others = LossFn::BUILT_IN.iter().filter_map(LossFn::inputs);
                    others.flatten().any(|input| *input == name)
                };
                let similar = misspelt_name(name, inputs.iter().copied());
                if let Some(input) = similar.filter(|_| !of_other_loss()) {
                    return Err(ServerError::invalid(format!(
                        "data[{at}].loss_fn_inputs[{:?}]: {} has no such input; did you mean \
                         {input:?}?",
                        shortened(name),
                        request.loss_fn
                    )));
                }
            }
        }
        for name in unknown {
            self.warn(session, request, inputs, &shortened(name));
        }
        Ok(())
    }

    fn warn(&self, session: &SessionId, request: &ForwardBackward, inputs: &[&str], name: &str) {
        let mut warned = self.0.lock();
        let is_new =
            warned.len() < MAX_WARNINGS && warned.insert((session.clone(), name.to_owned()));
        drop(warned);
        if is_new {
            tracing::warn!(
                target: log::REQUEST,
                session_id = %session,
                model_id = %request.model_id,
                loss_fn = %request.loss_fn,
                input = name,
                inputs = inputs.join(", "),
                "the loss has no such input; its values are ignored"
            );
        }
    }
}

fn shortened(name: &str) -> String {
    name.chars().take(MAX_NAME).collect()
}
