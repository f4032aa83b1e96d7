//! Facts that a caller waits for: on disk, or as if they had never been said.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{Fact, Store};

/// What a caller wants to be true, and what to tell it then.
pub(crate) type Wish<T> = Result<(Vec<Fact>, T), ApiError>;

/// Makes new facts true, which nobody else can know of yet.
pub(crate) async fn create<T>(
    shared: &Arc<Shared>,
    decide: impl FnOnce(&mut Store) -> Wish<T>,
) -> Result<T, ApiError> {
    put(shared, None, decide).await
}

/// Changes facts. Changes come one after the other, so that one which cannot be written can be taken
/// back without taking another along.
pub(crate) async fn change<T>(
    shared: &Arc<Shared>,
    decide: impl FnOnce(&mut Store) -> Wish<T>,
) -> Result<T, ApiError> {
    let turn = Arc::clone(&shared.changes).lock_owned().await;
    put(shared, Some(turn), decide).await
}

async fn put<T>(
    shared: &Arc<Shared>,
    turn: Option<tokio::sync::OwnedMutexGuard<()>>,
    decide: impl FnOnce(&mut Store) -> Wish<T>,
) -> Result<T, ApiError> {
    let (sent, received) = oneshot::channel();
    let value = {
        let mut store = shared.store();
        let (facts, value) = decide(&mut store)?;
        if facts.is_empty() {
            // True already. Whoever said it first may still wait for the disk.
            store.disk.settled(Box::new(move |written| drop(sent.send(written))));
        } else {
            let undo = store.before(&facts);
            let own = Arc::clone(shared);
            // Not after the wait: a caller that goes away would leave it undone.
            let then = Box::new(move |written: std::io::Result<()>| {
                if written.is_err() {
                    undo(&mut own.store());
                }
                drop((turn, sent.send(written)));
            });
            store.put(facts, then);
        }
        value
    };
    match received.await {
        Ok(Ok(())) => Ok(value),
        Ok(Err(why)) => Err(ApiError::disk(&why)),
        Err(_) => Err(ApiError::disk(&std::io::Error::other("the server is stopping"))),
    }
}
