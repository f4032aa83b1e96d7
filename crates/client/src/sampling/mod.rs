//! [`SamplingClient`]: sampling from fixed weights.

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
use crate::future::ApiFuture;
use crate::future::poll::{Poller, Submitted};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::service::ServiceClient;
use crate::session::{CancelGuard, Session};
use crate::transport::backoff::RequestBackoff;
use crate::transport::{RequestOptions, header};

pub use request_builder::SampleRequestBuilder;
use resubmit::ActiveSamples;
#[cfg(test)]
pub(crate) use resubmit::is_resubmittable;
use sequence_range::SequenceRange;

/// Fixed weights to sample from. Cheap to clone; all clones count in one line.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// use tinkex::SamplingParams;
///
/// let sampler = service.create_sampling_client("Qwen/Qwen3-8B").await?;
/// let params = SamplingParams::new().max_tokens(64).temperature(0.7);
/// let answer = sampler.sample([1, 2, 3], params).num_samples(4).send().await?;
/// for sequence in &answer.sequences {
///     println!("{:?}", &sequence.tokens[..]);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct SamplingClient(Arc<SamplingShared>);

struct SamplingShared {
    session: Arc<Session>,
    id: SamplerId,
    /// Ours from the start, or joined before the first sample.
    line: OnceCell<SequenceRange>,
    record_stability_info: bool,
    watch: ActiveSamples,
    log: QueueLog,
}

impl SamplingClient {
    pub(crate) async fn create(session: Arc<Session>, weights: SamplingWeights) -> Result<Self> {
        let (session_id, n) = (session.id().clone(), session.next_sampler());
        let call = match weights {
            SamplingWeights::Base(model) => CreateSamplingSession::from_base(session_id, n, model),
            SamplingWeights::Checkpoint(path) => {
                CreateSamplingSession::from_path(session_id, n, path)
            }
        };
        let created = session.transport().send(&call, &RequestOptions::default()).await?;
        Ok(Self::of(session, created.sampling_session_id))
    }

    /// A sampling session that is there already, with this as its first client.
    pub(crate) fn of(session: Arc<Session>, id: SamplerId) -> Self {
        let line = SequenceRange::of_maker(&session, &id);
        Self::with(session, id, OnceCell::new_with(Some(line)), false)
    }

    /// Another client of a sampling session.
    pub(crate) fn restore(session: Arc<Session>, handle: &SamplerHandle) -> Self {
        let (id, stability) = (handle.sampling_session_id.clone(), handle.record_stability_info);
        Self::with(session, id, OnceCell::new(), stability)
    }

    fn with(
        session: Arc<Session>,
        id: SamplerId,
        line: OnceCell<SequenceRange>,
        record_stability_info: bool,
    ) -> Self {
        let watch = ActiveSamples::new(session.config(), session.settings());
        let log = QueueLog::new(QueuedWork::Sampling, id.as_str());
        Self(Arc::new(SamplingShared { session, id, line, record_stability_info, watch, log }))
    }

    /// Samples in a session that another process has opened, on its server, with the credential of
    /// this process's environment. Nothing is sent yet, but the handle says where to: only use
    /// handles that you trust. It must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If there is no credential.
    pub fn from_handle(handle: &SamplerHandle) -> Result<Self> {
        let mut builder = ServiceClient::builder().base_url(handle.holder.base_url.parse()?);
        for (name, value) in handle.holder.default_headers_overrides.iter().flatten() {
            builder = builder.header(name, value);
        }
        builder.build()?.restore_sampling_client(handle)
    }

    /// What another process needs to sample from the same weights; [`SamplerHandle::to_text`] packs
    /// it. It holds no credential, but the headers that were set on the builder: keep secrets out of
    /// those.
    #[must_use]
    pub fn handle(&self) -> SamplerHandle {
        SamplerHandle {
            session_id: self.0.session.id().clone(),
            sampling_session_id: self.0.id.clone(),
            holder: self.0.session.holder(),
            record_stability_info: self.0.record_stability_info,
        }
    }

    /// The sampling session's id.
    #[must_use]
    pub fn sampler_id(&self) -> &SamplerId {
        &self.0.id
    }

    /// How long no sample leaves, because the server said that it is too much. All clients of one
    /// server and key in this process share that.
    #[must_use]
    pub fn backoff_remaining(&self) -> Option<Duration> {
        let until = self.0.session.admission().backoff().until()?;
        until.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())
    }

    /// Asks for samples from a prompt; [`SampleRequestBuilder::send`] sends it on its way.
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

    /// How likely each token of a text is, given those before it; the first has no answer.
    ///
    /// # Errors
    /// If the server does not send them.
    pub fn compute_logprobs(&self, text: impl Into<ModelInput>) -> ApiFuture<Logprobs> {
        let request = SampleRequest {
            prompt_logprobs: Some(true),
            ..SampleRequest::new(text, SamplingParams::new().max_tokens(1))
        };
        // A server that leaves lost samples to the caller does not mean this.
        self.start(request, self.0.session.resubmits(), |response| {
            let missing = || Error::new(ErrorKind::Decode, "the server sent no log-probabilities");
            response.prompt_logprobs.ok_or_else(missing)
        })
    }

    /// What is sampled from.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn get_sampler(&self) -> Result<SamplerInfo> {
        let call = GetSampler { sampler_id: self.0.id.clone() };
        self.0.session.transport().send(&call, &RequestOptions::default()).await
    }

    /// Whether a sample that was lost is asked for anew, or left to the caller.
    fn asks_anew(&self) -> bool {
        self.0.session.resubmits() && !self.0.session.config().sample_no_retries
    }

    fn start<T: Send + 'static>(
        &self,
        request: SampleRequest,
        anew: bool,
        finish: impl FnOnce(SampleResponse) -> Result<T> + Send + 'static,
    ) -> ApiFuture<T> {
        use tinkex_wire::ApiRequest as _;
        if let Err(why) = request.validate() {
            return ApiFuture::failed(why.into());
        }
        // Boxed: what waits is small, see `SamplingShared::sample`.
        let (inner, request) = (Arc::clone(&self.0), Box::new(request));
        ApiFuture::abandonable(async move {
            let sampled = inner.session.run_until_closed(inner.sample(request, anew)).await;
            finish(inner.session.connection().record_failure(sampled)?)
        })
    }
}

/// Which weights to sample from.
pub(crate) enum SamplingWeights {
    Base(String),
    Checkpoint(String),
}

impl SamplingShared {
    /// Asks for a sample, and anew if the answer was lost.
    async fn sample(&self, mut request: Box<SampleRequest>, anew: bool) -> Result<SampleResponse> {
        let place = self.watch.enter().await;
        // On the heap from here on: of ten thousand samples most wait for a place, and those should
        // not hold the room that sending takes.
        let work = Box::pin(async {
            let (mut attempt, start) = (0, Instant::now());
            loop {
                let error = match self.sample_once(&mut request, start).await {
                    Ok(response) => {
                        self.watch.progressed();
                        return Ok(response);
                    }
                    Err(error) => error,
                };
                let wait = resubmit::delay(attempt, fastrand::f64());
                let patience = self.session.settings().retry.patience();
                let late = patience.is_some_and(|patience| start.elapsed() + wait > patience);
                let again = anew && !late && resubmit::is_resubmittable(&error);
                if let Some(events) = self.session.connection().events() {
                    events.attempt(
                        resubmit::SAMPLE_FAILED,
                        &error,
                        resubmit::so_far(again, attempt),
                    );
                }
                if !again {
                    return Err(error);
                }
                tracing::debug!(%error, attempt, "asking for the sample anew");
                sleep(wait).await;
                attempt += 1;
            }
        });
        match select(work, pin!(place.stuck())).await {
            Either::Left((result, _)) | Either::Right((result, _)) => result,
        }
    }

    /// Asks once, for somebody who has waited since then.
    async fn sample_once(
        &self,
        request: &mut SampleRequest,
        since: Instant,
    ) -> Result<SampleResponse> {
        let line =
            self.line.get_or_try_init(|| SequenceRange::join(&self.session, &self.id)).await?;
        // A new number for every time it is asked for; resends keep theirs.
        request.seq_id = Some(line.next());
        request.sampling_session_id = Some(self.id.clone());
        let taken = self.submit(request, since).await?;
        let awaited = CancelGuard::new(&self.session, taken.response.request_id.clone());
        let poller = Poller::new(&self.session, &self.log).with_batch_poll(line.batch_poll());
        let answer = poller.result::<SampleRequest>(&taken).await;
        // Whatever else ended the waiting, the server may still be at work.
        let over = |kind| matches!(kind, ErrorKind::WorkFailed | ErrorKind::Expired);
        if answer.as_ref().map_or_else(|error| over(error.kind()), |_| true) {
            awaited.disarm();
        }
        let mut response = answer?;
        if self.session.connection().is_first_protocol() {
            align(&mut response, request.prompt.token_count());
        }
        request.validate_response(&response)?;
        response.assign_sequence_ids(&taken.response)?;
        Ok(response)
    }

    /// Hands a request over, held back together with all others of this server and key.
    async fn submit(&self, request: &SampleRequest, since: Instant) -> Result<Submitted> {
        let start = Instant::now();
        let bytes = request.prompt.sampling_bytes() as u64;
        let admission = self.session.admission();
        let _pass = admission.acquire(bytes).await;
        let backoff = RequestBackoff { backoff: Arc::clone(admission.backoff()), bytes };
        let mut options = RequestOptions {
            backoff: Some(backoff),
            since: Some(since),
            ..RequestOptions::default()
        };
        header::put(&mut options.headers, wire_header::SAMPLING_BACKPRESSURE, "1");
        let ticket = self.session.transport().send(request, &options).await?;
        let request_type = request.request_type();
        Ok(Submitted { response: ticket, request_type, submit_duration: start.elapsed() })
    }
}

impl fmt::Debug for SamplingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SamplingClient").field("id", &self.0.id).finish_non_exhaustive()
    }
}

/// Servers of the first protocol may leave the prompt's first token out, which nothing predicts. All
/// others would stand one place too early.
fn align(response: &mut SampleResponse, prompt: Option<usize>) {
    if let Some(logprobs) = &mut response.prompt_logprobs
        && prompt == Some(logprobs.len() + 1)
    {
        let all = std::iter::once(f32::NAN).chain(logprobs.as_slice().iter().copied());
        *logprobs = Logprobs::from(all.collect::<Vec<_>>());
    }
}
