//! Telling the server about samples that nobody waits for any more.

use std::sync::Arc;

use futures_util::future::join_all;
use tinkex_wire::{CancelFuture, RequestId};
use tokio::sync::mpsc;

use crate::transport::{RequestOptions, Transport};

use super::Session;
use super::dynamic::Dynamic;

/// Sends cancels as they come, many at a time. A cancel that fails is not sent again: it only saves
/// the server work.
pub(super) async fn drain(
    transport: Arc<Transport>,
    dynamic: Arc<Dynamic>,
    mut queue: mpsc::UnboundedReceiver<RequestId>,
) {
    while let Some(first) = queue.recv().await {
        let mut batch = vec![first];
        let most = usize::try_from(dynamic.get().sample_cancel_max_batch_size).unwrap_or(1);
        while batch.len() <= most {
            let Ok(next) = queue.try_recv() else { break };
            batch.push(next);
        }
        let cancels = batch.into_iter().map(async |request_id| {
            let call = CancelFuture { request_id };
            if let Err(error) = transport.send(&call, &RequestOptions::default()).await {
                tracing::debug!(%error, "a cancel was lost");
            }
        });
        join_all(cancels).await;
    }
}

/// A sample that is being waited for. If this is dropped before the answer is there, the server is
/// told.
pub(crate) struct CancelGuard<'a> {
    session: &'a Session,
    request_id: Option<RequestId>,
}

impl<'a> CancelGuard<'a> {
    pub(crate) fn new(session: &'a Session, request_id: RequestId) -> Self {
        Self { session, request_id: Some(request_id) }
    }

    /// The answer is there.
    pub(crate) fn disarm(mut self) {
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
