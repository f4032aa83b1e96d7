//! Slots for models on a legacy upstream: SkyRL has a fixed number of slots, and each loaded model
//! occupies one.
//!
//! SkyRL keeps the accumulated gradients in a slot when the model is unloaded or expires, and a new
//! model takes the lowest free slot. The first optimizer step of the new model would therefore
//! apply the gradients of the earlier model. To prevent this, the gateway applies the gradients
//! with a learning rate of 0 before it unloads a model. This step may fail, and it never runs for a
//! model that expires or that another process created. Any free slot may then have gradients. In
//! this case the gateway creates a model for training twice: the first model clears the slot, and
//! the second model takes the same slot.
//!
//! Models are not always created twice: SkyRL with FSDP stops its workers when the last model is
//! unloaded, and starts them again for the next model.

use std::sync::atomic::{AtomicBool, Ordering};

use tinkex_store::record::LoraSettings;
use tinkex_wire::rest::ListTrainingRuns;
use tokio::sync::{Mutex, MutexGuard};

use super::Upstream;
use super::fault::Fault;
use super::remote_model::ModelHandle;

/// State of the slots of an upstream.
#[derive(Default)]
pub(super) struct Slots {
    /// Whether a free slot may have gradients of an earlier model. Never reset, because
    /// [`Upstream::clear_slot`] clears only the lowest free slot.
    may_be_dirty: AtomicBool,
    /// Locked while slots are taken or released, so that the slot that was cleared for a model
    /// stays the lowest free slot until the model takes it.
    changes: Mutex<()>,
}

impl Slots {
    /// Waits until no slot is being taken or released. No other task takes or releases a slot while
    /// the guard is held.
    pub(super) async fn lock(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().await
    }

    /// Records that gradients of a model may be in a slot that is free, or that becomes free.
    pub(super) fn set_dirty(&self) {
        self.may_be_dirty.store(true, Ordering::Relaxed);
    }
}

impl Upstream {
    /// Determines whether another process may have left gradients: an earlier process of this
    /// server, or another program. Slots of a server that never had a model are clean.
    pub(super) async fn inspect_slots(&self) {
        let list = ListTrainingRuns::default().limit(1);
        let runs = self.service.rest().list_training_runs(&list).await;
        if !runs.is_ok_and(|page| page.training_runs.is_empty()) {
            self.slots.set_dirty();
        }
    }

    /// Clears the slot that the next model will take, if the slot may have gradients of an earlier
    /// model. Create the model while the returned guard is held.
    ///
    /// # Errors
    /// If the slot could not be cleared.
    pub(super) async fn clear_slot(
        &self,
        base_model: &str,
        lora: &LoraSettings,
    ) -> Result<MutexGuard<'_, ()>, Fault> {
        let guard = self.slots.lock().await;
        if self.is_legacy() && self.slots.may_be_dirty.load(Ordering::Relaxed) {
            let optimizer = tinkex::OptimizerConfig::default();
            let mut model =
                ModelHandle::create_in_any_slot(self, base_model, lora, &optimizer).await?;
            let cleared = model.clear_gradients().await;
            let released = model.release_slot().await;
            model.session.finish().await;
            for result in [cleared, released] {
                match result {
                    // A server that refuses the clearing step or the unload has no slots that keep
                    // gradients.
                    Ok(()) | Err(Fault::Failed(..)) => {}
                    // The model was never trained, so only the state of the slot is in doubt.
                    Err(Fault::InDoubt(reason)) => return Err(Fault::Unavailable(reason)),
                    Err(fault) => return Err(fault),
                }
            }
        }
        Ok(guard)
    }
}
