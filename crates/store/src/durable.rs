//! [`SharedStore`]: the store behind its mutex, and writes that wait until they are durable.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedMutexGuard, oneshot};

use crate::clock::Clock;
use crate::disk::MetadataReader;
use crate::error::ServerError;
use crate::store::{Record, Store};

/// Records to write and the value to return once they are durable, or the reason to change nothing.
pub type Proposal<T> = Result<(Vec<Record>, T), ServerError>;

/// Permission to change existing records; see [`SharedStore::lock_changes`].
pub type ChangeGuard = OwnedMutexGuard<()>;

/// The store, shared by connections, backends and the expiry task. Cheap to clone.
#[derive(Clone)]
pub struct SharedStore {
    store: Arc<Mutex<Store>>,
    clock: Clock,
    metadata: MetadataReader,
    /// Serializes changes to existing records; see [`change`](Self::change).
    change_lock: Arc<tokio::sync::Mutex<()>>,
}

impl SharedStore {
    /// Shares a store.
    #[must_use]
    pub fn new(store: Store) -> Self {
        let clock = store.clock.clone();
        let metadata = store.disk.metadata();
        Self { store: Arc::new(Mutex::new(store)), clock, metadata, change_lock: Arc::default() }
    }

    /// Locks the store. Callbacks of writes take the lock too, so the holder of the lock must not
    /// wait for a callback.
    pub fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock()
    }

    /// Returns the clock of the store without locking the store.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Returns the reader of the metadata of objects.
    #[must_use]
    pub fn metadata(&self) -> &MetadataReader {
        &self.metadata
    }

    /// Writes records with new ids. The change lock is not needed, because no other request can
    /// refer to the new ids yet.
    ///
    /// # Errors
    /// Returns the error of `decide`, or [`ServerError::StorageUnavailable`] after rolling back.
    pub async fn create<T>(
        &self,
        decide: impl FnOnce(&mut Store) -> Proposal<T>,
    ) -> Result<T, ServerError> {
        self.write(None, decide).await
    }

    /// Changes existing records. Changes run one at a time, so that rolling back one change never
    /// reverts another change.
    ///
    /// # Errors
    /// Returns the error of `decide`, or [`ServerError::StorageUnavailable`] after rolling back.
    pub async fn change<T>(
        &self,
        decide: impl FnOnce(&mut Store) -> Proposal<T>,
    ) -> Result<T, ServerError> {
        let guard = self.lock_changes().await;
        self.write(Some(guard), decide).await
    }

    /// Waits until no other change of existing records is being written. For a change that does not
    /// use [`change`](Self::change); keep the guard until the change is durable or rolled back.
    pub async fn lock_changes(&self) -> ChangeGuard {
        Arc::clone(&self.change_lock).lock_owned().await
    }

    async fn write<T>(
        &self,
        guard: Option<ChangeGuard>,
        decide: impl FnOnce(&mut Store) -> Proposal<T>,
    ) -> Result<T, ServerError> {
        let (sender, receiver) = oneshot::channel();
        let value = {
            let mut store = self.lock();
            let (records, value) = decide(&mut store)?;
            if records.is_empty() {
                // The records already exist, but their write may still be in progress.
                store.disk.barrier(Box::new(move |written| drop(sender.send(written))));
            } else {
                let undo = store.prepare_undo(&records);
                let shared = Arc::clone(&self.store);
                // Roll back in the callback, not after the await: a caller that disconnects drops
                // this future, and the change would remain in memory without being durable.
                let on_written = Box::new(move |written: std::io::Result<()>| {
                    if written.is_err() {
                        undo(&mut shared.lock());
                    }
                    drop((guard, sender.send(written)));
                });
                store.put(records, on_written);
            }
            value
        };
        match receiver.await {
            Ok(Ok(())) => Ok(value),
            Ok(Err(error)) => Err(ServerError::write_failed(&error)),
            Err(_) => {
                let error = std::io::Error::other("the server is shutting down");
                Err(ServerError::write_failed(&error))
            }
        }
    }
}
