//! [`SamplingClient`]: generates completions from fixed weights.

mod active_samples;
mod request_builder;
mod resubmit;
mod sequence_range;
#[cfg(feature = "tokenizer")]
mod tokenizer;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tinkex_wire::rest::{GetSampler, SamplerInfo};
use tinkex_wire::{
    CreateSamplingSession, Logprobs, ModelInput, SampleRequest, SampleResponse, SamplerHandle,
    SamplerId, SamplingParams, SubmitRequest as _, header as wire_header,
};
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};

use crate::error::{Error, ErrorKind, Result};
use crate::future::SampleFuture;
use crate::future::poll::{Poller, Submitted};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::service::ServiceClient;
use crate::session::{CancelGuard, Session};
use crate::transport::backoff::RequestBackoff;
use crate::transport::{RequestOptions, header};
use crate::validated::Validated;

use active_samples::ActiveSamples;
pub use request_builder::SampleRequestBuilder;
#[cfg(test)]
pub(crate) use resubmit::is_resubmittable;
use sequence_range::SequenceRange;

/// Client that samples from fixed weights: a base model or a checkpoint.
///
/// Created by [`ServiceClient::create_sampling_client`],
/// [`ServiceClient::create_sampling_client_from`] or
/// [`TrainingClient::save_weights_and_get_sampling_client`]. Cloning is cheap; clones share one
/// sampling session and its concurrency limits.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// use tinkex::SamplingParams;
///
/// let sampler = service.create_sampling_client("Qwen/Qwen3-8B").await?;
/// let params = SamplingParams::new().max_tokens(64).temperature(0.7);
/// let response = sampler.sample([1, 2, 3], params).num_samples(4).await?;
/// for sequence in &response.sequences {
///     println!("{:?}", &sequence.tokens[..]);
/// }
/// # Ok(()) }
/// ```
///
/// # Cancel safety
/// Dropping a [`SampleFuture`] cancels the sample. The requests of a [`TrainingClient`], in
/// contrast, are executed even if their futures are dropped.
///
/// [`TrainingClient`]: crate::TrainingClient
/// [`TrainingClient::save_weights_and_get_sampling_client`]: crate::TrainingClient::save_weights_and_get_sampling_client
#[derive(Clone)]
pub struct SamplingClient(Arc<SamplingShared>);

/// State shared by all clones of a [`SamplingClient`].
struct SamplingShared {
    session: Arc<Session>,
    id: SamplerId,
    /// Set from the start for the session's creator, otherwise obtained before the first sample.
    sequence: OnceCell<SequenceRange>,
    record_stability_info: bool,
    active: ActiveSamples,
    log: QueueLog,
}

/// Weights to create a sampling session for.
pub(crate) enum SamplingWeights {
    /// Name of a base model.
    Base(String),
    /// Path of a sampler checkpoint.
    Checkpoint(String),
}

impl SamplingClient {
    pub(crate) async fn create(session: Arc<Session>, weights: SamplingWeights) -> Result<Self> {
        let (session_id, index) = (session.id().clone(), session.next_sampler());
        let request = match weights {
            SamplingWeights::Base(model) => {
                CreateSamplingSession::from_base(session_id, index, model)
            }
            SamplingWeights::Checkpoint(path) => {
                CreateSamplingSession::from_path(session_id, index, path)
            }
        };
        let created = session.transport().send(&request, &RequestOptions::default()).await?;
        Ok(Self::of_creator(session, created.sampling_session_id))
    }

    /// Creates the client of a sampling session that this process created: clone 0.
    pub(crate) fn of_creator(session: Arc<Session>, id: SamplerId) -> Self {
        let sequence = SequenceRange::of_creator(&session, &id);
        Self::with(session, id, OnceCell::new_with(Some(sequence)), false)
    }

    /// Creates an additional client of a sampling session, which obtains a clone number before its
    /// first sample.
    pub(crate) fn restore(session: Arc<Session>, handle: &SamplerHandle) -> Self {
        let (id, stability) = (handle.sampling_session_id.clone(), handle.record_stability_info);
        Self::with(session, id, OnceCell::new(), stability)
    }

    fn with(
        session: Arc<Session>,
        id: SamplerId,
        sequence: OnceCell<SequenceRange>,
        record_stability_info: bool,
    ) -> Self {
        let active = ActiveSamples::new(session.config(), session.settings());
        let log = QueueLog::new(QueuedWork::Sampling, id.as_str());
        Self(Arc::new(SamplingShared { session, id, sequence, record_stability_info, active, log }))
    }

    /// Creates a client for the sampling session of another process, on the handle's server.
    ///
    /// Uses the credential of this process's environment and sends nothing yet. Use trusted handles
    /// only: the handle names the server that receives the credential.
    ///
    /// # Errors
    /// [`ErrorKind::Auth`] without a credential; [`ErrorKind::Config`] outside a tokio runtime.
    pub fn from_handle(handle: &SamplerHandle) -> Result<Self> {
        let mut builder = ServiceClient::builder().base_url(&handle.holder.base_url);
        for (name, value) in handle.holder.default_headers_overrides.iter().flatten() {
            builder = builder.header(name, value);
        }
        builder.build()?.restore_sampling_client(handle)
    }

    /// Returns a handle with which another process can sample from the same weights.
    ///
    /// Serialize it with [`SamplerHandle::to_text`] and restore it with
    /// [`from_handle`](Self::from_handle) or [`ServiceClient::restore_sampling_client`]. The handle
    /// holds no credential, but it does hold the headers set on the builder: keep secrets out of
    /// them.
    #[must_use]
    pub fn handle(&self) -> SamplerHandle {
        SamplerHandle::new(self.0.session.id().clone(), self.0.id.clone(), self.0.session.holder())
            .record_stability_info(self.0.record_stability_info)
    }

    /// Returns the id of the sampling session.
    #[must_use]
    pub fn sampler_id(&self) -> &SamplerId {
        &self.0.id
    }

    /// Returns the remaining backoff after a 429 response, or `None` if none is active.
    ///
    /// No sample is submitted during a backoff. All clients of this server and API key in the
    /// process share it.
    #[must_use]
    pub fn backoff_remaining(&self) -> Option<Duration> {
        let remaining = self.0.session.admission().backoff().remaining();
        (!remaining.is_zero()).then_some(remaining)
    }

    /// Creates a request for completions of `prompt`.
    ///
    /// Await the builder, or call [`SampleRequestBuilder::send`]; nothing is sent before that.
    pub fn sample(
        &self,
        prompt: impl Into<ModelInput>,
        params: SamplingParams,
    ) -> SampleRequestBuilder {
        let mut request = SampleRequest::new(prompt, params);
        if self.0.record_stability_info {
            request.record_stability_info = Some(true);
        }
        SampleRequestBuilder::new(self.clone(), request)
    }

    /// Computes the log-probability of every token given the tokens before it. The first has none.
    ///
    /// ```no_run
    /// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
    /// let logprobs = sampler.compute_logprobs([1, 2, 3]).await?;
    /// assert_eq!(logprobs.len(), 3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if the response holds no log-probabilities; otherwise fails like a
    /// sample.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the computation, as for a sample.
    pub fn compute_logprobs(&self, tokens: impl Into<ModelInput>) -> SampleFuture<Logprobs> {
        let request = SampleRequest::new(tokens, SamplingParams::new().max_tokens(1))
            .prompt_logprobs(Some(true));
        // `sample_no_retries` returns lost samples to the caller; it does not cover
        // log-probabilities.
        self.start("compute_logprobs", request, self.0.session.resubmits(), |response| {
            let message = "the response contains no prompt log-probabilities";
            let missing = || Error::new(ErrorKind::Decode, message);
            response.prompt_logprobs.ok_or_else(missing)
        })
    }

    /// Returns the base model, checkpoint and tokenizer of the sampling session.
    ///
    /// # Errors
    /// Fails if the request fails.
    ///
    /// # Cancel safety
    /// Cancel safe: the request changes nothing on the server.
    pub async fn get_sampler(&self) -> Result<SamplerInfo> {
        let request = GetSampler::new(self.0.id.clone());
        self.0.session.transport().send(&request, &RequestOptions::default()).await
    }

    /// Returns whether a lost sample is resubmitted. Otherwise its error is returned to the caller.
    fn resubmits_samples(&self) -> bool {
        self.0.session.resubmits() && !self.0.session.config().sample_no_retries
    }

    /// Starts a request. `call` names the method in errors about invalid input.
    fn start<T: Send + 'static>(
        &self,
        call: &'static str,
        mut request: SampleRequest,
        resubmit: bool,
        finish: impl FnOnce(SampleResponse) -> Result<T> + Send + 'static,
    ) -> SampleFuture<T> {
        request.sampling_session_id = Some(self.0.id.clone());
        let request = match Validated::new(request) {
            Ok(request) => request,
            Err(error) => return SampleFuture::failed(Error::from(error).during(call)),
        };
        // Boxed to keep the memory of a waiting sample small; see `SamplingShared::sample`.
        let (shared, request) = (Arc::clone(&self.0), Box::new(request));
        SampleFuture::start(async move {
            let result = shared.session.run_until_closed(shared.sample(request, resubmit)).await;
            finish(shared.session.connection().record_failure(result)?)
        })
    }
}

impl SamplingShared {
    /// Samples once, and resubmits after a transient failure if `resubmit` is set.
    async fn sample(
        &self,
        mut request: Box<Validated<SampleRequest>>,
        resubmit: bool,
    ) -> Result<SampleResponse> {
        let active = self.active.start().await;
        // Boxed: of ten thousand samples most wait for a permit, and a waiting sample should not
        // occupy the memory of the large future that submits and polls.
        let work = Box::pin(async {
            let (mut attempt, start) = (0, Instant::now());
            loop {
                let error = match self.sample_once(&mut request, start).await {
                    Ok(response) => {
                        self.active.record_success();
                        return Ok(response);
                    }
                    Err(error) => error,
                };
                let delay = resubmit::delay(attempt, fastrand::f64());
                let timeout = self.session.settings().retry.retry_timeout();
                let late = timeout.is_some_and(|timeout| start.elapsed() + delay > timeout);
                let again = resubmit && !late && resubmit::is_resubmittable(&error);
                if let Some(events) = self.session.connection().events() {
                    events.attempt(
                        resubmit::SAMPLE_FAILED,
                        &error,
                        resubmit::event_attributes(again, attempt),
                    );
                }
                if !again {
                    return Err(error);
                }
                tracing::debug!(%error, attempt, ?delay, "resubmitting the sample");
                sleep(delay).await;
                attempt += 1;
            }
        });
        match select(work, pin!(active.progress_timeout())).await {
            Either::Left((result, _)) | Either::Right((result, _)) => result,
        }
    }

    /// Submits the sample and polls its result. `since` is the start of the retry timeout: the
    /// first submission of the sample.
    async fn sample_once(
        &self,
        request: &mut Validated<SampleRequest>,
        since: Instant,
    ) -> Result<SampleResponse> {
        let sequence =
            self.sequence.get_or_try_init(|| SequenceRange::join(&self.session, &self.id)).await?;
        // Every submission gets a new number. HTTP retries of one submission keep it.
        request.set_seq(sequence.next());
        let submitted = self.submit(request, since).await?;
        let cancel = CancelGuard::new(&self.session, submitted.response.request_id.clone());
        let poller = Poller::new(&self.session, &self.log).with_batch_poll(sequence.batch_poll());
        let result = poller.result::<SampleRequest>(&submitted).await;
        // After any other error the server may still be generating, so the guard cancels it.
        let finished = |kind| matches!(kind, ErrorKind::WorkFailed | ErrorKind::Expired);
        if result.as_ref().map_or_else(|error| finished(error.kind()), |_| true) {
            cancel.disarm();
        }
        let mut response = result?;
        if request.get().prompt_logprobs_last_n.is_none() {
            align_prompt_logprobs(&mut response, request.get().prompt.token_count());
        }
        request.get().validate_response(&response)?;
        response.assign_sequence_ids(&submitted.response)?;
        Ok(response)
    }

    /// Submits the request once admission control and the shared backoff allow it.
    async fn submit(
        &self,
        request: &Validated<SampleRequest>,
        since: Instant,
    ) -> Result<Submitted> {
        let start = Instant::now();
        let bytes = request.get().prompt.sampling_bytes() as u64;
        let admission = self.session.admission();
        let _permit = admission.acquire(bytes).await;
        let backoff = RequestBackoff { backoff: Arc::clone(admission.backoff()), bytes };
        let mut options = RequestOptions {
            backoff: Some(backoff),
            waiting_since: Some(since),
            ..RequestOptions::default()
        };
        header::put(&mut options.headers, wire_header::SAMPLING_BACKPRESSURE, "1");
        let response = self.session.transport().send(request, &options).await?;
        let request_type = request.request_type();
        Ok(Submitted { response, request_type, submit_duration: start.elapsed() })
    }
}

impl fmt::Debug for SamplingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SamplingClient").field("id", &self.0.id).finish_non_exhaustive()
    }
}

/// Inserts NaN for the first prompt token if the server omitted it, as SkyRL does. Without it,
/// every log-probability would be attributed to the previous token.
fn align_prompt_logprobs(response: &mut SampleResponse, prompt_len: Option<usize>) {
    if let Some(logprobs) = &mut response.prompt_logprobs
        && prompt_len == Some(logprobs.len() + 1)
    {
        let aligned = std::iter::once(f32::NAN).chain(logprobs.as_slice().iter().copied());
        *logprobs = Logprobs::from(aligned.collect::<Vec<_>>());
    }
}
