//! [`CancelGuard`]: cancels a sample on the server when its caller no longer waits for the result.

use std::fmt;
use std::sync::Arc;

use futures_util::future::join_all;
use tinkex_wire::{CancelFuture, RequestId};
use tokio::sync::{Mutex, mpsc};

use crate::transport::{RequestOptions, Transport};

use super::Session;
use super::dynamic::DynamicSettings;

/// Sends queued cancellations in batches, until the queue is closed.
///
/// A failed cancellation is not retried, because it is only an optimization: without it the server
/// completes the sample, and no call reads the result.
pub(super) async fn send_cancellations(
    transport: Arc<Transport>,
    settings: Arc<DynamicSettings>,
    queue: Arc<Mutex<mpsc::UnboundedReceiver<RequestId>>>,
) {
    // The running task holds the lock. If its runtime ends, the task that replaces it in another
    // runtime acquires the lock and continues with the same queue.
    let mut queue = queue.lock().await;
    while let Some(first) = queue.recv().await {
        let limit = usize::try_from(settings.get().sample_cancel_max_batch_size).unwrap_or(1);
        let cancellations =
            take_batch(first, &mut queue, limit).into_iter().map(async |request_id| {
                let request = CancelFuture::new(request_id);
                let options = RequestOptions { single_attempt: true, ..RequestOptions::default() };
                if let Err(error) = transport.send(&request, &options).await {
                    tracing::debug!(%error, "cancellation failed");
                }
            });
        join_all(cancellations).await;
    }
}

/// Returns `first` and the requests queued after it, at most `limit` in total and at least one.
fn take_batch(
    first: RequestId,
    queue: &mut mpsc::UnboundedReceiver<RequestId>,
    limit: usize,
) -> Vec<RequestId> {
    let mut batch = vec![first];
    while batch.len() < limit {
        let Ok(next) = queue.try_recv() else { break };
        batch.push(next);
    }
    batch
}

/// Guard that cancels a sample when it is dropped, unless it was [disarmed](Self::disarm).
pub struct CancelGuard<'a> {
    session: &'a Session,
    request_id: Option<RequestId>,
}

impl<'a> CancelGuard<'a> {
    /// Creates a guard for the request `request_id` of `session`.
    pub fn new(session: &'a Session, request_id: RequestId) -> Self {
        Self { session, request_id: Some(request_id) }
    }

    /// Drops the guard without cancelling the sample. Call it once the result has arrived.
    pub fn disarm(mut self) {
        self.request_id = None;
    }
}

impl Drop for CancelGuard<'_> {
    fn drop(&mut self) {
        if let Some(request_id) = self.request_id.take() {
            self.session.cancel(request_id);
        }
    }
}

impl fmt::Debug for CancelGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CancelGuard").field(&self.request_id).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_never_exceeds_its_limit() {
        for (limit, sizes) in [(3, vec![3, 3, 1]), (1, vec![1; 7]), (0, vec![1; 7]), (9, vec![7])] {
            let (sender, mut queue) = mpsc::unbounded_channel();
            for id in 0..7 {
                sender.send(RequestId::from(id.to_string())).unwrap();
            }
            let mut batches = Vec::new();
            while let Ok(first) = queue.try_recv() {
                batches.push(take_batch(first, &mut queue, limit).len());
            }
            assert_eq!(batches, sizes, "limit {limit}");
        }
    }
}
