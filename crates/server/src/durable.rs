//! Writes records and waits until they are durable; a failed write is rolled back.

use std::sync::Arc;

use tokio::sync::{OwnedMutexGuard, oneshot};

use crate::error::ServerError;
use crate::state::ServerState;
use crate::store::{Record, Store};

/// Records to write and the value to return once they are durable, or the reason to change nothing.
pub(crate) type Proposal<T> = Result<(Vec<Record>, T), ServerError>;

/// Writes records with new ids. No lock is needed, because no other request can refer to them yet.
///
/// # Errors
/// Returns the error of `decide`, or [`ServerError::StorageUnavailable`] after rolling back.
pub(crate) async fn create<T>(
    state: &Arc<ServerState>,
    decide: impl FnOnce(&mut Store) -> Proposal<T>,
) -> Result<T, ServerError> {
    write(state, None, decide).await
}

/// Changes existing records. Changes run one at a time, so that rolling one back never reverts
/// another.
///
/// # Errors
/// Returns the error of `decide`, or [`ServerError::StorageUnavailable`] after rolling back.
pub(crate) async fn change<T>(
    state: &Arc<ServerState>,
    decide: impl FnOnce(&mut Store) -> Proposal<T>,
) -> Result<T, ServerError> {
    let guard = Arc::clone(&state.change_lock).lock_owned().await;
    write(state, Some(guard), decide).await
}

async fn write<T>(
    state: &Arc<ServerState>,
    guard: Option<OwnedMutexGuard<()>>,
    decide: impl FnOnce(&mut Store) -> Proposal<T>,
) -> Result<T, ServerError> {
    let (sender, receiver) = oneshot::channel();
    let value = {
        let mut store = state.store();
        let (records, value) = decide(&mut store)?;
        if records.is_empty() {
            // The records already exist, but their write may still be in progress.
            store.disk.barrier(Box::new(move |written| drop(sender.send(written))));
        } else {
            let undo = store.prepare_undo(&records);
            let callback_state = Arc::clone(state);
            // Roll back in the callback, not after the await: a caller that disconnects drops this
            // future, and the change would remain in memory without being durable.
            let on_written = Box::new(move |written: std::io::Result<()>| {
                if written.is_err() {
                    undo(&mut callback_state.store());
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
