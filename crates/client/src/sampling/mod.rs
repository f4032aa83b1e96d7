//! [`SamplingClient`]: generates completions from fixed weights.

mod active_samples;
mod interface;
mod options;
mod resubmit;
mod sequence_range;
mod session_sampler;
mod stream;
#[cfg(feature = "tokenizer")]
mod tokenizer;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use tinkex_session::SamplingWeights;
use tinkex_wire::rest::{CloseSampler, GetSampler, SamplerInfo};
use tinkex_wire::{
    CreateSamplingSession, Logprobs, ModelInput, SampleRequest, SampleResponse, SamplerHandle,
    SamplerId, SamplingParams, header as wire_header,
};
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep, timeout};

use crate::call_options::ApplyOptions as _;
use crate::error::{Error, ErrorKind, Result};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::future::{Poller, RequestFuture, Submitted};
use crate::service::ServiceClient;
use crate::session::{CancelGuard, Session};
use crate::settings::validate_concurrency;
use crate::transport::CallOptions;
use crate::transport::RequestOptions;
use crate::transport::http::Lane;
use crate::transport::request::header;
use crate::transport::retry::call_progress::CallProgress;
use crate::transport::retry::log::RetryReason;
use crate::transport::retry::shared_backoff::RequestBackoff;
use crate::validated::Validated;

use active_samples::ActiveSamples;
pub use interface::Sampling;
pub use options::SampleOptions;
use resubmit::SampleFailures;
use sequence_range::SequenceRange;
pub use stream::{SampleStream, SampleStreamOptions, StreamedToken};

/// Client that samples from fixed weights: a base model or a checkpoint.
///
/// Created by [`ServiceClient::create_sampling_client`],
/// [`ServiceClient::create_sampling_client_from`] or
/// [`TrainingClient::save_weights_and_get_sampling_client`]. Cloning is cheap; clones share one
/// sampling session and its concurrency limits.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// use tinkex::{SampleOptions, SamplingParams};
///
/// let sampler = service.create_sampling_client("Qwen/Qwen3-8B").await?;
/// let params = SamplingParams::new().max_tokens(64).temperature(0.7);
/// let response = sampler.sample([1, 2, 3], SampleOptions::new(params).num_samples(4)).await?;
/// for sequence in &response.sequences {
///     println!("{:?}", &sequence.tokens[..]);
/// }
/// # Ok(()) }
/// ```
///
/// # Cancel safety
/// Dropping a [`RequestFuture`] cancels the sample. The requests of a [`TrainingClient`], in
/// contrast, are executed even if their futures are dropped.
///
/// [`TrainingClient`]: crate::TrainingClient
/// [`TrainingClient::save_weights_and_get_sampling_client`]: crate::TrainingClient::save_weights_and_get_sampling_client
#[derive(Clone)]
pub struct SamplingClient(Arc<SamplingView>);

/// A sampling session with the options of one [`SamplingClient`] value. Each pending sample holds
/// an `Arc` of the view.
#[derive(Clone)]
struct SamplingView {
    shared: Arc<SamplingShared>,
    /// Samples in progress of this client and its clones, which share one concurrency limit.
    active: Arc<ActiveSamples>,
    options: CallOptions,
}

/// State shared by all clients of a sampling session in this process.
struct SamplingShared {
    session: Arc<Session>,
    id: SamplerId,
    /// Sequence numbers of this client. Set at creation if this process created the session,
    /// otherwise requested from the server before the first sample.
    sequence: OnceCell<SequenceRange>,
    /// Whether every sample requests data for numerical stability diagnostics.
    record_stability_info: bool,
    log: QueueLog,
    /// Whether [`SamplingClient::close`] was called.
    closed: AtomicBool,
}

impl SamplingClient {
    pub(crate) async fn create(
        session: Arc<Session>,
        weights: SamplingWeights,
        options: &CallOptions,
    ) -> Result<Self> {
        let session_id = session.id().clone();
        let index = session.next_sampler();
        let request = match weights {
            SamplingWeights::Base(model) => {
                CreateSamplingSession::from_base(session_id, index, model)
            }
            SamplingWeights::Checkpoint(path) => {
                CreateSamplingSession::from_path(session_id, index, path)
            }
        };
        let created = session.transport().send(&request, &options.request_options()).await?;
        Ok(Self::of_creator(session, created.sampling_session_id).with_options(*options))
    }

    /// Creates the client of a sampling session that this process created: clone 0.
    pub(crate) fn of_creator(session: Arc<Session>, id: SamplerId) -> Self {
        let sequence = SequenceRange::of_creator(&session, &id);
        Self::with(session, id, OnceCell::new_with(Some(sequence)), false)
    }

    /// Creates an additional client of a sampling session, which obtains a clone number before its
    /// first sample.
    pub(crate) fn restore(session: Arc<Session>, handle: &SamplerHandle) -> Self {
        let id = handle.sampling_session_id.clone();
        Self::with(session, id, OnceCell::new(), handle.record_stability_info)
    }

    fn with(
        session: Arc<Session>,
        id: SamplerId,
        sequence: OnceCell<SequenceRange>,
        record_stability_info: bool,
    ) -> Self {
        let settings = session.settings();
        let options = settings.options;
        let active = ActiveSamples::new(session.config(), settings.max_concurrent_samples);
        let log = QueueLog::new(QueuedWork::Sampling, id.as_str(), session.queue_observer());
        let closed = AtomicBool::new(false);
        let shared = SamplingShared { session, id, sequence, record_stability_info, log, closed };
        Self(Arc::new(SamplingView { shared: Arc::new(shared), active: Arc::new(active), options }))
    }

    /// Returns a client of the same sampling session whose calls have these options. Options that
    /// are not set keep the value of this client.
    ///
    /// ```no_run
    /// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
    /// use std::time::Duration;
    /// use tinkex::{CallOptions, SamplingParams};
    ///
    /// let hurried = sampler.with_options(CallOptions::new().timeout(Duration::from_secs(30)));
    /// hurried.sample([1, 2, 3], SamplingParams::new()).await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_options(&self, options: CallOptions) -> Self {
        let options = options.or(&self.0.options);
        Self(Arc::new(SamplingView { options, ..SamplingView::clone(&self.0) }))
    }

    /// Returns the options of this client's calls.
    fn options(&self) -> CallOptions {
        self.0.options
    }

    /// Returns a client of the same sampling session with its own limit of concurrent samples, at
    /// least 1. If the server sets a limit too, the lower one applies.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the limit is 0.
    pub fn with_max_concurrent_samples(&self, samples: u32) -> Result<Self> {
        validate_concurrency(Some(samples))?;
        let active = ActiveSamples::new(self.0.shared.session.config(), Some(samples));
        let active = Arc::new(active);
        Ok(Self(Arc::new(SamplingView { active, ..SamplingView::clone(&self.0) })))
    }

    /// Creates a client for the sampling session of another process, on the handle's server.
    ///
    /// Uses the credential of this process's environment and sends nothing yet. Use trusted handles
    /// only: the handle contains the URL of the server that receives the credential.
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
        SamplerHandle::new(
            self.0.shared.session.id().clone(),
            self.0.shared.id.clone(),
            self.0.shared.session.holder(),
        )
        .record_stability_info(self.0.shared.record_stability_info)
    }

    /// Returns the id of the sampling session.
    #[must_use]
    pub fn sampler_id(&self) -> &SamplerId {
        &self.0.shared.id
    }

    /// Returns the remaining backoff after a 429 response, or `None` if none is active.
    ///
    /// No sample is submitted during a backoff. All clients of this server and API key in the
    /// process share it.
    #[must_use]
    pub fn backoff_remaining(&self) -> Option<Duration> {
        self.0.shared.session.admission().backoff().active()
    }

    /// Samples completions of `prompt`.
    ///
    /// ```no_run
    /// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
    /// use tinkex::{SampleOptions, SamplingParams};
    ///
    /// let params = SamplingParams::new().max_tokens(64);
    /// let one = sampler.sample([1, 2, 3], &params).await?;
    ///
    /// // Two requests in flight at the same time.
    /// let four = SampleOptions::new(params).num_samples(4);
    /// let first = sampler.sample([1, 2, 3], &four);
    /// let second = sampler.sample([4, 5, 6], &four);
    /// println!("{} {}", first.await?.sequences.len(), second.await?.sequences.len());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if an option is invalid; nothing is sent in that case.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the sample: polling stops, and a cancellation is sent to the
    /// server if it supports cancellation. [`RequestFuture::detach`] lets it continue.
    pub fn sample(
        &self,
        prompt: impl Into<ModelInput>,
        options: impl Into<SampleOptions>,
    ) -> RequestFuture<SampleResponse> {
        let mut request = options.into().into_request(prompt.into());
        if self.0.shared.record_stability_info {
            request.record_stability_info = Some(true);
        }
        self.start("sample", request, self.resubmits_samples(), Ok)
    }

    /// Computes the log-probability of every token given the tokens before it. The first token has
    /// no log-probability ([`Logprobs::get`] returns `None`), because no token precedes it.
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
    pub fn compute_logprobs(&self, tokens: impl Into<ModelInput>) -> RequestFuture<Logprobs> {
        let request = SampleRequest::new(tokens, SamplingParams::new().max_tokens(1))
            .prompt_logprobs(Some(true));
        // `resubmit` is true even if the server sets `sample_no_retries`: that setting applies to
        // samples only.
        self.start("compute_logprobs", request, true, |response| {
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
    pub fn get_sampler(&self) -> RequestFuture<SamplerInfo> {
        let view = Arc::clone(&self.0);
        let _entered = self.0.shared.session.settings().enter_runtime();
        RequestFuture::start(async move {
            let request = GetSampler::new(view.shared.id.clone());
            let options = view.options.request_options();
            let sent = view.shared.session.transport().send(&request, &options);
            view.options.limit(sent).await
        })
    }

    /// Ends the sampling session, so that the server can delete the weights that
    /// [`save_weights_and_get_sampling_client`] saved for it. A program that saves weights in every
    /// step closes the sampling client of the previous step; otherwise the server keeps the weights
    /// until the session ends or, on a `tinkex` server, until they are unused for 6 hours (a
    /// setting of the server). Checkpoints with a name are never deleted.
    ///
    /// Ends the sampling session for all of its clients, including those in other processes: samples
    /// that the server has accepted are still executed, and later calls of this client and its
    /// clones fail with [`ErrorKind::Closed`].
    ///
    /// Succeeds if the server cannot end a sampling session: the request is an extension of
    /// `tinkex` servers. Other servers keep the weights for as long as they keep the session.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
    /// let sampler = model.save_weights_and_get_sampling_client().await?;
    /// // ... sample, and train on the samples ...
    /// sampler.close().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Fails if the server does not respond or refuses the request.
    ///
    /// # Cancel safety
    /// If the future is dropped before the request is sent, the server keeps the weights until the
    /// sampling session ends in another way. [`RequestFuture::detach`] lets the request continue.
    ///
    /// [`save_weights_and_get_sampling_client`]: crate::TrainingClient::save_weights_and_get_sampling_client
    pub fn close(&self) -> RequestFuture<()> {
        let _entered = self.0.shared.session.settings().enter_runtime();
        let view = Arc::clone(&self.0);
        view.shared.closed.store(true, Ordering::Relaxed);
        RequestFuture::start(async move {
            let session = &view.shared.session;
            let request = CloseSampler::new(view.shared.id.clone());
            let options = view.options.request_options();
            let sent = view.options.limit(session.transport().send(&request, &options)).await;
            match sent {
                // The server has no such request, or the sampling session does not exist any more.
                Err(error)
                    if error.is_missing_endpoint() || error.kind() == ErrorKind::NotFound =>
                {
                    Ok(())
                }
                sent => session.connection().record_failure(sent),
            }
        })
    }

    /// Returns whether the server allows lost samples to be resubmitted (`sample_no_retries` is not
    /// set). If it does not, the call fails.
    fn resubmits_samples(&self) -> bool {
        !self.0.shared.session.config().sample_no_retries
    }

    /// Checks that [`close`](Self::close) was not called.
    fn check_open(&self) -> Result<()> {
        if !self.0.shared.closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Closed, "the sampling client is closed")
            .with_hint("Create another sampling client, and save its weights again if needed."))
    }

    fn validate(&self, request: SampleRequest) -> Result<Validated<SampleRequest>> {
        self.check_open()?;
        self.0.options.validate()?;
        Ok(Validated::new(request)?)
    }

    /// Starts a request. Errors about invalid input contain the name `method`.
    fn start<T: Send + 'static>(
        &self,
        method: &'static str,
        mut request: SampleRequest,
        resubmit: bool,
        finish: impl FnOnce(SampleResponse) -> Result<T> + Send + 'static,
    ) -> RequestFuture<T> {
        request.sampling_session_id = Some(self.0.shared.id.clone());
        let request = match self.validate(request) {
            Ok(request) => request,
            Err(error) => return RequestFuture::failed(error.during(method)),
        };
        // Boxed to keep the memory of a waiting sample small; see `SamplingView::sample`.
        let request = Box::new(request);
        let view = Arc::clone(&self.0);
        let _entered = self.0.shared.session.settings().enter_runtime();
        RequestFuture::start(async move {
            let session = &view.shared.session;
            let mut call = CallProgress::new();
            // Do not box the future of `sample` here: `run_until_closed` boxes its argument.
            let work = session.run_until_closed(view.sample(request, resubmit, &mut call));
            let result = match view.options.call_limit() {
                None => work.await,
                Some(limit) => {
                    let ended = Box::pin(timeout(limit, work)).await;
                    ended.unwrap_or_else(|_| Err(call.deadline(limit)))
                }
            };
            session.transport().retry_log().ended(&call, Lane::Sample, &result);
            finish(session.connection().record_failure(result)?)
        })
    }
}

impl SamplingView {
    /// Samples until a result arrives, an error is final, or no sample of this client succeeds for
    /// the progress timeout.
    async fn sample(
        &self,
        request: Box<Validated<SampleRequest>>,
        resubmit: bool,
        call: &mut CallProgress,
    ) -> Result<SampleResponse> {
        let active = self.active.start().await;
        // Boxed after the permit is acquired: of ten thousand samples most wait for a permit, and a
        // waiting sample should not occupy the memory of the large future that submits and polls.
        let work = Box::pin(self.sample_with_resubmissions(request, resubmit, call));
        let timeout = self.options.progress_limit();
        // `select` consumes `work`, so the borrow of `call` ends with this statement.
        let ended = match select(work, pin!(active.progress_timeout(timeout))).await {
            Either::Left((result, _)) => Some(result),
            Either::Right(((), _)) => None,
        };
        match ended {
            Some(result) => result.map_err(|error| call.finish(error)),
            None => {
                let seconds = timeout.as_secs();
                let reason = format!("sampling timed out: no sample succeeded for {seconds} s");
                Err(call.timed_out(&reason))
            }
        }
    }

    /// Samples once, and resubmits after a transient failure if `resubmit` is set.
    async fn sample_with_resubmissions(
        &self,
        mut request: Box<Validated<SampleRequest>>,
        resubmit: bool,
        call: &mut CallProgress,
    ) -> Result<SampleResponse> {
        let mut failures = SampleFailures::default();
        let mut backoff = self.options.resubmit_backoff();
        let mut resubmissions = 0;
        loop {
            let error = match self.sample_once(&mut request, call).await {
                Ok(response) => {
                    self.active.record_success();
                    return Ok(response);
                }
                Err(error) => error,
            };
            let retry_after = self.options.honoured_retry_after(&error);
            let delay = backoff.next_delay().max(retry_after.unwrap_or_default());
            let waits = retry_after
                .is_none_or(|after| self.options.allows_retry_after(after, call.elapsed()));
            let again = resubmit
                && waits
                && self.allows_resubmission(resubmissions, delay, call)
                && failures.should_resubmit(&error);
            if let Some(events) = self.shared.session.connection().events() {
                let attributes = resubmit::event_attributes(again, resubmissions);
                events.attempt(resubmit::SAMPLE_FAILED, &error, attributes);
            }
            if !again {
                return Err(error);
            }
            let log = self.shared.session.transport().retry_log();
            log.retry(call, Lane::Sample, error, delay, RetryReason::Resubmit);
            sleep(delay).await;
            resubmissions += 1;
        }
    }

    /// Returns whether the settings allow another resubmission, `delay` from now.
    fn allows_resubmission(
        &self,
        resubmissions: u32,
        delay: Duration,
        call: &CallProgress,
    ) -> bool {
        let session = &self.shared.session;
        // The resubmission also waits for the shared backoff.
        let wait = delay.max(session.admission().backoff().remaining());
        self.options.allows_resubmission(resubmissions)
            && self.options.allows_attempt(call.attempts(), call.elapsed(), wait)
    }

    /// Submits the sample and polls for its result.
    async fn sample_once(
        &self,
        request: &mut Validated<SampleRequest>,
        call: &mut CallProgress,
    ) -> Result<SampleResponse> {
        let SamplingShared { session, id, sequence, log, .. } = &*self.shared;
        let sequence = sequence.get_or_try_init(|| SequenceRange::join(session, id)).await?;
        // Every submission gets a new sequence number. HTTP retries of one submission keep the
        // number.
        request.set_seq(sequence.next());
        let submitted = self.submit(request, call).await?;
        let cancel = CancelGuard::new(session, submitted.response.request_id.clone());
        let poller =
            Poller::new(session, log).with_options(&self.options).for_sample(sequence.batch_poll());
        let result = poller.result_in_call::<SampleRequest>(&submitted, call).await;
        // After any other error the server may still be generating tokens, so the guard cancels the
        // sample.
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
        call: &mut CallProgress,
    ) -> Result<Submitted> {
        let start = Instant::now();
        let session = &self.shared.session;
        let bytes = request.get().prompt.sampling_bytes() as u64;
        let admission = session.admission();
        let _permit = admission.acquire(bytes).await;
        call.admit();
        let backoff = RequestBackoff { backoff: Arc::clone(admission.backoff()), bytes };
        let backoff = Some(backoff);
        let mut options = RequestOptions { backoff, ..self.options.request_options() };
        header::put(&mut options.headers, wire_header::SAMPLING_BACKPRESSURE, "1");
        let response = session.transport().send_in_call(request, &options, call).await?;
        Ok(Submitted::new(response, request, start, call))
    }
}

impl fmt::Debug for SamplingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SamplingClient").field("id", &self.0.shared.id).finish_non_exhaustive()
    }
}

/// Inserts NaN as the log-probability of the first prompt token if the server omits that entry, as
/// SkyRL does. Without the entry, every log-probability would be attributed to the previous token.
fn align_prompt_logprobs(response: &mut SampleResponse, prompt_len: Option<usize>) {
    if let Some(logprobs) = &mut response.prompt_logprobs
        && prompt_len == Some(logprobs.len() + 1)
    {
        let aligned = std::iter::once(f32::NAN).chain(logprobs.as_slice().iter().copied());
        *logprobs = Logprobs::from(aligned.collect::<Vec<_>>());
    }
}
