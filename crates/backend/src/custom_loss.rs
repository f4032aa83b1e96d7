//! Finds the custom loss that a training pass names.

use std::sync::Arc;

use tinkex_autodiff::LossProgram;
use tinkex_store::error::ServerError;
use tinkex_store::record::{ModelRunRecord, loss_prefix};
use tinkex_store::store::Store;
use tinkex_wire::{ForwardBackward, LossConfig, LossFn, LossId};

/// Returns the custom loss of a training pass; `None` if its loss is built in.
///
/// # Errors
/// If the pass does not name a custom loss, or if the run's session has no custom loss of that
/// name.
pub fn custom_loss(
    store: &Store,
    run: &ModelRunRecord,
    request: &ForwardBackward,
) -> Result<Option<Arc<LossProgram>>, ServerError> {
    if request.loss_fn != LossFn::Custom {
        return Ok(None);
    }
    let Some(id) = request.loss_fn_config.text(LossConfig::LOSS_ID) else {
        return Err(ServerError::invalid("loss_fn_config.loss_id: required for loss_fn custom"));
    };
    let owned = id.starts_with(&loss_prefix(&run.session));
    let program = store.losses.get(&LossId::from(id)).filter(|_| owned);
    let program = program.ok_or_else(|| {
        ServerError::invalid(format!(
            "loss_fn_config.loss_id: session {} has no custom loss {id:?}",
            run.session
        ))
    })?;
    Ok(Some(Arc::clone(program)))
}
