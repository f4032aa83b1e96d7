//! [`ModelGenerator`]: enqueues inference requests. [`Generations`]: the inference requests that
//! are queued or sampled.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tinkex_backend::upstream::ResponseSink;
use tinkex_inference::{
    ChatModel, GenerationRequest, InferenceError, ServedModel, StreamDrop, TokenSink, TokenStream,
    token_stream,
};
use tinkex_store::error::ServerError;
use tinkex_store::user::UserId;
use tinkex_store::weights::{WeightsKey, WeightsLocation};
use tinkex_text::{Result as TextResult, Tokenizer};
use tinkex_wire::RequestId;
use tokio::sync::Notify;

use super::Inference;
use super::error::inference_error;
use super::model_name::NamedModel;
use super::sample_request::{PreparedGeneration, prepare, upstream_sample};
use super::upstream_response::UpstreamResponse;
use crate::admit::{check_capacity, check_generation, relay};
use crate::operation::{
    EngineSampling, EngineWeights, Operation, QueuedGeneration, SampleOperation,
};

/// A model that inference requests are sampled from.
pub(crate) struct ModelGenerator {
    pub(crate) inference: Arc<Inference>,
    pub(crate) model: NamedModel,
}

impl ServedModel for ModelGenerator {
    fn name(&self) -> &str {
        &self.model.name
    }

    fn eos(&self) -> &[u32] {
        self.model.base.eos()
    }

    fn tokenizer(&self) -> Option<Tokenizer> {
        self.model.base.tokenizer()
    }

    fn chat(&self) -> Result<ChatModel, String> {
        self.model.base.chat()
    }

    fn max_text_bytes(&self) -> usize {
        self.inference.text_memory.max_text_bytes()
    }

    fn context(&self) -> Option<usize> {
        self.model.base.known_context()
    }

    fn encode(&self, tokenizer: &Tokenizer, text: &str, special: bool) -> TextResult<Vec<u32>> {
        self.inference.text_memory.reserve(text.len(), || {
            let tokens =
                if special { tokenizer.encode(text) } else { tokenizer.encode_piece(text) };
            Ok(tokens?.to_vec())
        })
    }

    fn generate(&self, request: GenerationRequest) -> Result<TokenStream, InferenceError> {
        self.start(request).map_err(inference_error)
    }
}

impl ModelGenerator {
    /// Validates a request and enqueues it. If the client drops the stream, the worker removes the
    /// request before its next step, and releases the request's pages of the KV cache and its share
    /// of the queue limits.
    ///
    /// # Errors
    /// - [`ServerError::Invalid`] if the request is not valid for the model.
    /// - [`ServerError::Busy`] if the queue is full or the server is shutting down.
    /// - [`ServerError::Unavailable`] if the worker has panicked.
    fn start(&self, request: GenerationRequest) -> Result<TokenStream, ServerError> {
        let Self { inference, model } = self;
        let id = RequestId::from(uuid::Uuid::new_v4().simple().to_string());
        let (sink, stream) = self.stream(&id);
        let account = model.account.clone();
        let samples = u64::from(request.completions);
        let admission = &inference.admission;
        let WeightsKey { base_model, location } = &model.weights;
        let upstream = relay::weights(admission, base_model, location.as_ref())?;
        let (operation, bytes) = match upstream {
            Some(weights) => {
                let (sample, seed) = upstream_sample(admission, request)?;
                let bytes = sample.prompt.to_tokens().map_or(0, |prompt| size_of_val(&*prompt));
                let sink: Arc<dyn ResponseSink> = Arc::new(UpstreamResponse(sink.clone()));
                let sample = relay::sample(admission, weights, account, sample, seed, Some(sink))?;
                (sample, bytes)
            }
            None => {
                let PreparedGeneration { request, bytes } =
                    prepare(admission, &model.base, request)?;
                let folder = location.as_ref().and_then(WeightsLocation::local);
                let weights = EngineWeights {
                    base_model: base_model.clone(),
                    folder: folder.map(str::to_owned),
                };
                let sink = sink.clone();
                let queued = QueuedGeneration { weights, account, request, sink };
                let sampling = EngineSampling::Generate(Box::new(queued));
                (Operation::Sample(SampleOperation::Engine(sampling)), bytes)
            }
        };
        // Hold the store's lock from the check of the limits until the request is enqueued, as the
        // admission of other requests does: otherwise concurrent requests would exceed the limits.
        let mut store = admission.store();
        check_capacity(&admission.limits, operation.queue(&admission.backends), bytes)?;
        let user = &model.account.owner;
        check_generation(&store, &inference.generations, user, samples)?;
        inference.generations.insert(&id, sink, user, samples)?;
        store.touch(&model.account.session);
        // Enqueuing fails only if a sequence number is late, and generations have no sequence
        // numbers.
        let _ = operation.enqueue(&admission.backends, id, model.account.clone(), bytes, None);
        drop(store);
        Ok(stream)
    }

    /// Creates the channel of a generation. If the reader of the channel is dropped before the end,
    /// the generation is cancelled.
    fn stream(&self, id: &RequestId) -> (TokenSink, TokenStream) {
        let inference = Arc::clone(&self.inference);
        let request = id.clone();
        token_stream(id.to_string(), move |read| {
            let was_enqueued = inference.generations.remove(&request);
            if was_enqueued && read == StreamDrop::Cancelled {
                inference
                    .admission
                    .backends
                    .queues()
                    .for_each(|queue| queue.cancel(request.clone()));
            }
        })
    }
}

/// All generations of a server that are queued or sampled. The table is used to fail the
/// generations when the worker cannot, because the server stops or the worker has panicked.
#[derive(Default)]
pub(crate) struct Generations {
    table: Mutex<GenerationTable>,
    /// Notified whenever a generation ends.
    ended: Notify,
}

#[derive(Default)]
struct GenerationTable {
    active: HashMap<RequestId, ActiveGeneration>,
    /// Number of active generations of each user.
    by_user: HashMap<UserId, UserGenerations>,
    /// Error with which new generations are rejected; set once the server stops or the worker has
    /// panicked.
    closed: Option<ServerError>,
}

/// A generation that is queued or sampled.
struct ActiveGeneration {
    sink: TokenSink,
    user: UserId,
    /// Number of completions.
    samples: u64,
}

/// Number of active generations of a user, and of their completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UserGenerations {
    pub(crate) requests: u64,
    pub(crate) samples: u64,
}

impl Generations {
    /// Returns the number of active generations of a user.
    pub(crate) fn of_user(&self, user: &UserId) -> UserGenerations {
        self.table.lock().by_user.get(user).copied().unwrap_or_default()
    }

    /// Adds a generation.
    ///
    /// # Errors
    /// The error of [`fail_all`](Self::fail_all), if it was called before.
    fn insert(
        &self,
        id: &RequestId,
        sink: TokenSink,
        user: &UserId,
        samples: u64,
    ) -> Result<(), ServerError> {
        let mut table = self.table.lock();
        if let Some(error) = &table.closed {
            return Err(error.clone());
        }
        let of_user = table.by_user.entry(user.clone()).or_default();
        of_user.requests += 1;
        of_user.samples += samples;
        let generation = ActiveGeneration { sink, user: user.clone(), samples };
        table.active.insert(id.clone(), generation);
        Ok(())
    }

    /// Removes a generation. Returns whether it was in the table.
    fn remove(&self, id: &RequestId) -> bool {
        let mut table = self.table.lock();
        let Some(generation) = table.active.remove(id) else { return false };
        if let Some(of_user) = table.by_user.get_mut(&generation.user) {
            of_user.requests -= 1;
            of_user.samples -= generation.samples;
            if of_user.requests == 0 {
                table.by_user.remove(&generation.user);
            }
        }
        drop(table);
        self.ended.notify_waiters();
        true
    }

    /// Returns the number of generations that are queued or sampled.
    pub(crate) fn count(&self) -> usize {
        self.table.lock().active.len()
    }

    /// Waits until no generation is queued or sampled.
    pub(crate) async fn finished(&self) {
        loop {
            let ended = self.ended.notified();
            if self.count() == 0 {
                return;
            }
            ended.await;
        }
    }

    /// Fails all generations, and rejects further generations, with `error`. Called when the server
    /// stops and when the worker has panicked.
    pub(crate) fn fail_all(&self, error: &ServerError) {
        let mut table = self.table.lock();
        table.closed.get_or_insert_with(|| error.clone());
        for generation in table.active.values() {
            generation.sink.finish(Err(inference_error(error.clone())));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use tinkex_inference::ErrorClass;

    use super::*;

    #[test]
    fn all_generations_fail_when_the_server_stops_and_new_ones_are_rejected() {
        let generations = Generations::default();
        let user = UserId::default();
        let channel = || token_stream("1".to_owned(), |_| {});
        let (first_sink, mut first) = channel();
        let (second_sink, mut second) = channel();
        assert!(generations.insert(&"a".into(), first_sink, &user, 2).is_ok());
        assert!(generations.insert(&"b".into(), second_sink.clone(), &user, 1).is_ok());
        assert_eq!(generations.of_user(&user), UserGenerations { requests: 2, samples: 3 });
        assert!(generations.remove(&"b".into()));
        assert_eq!(generations.of_user(&user), UserGenerations { requests: 1, samples: 2 });
        generations.fail_all(&ServerError::worker_panicked());
        let poll =
            |stream: &mut TokenStream| stream.poll_progress(&Context::from_waker(Waker::noop()));
        let Poll::Ready(Err(error)) = poll(&mut first) else { panic!("no error") };
        assert_eq!(error.class(), ErrorClass::Unavailable);
        assert!(poll(&mut second).is_pending(), "it was removed before");
        generations.fail_all(&ServerError::shutting_down());
        let rejected = generations.insert(&"c".into(), second_sink, &user, 1);
        assert!(matches!(rejected, Err(ServerError::Unavailable(_))), "the first error remains");
    }
}
