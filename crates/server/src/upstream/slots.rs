//! Slots for models on an upstream with an older protocol.
//!
//! SkyRL keeps the accumulated gradients of a slot when its model is unloaded or expires, and a new
//! model takes the lowest free slot: its first optimizer step would apply the gradients of the other
//! model. The gateway therefore applies them with a learning rate of 0 before it unloads a model.
//! Models that expire, and those of other programs, leave their gradients all the same. A model that
//! is trained is therefore created twice: the first one clears its slot, and the second takes the
//! same slot.

use tokio::sync::{Mutex, MutexGuard};

use super::Upstream;
use super::fault::Fault;
use super::remote_model::ModelHandle;
use crate::store::LoraSettings;

/// Access to the slots of an upstream.
#[derive(Default)]
pub(super) struct Slots {
    /// Held while slots are taken or released. The slot that was cleared for a model thus stays the
    /// lowest free one until the model takes it.
    changes: Mutex<()>,
}

impl Slots {
    /// Waits until no slot is being taken or released.
    pub(super) async fn lock(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().await
    }
}

impl Upstream {
    /// Clears the slot that the next model will take. Create the model while the returned guard is
    /// held.
    ///
    /// # Errors
    /// If the slot may have gradients of another model.
    pub(super) async fn clear_slot(
        &self,
        base_model: &str,
        lora: &LoraSettings,
    ) -> Result<MutexGuard<'_, ()>, Fault> {
        let guard = self.slots.lock().await;
        if self.is_older() {
            let optimizer = tinkex::OptimizerConfig::default();
            let mut model =
                ModelHandle::create_in_any_slot(self, base_model, lora, &optimizer).await?;
            let cleared = model.clear_gradients().await;
            let released = model.release_slot().await;
            model.session.finish().await;
            for result in [cleared, released] {
                match result {
                    // A server that refuses one of the two requests has no such slots.
                    Ok(()) | Err(Fault::Failed(..)) => {}
                    // The model was never trained: nothing but the slot is in doubt.
                    Err(Fault::InDoubt(reason)) => return Err(Fault::Unavailable(reason)),
                    Err(fault) => return Err(fault),
                }
            }
        }
        Ok(guard)
    }
}
