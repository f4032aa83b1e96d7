//! [`Generation`]: a running inference request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tinkex_wire::RequestId;

use super::model_name::NamedModel;
use super::request::{GenerationRequest, PreparedGeneration};
use super::token_buffer::{GenerationProgress, TokenBuffer, TokenSink};
use crate::admit::{check_capacity, relay};
use crate::error::ServerError;
use crate::operation::{Operation, QueuedGeneration, QueuedRequest, WeightsKey};
use crate::state::ServerState;

/// An inference request that is queued or being sampled.
///
/// Dropping it cancels the request: the worker removes it before its next step, which releases its
/// pages of the KV cache and its share of the queue limits.
pub(crate) struct Generation {
    id: RequestId,
    state: Arc<ServerState>,
    buffer: Arc<TokenBuffer>,
    /// Whether the end was returned, so that there is nothing to cancel.
    ended: bool,
}

impl Generation {
    /// Validates a request and enqueues it. Does not wait.
    ///
    /// # Errors
    /// - [`ServerError::Invalid`] if the request is not valid for the model.
    /// - [`ServerError::Busy`] if the queue is full or the server is shutting down.
    /// - [`ServerError::Unavailable`] if the worker has panicked.
    pub(crate) fn start(
        state: &Arc<ServerState>,
        model: &NamedModel,
        request: GenerationRequest,
    ) -> Result<Self, ServerError> {
        let id = RequestId::from(uuid::Uuid::new_v4().simple().to_string());
        let buffer = Arc::new(TokenBuffer::default());
        let (session, sink) = (model.session.clone(), TokenSink(Arc::clone(&buffer)));
        let WeightsKey { base_model, folder } = &model.weights;
        let (operation, bytes) = match relay::weights(state, base_model, folder.as_deref())? {
            Some(weights) => {
                let (sample, seed) = request.into_sample(state)?;
                let bytes = sample.prompt.to_tokens().map_or(0, |prompt| size_of_val(&*prompt));
                (relay::sample(state, weights, session, sample, seed, Some(sink))?, bytes)
            }
            None => {
                let PreparedGeneration { request, bytes } = request.prepare(state, &model.base)?;
                let weights = model.weights.clone();
                let queued = QueuedGeneration { weights, session, request, sink };
                (Operation::Generate(Box::new(queued)), bytes)
            }
        };
        // Hold the store's lock from the check to the push, as admission of other requests does:
        // concurrent requests would exceed the limits otherwise.
        let mut store = state.store();
        let queue = state.queue_for(&store, &operation);
        check_capacity(state, queue, bytes)?;
        state.generations.insert(&id, &buffer)?;
        store.touch(&model.session);
        let request = QueuedRequest::new(id.clone(), bytes, operation);
        // Only requests with a sequence number can be late, which generations do not have.
        let _ = queue.push(request);
        drop(store);
        Ok(Self { id, state: Arc::clone(state), buffer, ended: false })
    }

    /// Returns the id of the request, which log events contain.
    pub(crate) fn id(&self) -> &RequestId {
        &self.id
    }

    /// Ends the request because the tokens so far are a complete answer. Unlike a request that is
    /// dropped, it counts as successful.
    pub(crate) fn complete(self) {
        self.buffer.complete();
    }

    /// Returns new tokens, or `None` after the last one. The last token of every completion has a
    /// stop reason.
    ///
    /// # Errors
    /// - [`ServerError::Invalid`] if the weights produce logits that are not finite.
    /// - [`ServerError::Internal`] if the weights cannot be loaded or the sampler panicked.
    /// - [`ServerError::Busy`] if the server shuts down.
    /// - [`ServerError::Unavailable`] if the worker panicked.
    pub(crate) fn poll_progress(
        &mut self,
        context: &Context<'_>,
    ) -> Poll<Result<Option<GenerationProgress>, ServerError>> {
        let progress = self.buffer.poll(context);
        self.ended |= matches!(progress, Poll::Ready(Ok(None) | Err(_)));
        progress
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.state.generations.remove(&self.id);
        if !self.ended {
            self.buffer.end(Ok(()));
            self.state.backends.queues().for_each(|queue| queue.cancel(self.id.clone()));
        }
    }
}

/// All generations of a server, to end them when no worker will.
#[derive(Default)]
pub(crate) struct Generations(Mutex<GenerationTable>);

#[derive(Default)]
struct GenerationTable {
    active: HashMap<RequestId, Arc<TokenBuffer>>,
    /// Error with which new generations are rejected, once the server stops or the worker panicked.
    closed: Option<ServerError>,
}

impl Generations {
    fn lock(&self) -> MutexGuard<'_, GenerationTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, id: &RequestId, buffer: &Arc<TokenBuffer>) -> Result<(), ServerError> {
        let mut table = self.lock();
        match &table.closed {
            Some(error) => Err(error.clone()),
            None => {
                table.active.insert(id.clone(), Arc::clone(buffer));
                Ok(())
            }
        }
    }

    fn remove(&self, id: &RequestId) {
        self.lock().active.remove(id);
    }

    /// Fails all generations, and rejects new ones, with `error`. Called when the server stops and
    /// when the worker has panicked.
    pub(crate) fn fail_all(&self, error: &ServerError) {
        let mut table = self.lock();
        table.closed.get_or_insert_with(|| error.clone());
        for buffer in table.active.values() {
            buffer.end(Err(error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn all_generations_fail_when_the_server_stops_and_new_ones_are_rejected() {
        let generations = Generations::default();
        let buffers = [Arc::<TokenBuffer>::default(), Arc::default()];
        for (id, buffer) in ["a", "b"].into_iter().zip(&buffers) {
            assert!(generations.insert(&id.into(), buffer).is_ok());
        }
        generations.remove(&"b".into());
        generations.fail_all(&ServerError::worker_panicked());
        let poll = |buffer: &TokenBuffer| buffer.poll(&Context::from_waker(Waker::noop()));
        assert!(matches!(poll(&buffers[0]), Poll::Ready(Err(ServerError::Unavailable(_)))));
        assert!(poll(&buffers[1]).is_pending(), "it was removed before");
        generations.fail_all(&ServerError::shutting_down());
        let rejected = generations.insert(&"c".into(), &buffers[1]);
        assert!(matches!(rejected, Err(ServerError::Unavailable(_))), "the first error remains");
    }
}
