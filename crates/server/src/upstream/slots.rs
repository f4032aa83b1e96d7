//! Slots for models on an upstream with an older protocol.
//!
//! SkyRL keeps the accumulated gradients of a slot when its model is unloaded, and a new model takes
//! the lowest free slot: its first optimizer step would apply the gradients of the other model. The
//! gateway therefore applies them with a learning rate of 0 before it unloads a model. If it could
//! not, because the upstream did not respond or had already unloaded the model, any free slot may
//! have such gradients. From then on a new model is created twice: the first one clears its slot,
//! and the second takes the same slot.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Mutex, MutexGuard};

use super::Upstream;
use super::fault::Fault;
use super::remote_model::ModelHandle;
use crate::store::{LoraSettings, Store};

/// What is known about the slots of an upstream.
pub(super) struct Slots {
    /// Whether a free slot may have gradients of an earlier model.
    may_be_dirty: AtomicBool,
    /// Held while a model is created, so that no other takes the slot that was cleared for it.
    creation: Mutex<()>,
}

impl Slots {
    /// Creates the slots of the upstream `name`. They may be dirty if an earlier process has used
    /// it: models that it was creating are not stored.
    pub(super) fn new(store: &Store, name: &str) -> Self {
        let mut runs = store.runs.values().filter_map(|run| run.row.upstream.as_ref());
        let was_used = runs.any(|upstream| upstream.name == name);
        Self { may_be_dirty: AtomicBool::new(was_used), creation: Mutex::default() }
    }

    /// Waits until no other model is being created.
    pub(super) async fn lock(&self) -> MutexGuard<'_, ()> {
        self.creation.lock().await
    }

    /// Records that the gradients of a model may still be in its slot.
    pub(super) fn set_dirty(&self) {
        self.may_be_dirty.store(true, Ordering::Relaxed);
    }
}

impl Upstream {
    /// Clears the slot that the next model will take, if it may have gradients of an earlier model.
    /// Create the model while the returned guard is held.
    pub(super) async fn clear_slot(
        &self,
        base_model: &str,
        lora: &LoraSettings,
    ) -> Result<MutexGuard<'_, ()>, Fault> {
        let guard = self.slots.lock().await;
        if self.is_older() && self.slots.may_be_dirty.load(Ordering::Relaxed) {
            let optimizer = tinkex::OptimizerConfig::default();
            let model = ModelHandle::create_in_any_slot(self, base_model, lora, &optimizer).await?;
            model.replace(self).await;
        }
        Ok(guard)
    }
}
