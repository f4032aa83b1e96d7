//! [`TrainingClient`]: training one model.

mod chunk;
mod create;
mod merge;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod turn;

use std::fmt;
use std::sync::Arc;

use futures_util::future::join_all;
use tinkex_wire::{
    Call as _, Datum, ForwardBackward, GetInfo, LoadWeights, LossConfig, LossFn, Mode, ModelId,
    ModelInfo, OptimParams, OptimStep, OptimStepOutput, SaveWeights, SaveWeightsForSampler, Seq,
    Submit, TinkerPath,
};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::future::observe::{QueueLog, Work};
use crate::future::poll::{Poller, Taken};
use crate::sampling::SamplingClient;
use crate::session::Session;
use crate::transport::Extras;

use chunk::{Chunk, Limits};
use turn::{Turn, Turnstile};

pub use create::{CreateFromState, CreateLora};
pub use merge::{Metric, PassOutput};

/// A model in training. Cheap to clone; all clones stand in one line.
///
/// Calls are queued when you make them and sent in that order, whenever you await them:
///
/// ```no_run
/// # async fn run(model: tinkex::TrainingClient, batch: Vec<tinkex::Datum>) -> tinkex::Result<()> {
/// use tinkex::{AdamParams, LossFn};
///
/// let gradients = model.forward_backward(batch, LossFn::CrossEntropy);
/// let step = model.optim_step(AdamParams::with_learning_rate(1e-4));
/// println!("{:?}", gradients.await?.metrics);
/// step.await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct TrainingClient(Arc<Inner>);

struct Inner {
    session: Arc<Session>,
    model_id: ModelId,
    turns: Turnstile,
    log: QueueLog,
}

/// A loss and its settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    function: LossFn,
    config: LossConfig,
}

impl Loss {
    /// A loss with settings of its own.
    #[must_use]
    pub fn new(function: LossFn, config: LossConfig) -> Self {
        Self { function, config }
    }
}

impl From<LossFn> for Loss {
    fn from(function: LossFn) -> Self {
        Self::new(function, LossConfig::new())
    }
}

impl TrainingClient {
    pub(crate) fn new(session: Arc<Session>, model_id: ModelId) -> Self {
        let log = QueueLog::new(Work::Training, model_id.as_str());
        Self(Arc::new(Inner { session, model_id, turns: Turnstile::new(), log }))
    }

    /// The model's id.
    #[must_use]
    pub fn model_id(&self) -> &ModelId {
        &self.0.model_id
    }

    /// Adds the gradient of `loss` over `data` to this model.
    ///
    /// Large batches are cut up and put together again. Dropping the future stops the waiting, not
    /// the training.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `data` is empty or cannot be trained on, and nothing was queued
    /// then; [`ErrorKind::WorkFailed`] if the server cannot compute the loss.
    pub fn forward_backward(
        &self,
        data: Vec<Datum>,
        loss: impl Into<Loss>,
    ) -> ApiFuture<PassOutput> {
        self.pass(Mode::ForwardBackward, data, &loss.into())
    }

    /// Computes `loss` over `data` without a gradient.
    ///
    /// # Errors
    /// As [`TrainingClient::forward_backward`].
    pub fn forward(&self, data: Vec<Datum>, loss: impl Into<Loss>) -> ApiFuture<PassOutput> {
        self.pass(Mode::Forward, data, &loss.into())
    }

    /// Applies the gradient gathered since the last step.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if a number makes no sense; then nothing was queued.
    pub fn optim_step(&self, params: impl Into<OptimParams>) -> ApiFuture<OptimStepOutput> {
        let params = params.into();
        if let Err(why) = params.check() {
            return ApiFuture::failed(why.into());
        }
        self.one(|model_id, seq| OptimStep { model_id, seq_id: Some(seq), params }, Ok)
    }

    /// Queues a pass and a step at once, which is what a fast loop does.
    ///
    /// # Errors
    /// As [`TrainingClient::forward_backward`] and [`TrainingClient::optim_step`], each for its own
    /// future.
    pub fn step(
        &self,
        data: Vec<Datum>,
        loss: impl Into<Loss>,
        params: impl Into<OptimParams>,
    ) -> (ApiFuture<PassOutput>, ApiFuture<OptimStepOutput>) {
        (self.forward_backward(data, loss), self.optim_step(params))
    }

    /// Saves weights and optimizer state under a name, and returns the checkpoint's address.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the name is taken.
    pub fn save_state(&self, name: impl Into<String>) -> ApiFuture<TinkerPath> {
        let name = name.into();
        self.one(|model, seq| SaveWeights::new(model, seq, name), |saved| Ok(saved.path.parse()?))
    }

    /// Saves weights to sample from under a name, and returns the checkpoint's address.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the name is taken.
    pub fn save_weights_for_sampler(&self, name: impl Into<String>) -> ApiFuture<TinkerPath> {
        let name = name.into();
        self.one(
            |model, seq| SaveWeightsForSampler::named(model, seq, name),
            |saved| match saved.path {
                Some(path) => Ok(path.parse()?),
                None => {
                    Err(Error::new(ErrorKind::Decode, "saved, but the server does not say where"))
                }
            },
        )
    }

    /// Saves weights under no name, only to sample from them, and returns a client that does.
    ///
    /// # Errors
    /// If the server cannot keep them.
    pub fn save_weights_and_get_sampling_client(&self) -> ApiFuture<SamplingClient> {
        let session = Arc::clone(&self.0.session);
        // Taken once, so that a resend asks for the same sampling session.
        let n = session.next_sampler();
        self.one(
            |model, seq| SaveWeightsForSampler::ephemeral(model, seq, n),
            |saved| match saved.sampling_session_id {
                Some(id) => Ok(SamplingClient::of(session, id)),
                None => {
                    Err(Error::new(ErrorKind::Decode, "saved, but there is nothing to sample from"))
                }
            },
        )
    }

    /// Loads a checkpoint's weights, and its optimizer state if wanted.
    ///
    /// # Errors
    /// [`ErrorKind::WorkFailed`] if the checkpoint does not fit this model.
    pub fn load_state(&self, path: &TinkerPath, optimizer: Restore) -> ApiFuture<()> {
        let (path, optimizer) = (path.to_string(), optimizer == Restore::WithOptimizer);
        let load =
            |model, seq| LoadWeights { optimizer, ..LoadWeights::into_model(model, seq, path) };
        self.one(load, |_| Ok(()))
    }

    /// What this model is.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn get_info(&self) -> Result<ModelInfo> {
        let call = GetInfo { model_id: self.0.model_id.clone() };
        self.0.session.transport().call(&call, &Extras::default()).await
    }

    /// Queues one request, and turns its answer into what the caller wants.
    fn one<S, T>(
        &self,
        request: impl FnOnce(ModelId, Seq) -> S,
        finish: impl FnOnce(S::Output) -> Result<T> + Send + 'static,
    ) -> ApiFuture<T>
    where
        S: Submit<Output: Send> + Send + Sync + 'static,
        T: Send + 'static,
    {
        let inner = Arc::clone(&self.0);
        let mut turn = inner.turns.reserve(1);
        let request = request(inner.model_id.clone(), turn.seq(0));
        ApiFuture::start(async move {
            turn.come().await;
            let taken = inner.submit(&request, &Extras::default()).await;
            // The next one may be sent now; the answer is waited for beside it.
            drop(turn);
            finish(inner.poller().answer::<S>(&taken?).await?)
        })
    }

    fn pass(&self, mode: Mode, data: Vec<Datum>, loss: &Loss) -> ApiFuture<PassOutput> {
        if data.is_empty() {
            return ApiFuture::failed(Error::new(ErrorKind::InvalidInput, "there is no data"));
        }
        let inner = Arc::clone(&self.0);
        let config = inner.session.config();
        let limits = Limits {
            datums: config.fwdbwd_max_chunk_len,
            bytes: config.fwdbwd_max_chunk_bytes_count,
        };
        let mut parts: Vec<Part> = chunk::cut(data, limits)
            .into_iter()
            .map(|Chunk { data, bytes }| Part {
                bytes,
                request: ForwardBackward {
                    loss_fn_config: loss.config.clone(),
                    mode,
                    ..ForwardBackward::new(inner.model_id.clone(), data, loss.function.clone())
                },
            })
            .collect();
        // Before any number is taken: one that is never sent would leave a hole in the sequence.
        if let Err(why) = parts.iter().try_for_each(|part| part.request.check()) {
            return ApiFuture::failed(why.into());
        }
        let turn = inner.turns.reserve(parts.len());
        for (i, part) in parts.iter_mut().enumerate() {
            part.request.seq_id = Some(turn.seq(i));
        }
        ApiFuture::start(async move {
            let taken = inner.submit_parts(turn, &parts).await;
            drop(parts);
            let answers = taken
                .into_iter()
                .map(async |taken| inner.poller().answer::<ForwardBackward>(&taken?).await);
            let outputs: Result<Vec<_>> = join_all(answers).await.into_iter().collect();
            Ok(merge::merge(outputs?))
        })
    }
}

/// One request of a batch.
struct Part {
    request: ForwardBackward,
    bytes: u64,
}

impl Inner {
    /// Sends all parts when their turn comes. A part that fails does not keep the others: a hole in
    /// the sequence would hold up the server.
    async fn submit_parts(&self, mut turn: Turn, parts: &[Part]) -> Vec<Result<Taken>> {
        turn.come().await;
        let Some((first, rest)) = parts.split_first() else { return Vec::new() };
        if self.session.config().parallel_fwdbwd_chunks {
            // The first goes last: the server starts at the lowest number, so by the time it
            // arrives the rest is queued and can run as one batch.
            let rest = join_all(rest.iter().map(|part| self.submit_part(part))).await;
            let first = self.submit_part(first).await;
            return std::iter::once(first).chain(rest).collect();
        }
        let mut taken = Vec::with_capacity(parts.len());
        for part in parts {
            taken.push(self.submit_part(part).await);
        }
        taken
    }

    async fn submit_part(&self, part: &Part) -> Result<Taken> {
        let _room = self.session.uploads().take(part.bytes).await;
        let compress = self.session.config().proto_compress_fwdbwd;
        self.submit(&part.request, &Extras { compress, ..Extras::default() }).await
    }

    async fn submit<S: Submit>(&self, request: &S, extras: &Extras) -> Result<Taken> {
        let start = Instant::now();
        let ticket = self.session.transport().call(request, extras).await?;
        let request_type = request.request_type();
        Ok(Taken { ticket, request_type, handed_over_in: start.elapsed() })
    }

    fn poller(&self) -> Poller<'_> {
        Poller::new(&self.session, &self.log)
    }
}

/// What is restored from a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Restore {
    /// The weights; the optimizer starts anew.
    WeightsOnly,
    /// The weights and the optimizer's state.
    WithOptimizer,
}

impl fmt::Debug for TrainingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingClient").field("model_id", self.model_id()).finish_non_exhaustive()
    }
}
