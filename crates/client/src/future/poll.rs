//! [`Poller`]: retrieves the result of a submitted request.
//!
//! The results of all requests that the server executes asynchronously are retrieved here;
//! [`BatchPoll`](super::BatchPoll) only announces that results are ready.

use std::sync::Arc;
use std::time::Duration;

use ::http::header::{ACCEPT, CONTENT_TYPE};
use ::http::{HeaderMap, Response};
use bytes::Bytes;
use tinkex_wire::{
    CompletedFuture, JSON, PROTO, PollResponse, ResultPayload, RetrieveFuture, SubmitRequest,
    SubmitResponse, header as wire_header,
};
use tokio::time::{Instant, sleep, timeout};

use crate::call_options::CallOptions;
use crate::dispatch::{Limit, Permit};
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::transport::call_progress::CallProgress;
use crate::transport::http::Lane;
use crate::transport::retry_log::RetryReason;
use crate::transport::retry_policy::RetryPolicy;
use crate::transport::{BILLING_DELAY, RequestOptions, header};

use super::poll_failures::{NextPoll, PollFailures};
use super::poll_interval::{self, OutageLimit, PollInterval};
use super::queue_log::QueueLog;
use super::{BatchPoll, report};

/// Polls for the results of a session's requests.
pub(crate) struct Poller<'a> {
    session: &'a Session,
    log: &'a QueueLog,
    batch_poll: Option<&'a BatchPoll>,
    retry: &'a RetryPolicy,
    poll_timeout: Option<Duration>,
    /// Whether the request is a sample: it is cancelled if the wait ends, and resubmitted after a
    /// failure of category `server`.
    is_sample: bool,
}

/// Request that the server has accepted.
#[derive(Clone, Debug)]
pub(crate) struct Submitted {
    pub(crate) response: SubmitResponse,
    pub(crate) request_type: &'static str,
    /// Time that submitting the request took. Reported to the server with the first poll.
    pub(crate) submit_duration: Duration,
    /// When the call started.
    pub(crate) call_start: Instant,
    /// Number of times the request was sent.
    pub(crate) attempts: u32,
}

impl Submitted {
    /// Sends a request and measures how long the server takes to accept it.
    pub(crate) async fn send<S: SubmitRequest>(
        session: &Session,
        request: &S,
        options: &RequestOptions,
    ) -> Result<Self> {
        let (start, mut call) = (Instant::now(), CallProgress::new());
        let transport = session.transport();
        let response = transport.send_in_call(request, options, &mut call).await?;
        transport.retry_log().succeeded(&call, Lane::Train);
        Ok(Self::new(response, request, start, &call))
    }

    /// Creates the record of a request that the server accepted in `call`. `start` is when its
    /// submission started.
    pub(crate) fn new<S: SubmitRequest>(
        response: SubmitResponse,
        request: &S,
        start: Instant,
        call: &CallProgress,
    ) -> Self {
        Self {
            response,
            request_type: request.request_type(),
            submit_duration: start.elapsed(),
            call_start: call.start(),
            attempts: call.attempts(),
        }
    }
}

/// Progress of polling for one result.
struct PollProgress {
    polls: u64,
    start: Instant,
}

/// Request that is sent with each poll.
struct PollRequest {
    body: RetrieveFuture,
    /// Held until the result is received, so that the results being downloaded at the same time do
    /// not exceed the session's budget.
    _download_permit: Option<Permit>,
}

impl PollRequest {
    /// Creates a request that accepts the size of the result in place of the result.
    fn new(submitted: &Submitted) -> Self {
        let request_id = submitted.response.request_id.clone();
        let body = RetrieveFuture::new(request_id).allow_metadata_only(true);
        Self { body, _download_permit: None }
    }

    /// Waits for `bytes` of the download budget. The next polls accept only the result itself.
    async fn accept_payload(&mut self, budget: &Arc<Limit>, bytes: u64) {
        self.body.allow_metadata_only = false;
        self._download_permit = Some(budget.acquire(bytes).await);
    }
}

impl<'a> Poller<'a> {
    /// Creates a poller. `log` reports the queue state of pending requests.
    pub(crate) fn new(session: &'a Session, log: &'a QueueLog) -> Self {
        let settings = session.settings();
        let (retry, poll_timeout) = (&settings.retry, settings.poll_timeout);
        Self { session, log, batch_poll: None, retry, poll_timeout, is_sample: false }
    }

    /// Sets the retry policy and the poll timeout of a call.
    pub(crate) fn with_options(self, options: &'a CallOptions) -> Self {
        let settings = self.session.settings();
        let (retry, poll_timeout) = (options.retry_policy(settings), options.poll_limit(settings));
        Self { retry, poll_timeout, ..self }
    }

    /// Configures the poller for a sample: it polls once `batch_poll`, if any, has announced the
    /// result, and not again after a failure of category `server`, because the caller resubmits the
    /// sample then.
    pub(crate) fn for_sample(self, batch_poll: Option<&'a BatchPoll>) -> Self {
        Self { batch_poll, is_sample: true, ..self }
    }

    /// Waits for the result of `submitted` and decodes it.
    ///
    /// # Errors
    /// If the request failed, its result expired, or it did not arrive within the poll timeout.
    pub(crate) async fn result<S: SubmitRequest>(
        &self,
        submitted: &Submitted,
    ) -> Result<S::Output> {
        self.result_in_call::<S>(submitted, &mut CallProgress::new()).await
    }

    /// Waits for the result of `submitted` and records failed polls in `call`.
    ///
    /// # Errors
    /// Like [`result`](Self::result).
    pub(crate) async fn result_in_call<S: SubmitRequest>(
        &self,
        submitted: &Submitted,
        call: &mut CallProgress,
    ) -> Result<S::Output> {
        let mut progress = PollProgress { polls: 0, start: Instant::now() };
        let payload = self.poll(submitted, S::PROTO_OUTPUT, &mut progress, call);
        let payload = match self.poll_timeout {
            None => payload.await,
            Some(limit) => match timeout(limit, payload).await {
                Ok(payload) => payload,
                Err(_) if self.is_sample => Err(Error::deadline(limit)),
                Err(_) => Err(Error::training_deadline(limit)),
            },
        };
        if let Some(batch_poll) = self.batch_poll {
            batch_poll.mark_retrieved(submitted.response.request_id.clone());
        }
        payload.and_then(|payload| Ok(S::decode_output(&payload)?)).map_err(|error| {
            self.report_failure(&error, submitted, &progress);
            error
                .after(submitted.attempts, submitted.call_start.elapsed())
                .with_request_id(submitted.response.request_id.clone())
                .during(submitted.request_type)
        })
    }

    /// Reports a failed poll or failed request in the log and in telemetry.
    fn report_failure(&self, error: &Error, submitted: &Submitted, progress: &PollProgress) {
        let events = self.session.connection().events();
        report::failure(events, error, submitted, progress.polls, progress.start.elapsed());
    }

    /// Polls until the server returns the result, or an error that polling cannot resolve.
    async fn poll(
        &self,
        submitted: &Submitted,
        accept_proto: bool,
        progress: &mut PollProgress,
        call: &mut CallProgress,
    ) -> Result<ResultPayload> {
        let mut request = PollRequest::new(submitted);
        let mut failures = PollFailures::new(self.retry);
        let mut interval = PollInterval::new(self.session.adaptive_polling());
        let mut outage = OutageLimit::new(self.retry);
        let mut failed_request = None;
        let retry_log = self.session.transport().retry_log();
        if let Some(bytes) = self.wait_for_announcement(submitted).await? {
            request.accept_payload(self.session.download_budget(), bytes).await;
        }
        loop {
            let sent_at = Instant::now();
            let options = RequestOptions {
                headers: headers(submitted, progress.polls, accept_proto),
                ..RequestOptions::default()
            };
            let response = self.session.transport().send_raw(&request.body, &options).await;
            progress.polls += 1;
            let error = match response {
                Ok(response) => {
                    retry_log.poll_succeeded();
                    failures.record_success();
                    match decode(&response)? {
                        PollResponse::Ready(payload) => return Ok(payload),
                        PollResponse::Failed(failed) => {
                            let error = Error::from_failed_request(failed);
                            let delay = failures.record_failed_request(&error);
                            let delay = delay.filter(|_| !self.is_sample);
                            let delay = delay.filter(|delay| !outage.record(sent_at, *delay));
                            let Some(delay) = delay else { return Err(error) };
                            failed_request = Some(error.clone());
                            retry_log.retry(call, Lane::Poll, error, delay, RetryReason::Poll);
                            sleep(delay).await;
                            continue;
                        }
                        PollResponse::MetadataOnly { .. } if !request.body.allow_metadata_only => {
                            let message = "server announced the result twice without sending it";
                            return Err(Error::new(ErrorKind::Decode, message));
                        }
                        PollResponse::MetadataOnly { response_payload_size: bytes } => {
                            request.accept_payload(self.session.download_budget(), bytes).await;
                        }
                        PollResponse::TryAgain(pending) => {
                            self.log.update(&pending);
                            poll_interval::wait(interval.next_delay(sent_at)).await;
                        }
                    }
                    outage.end();
                    continue;
                }
                Err(error) => error,
            };
            self.log_queue_state(&error);
            let delay = match failures.record(&error) {
                NextPoll::AtInterval => interval.next_delay(sent_at),
                NextPoll::AtOnce => Duration::ZERO,
                NextPoll::After(delay) => delay,
                NextPoll::WhenSettled => {
                    let transport = self.session.transport();
                    if !self.retry.waits_for_billing() || !transport.wait_for_billing() {
                        return Err(error);
                    }
                    retry_log.poll_failed(&error, BILLING_DELAY);
                    call.record_failure(error);
                    sleep(BILLING_DELAY).await;
                    // Without `report_failure`: telemetry does not count a billing wait as a
                    // failure.
                    continue;
                }
                NextPoll::Expired => return Err(failed_request.unwrap_or(error.expired())),
                NextPoll::Never => return Err(failed_request.unwrap_or(error)),
            };
            if error.status() == Some(408) {
                outage.end();
            } else if outage.record(sent_at, delay) {
                return Err(failed_request.unwrap_or(error));
            } else {
                retry_log.poll_failed(&error, delay);
            }
            self.report_failure(&error, submitted, progress);
            call.record_failure(error);
            poll_interval::wait(delay).await;
        }
    }

    /// Logs the queue state that a 408 carries in its body.
    fn log_queue_state(&self, error: &Error) {
        if let (Some(408), Some(body)) = (error.status(), error.body()) {
            let body = Bytes::copy_from_slice(body.as_bytes());
            self.log.update(&PollResponse::decode_timeout(&body));
        }
    }

    /// Waits for the announcement of the result, if results are announced, and returns its size in
    /// bytes if known.
    async fn wait_for_announcement(&self, submitted: &Submitted) -> Result<Option<u64>> {
        let Some(batch_poll) = self.batch_poll else { return Ok(None) };
        Ok(match batch_poll.wait_for(&submitted.response.request_id).await? {
            Some(CompletedFuture::Finished {
                response_payload_uncompressed_size: size, ..
            }) => size.filter(|bytes| *bytes > 0),
            Some(CompletedFuture::Failed { .. }) | None => None,
        })
    }
}

/// Decodes a successful response.
fn decode(response: &Response<Bytes>) -> Result<PollResponse> {
    let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    Ok(PollResponse::decode(content_type.unwrap_or(JSON), response.body())?)
}

fn headers(submitted: &Submitted, iteration: u64, accept_proto: bool) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if accept_proto {
        headers.insert(ACCEPT, ::http::HeaderValue::from_static(PROTO));
    }
    header::put(&mut headers, wire_header::REQUEST_TYPE, submitted.request_type);
    header::put(&mut headers, wire_header::REQUEST_ITERATION, &iteration.to_string());
    if iteration == 0 {
        let seconds = submitted.submit_duration.as_secs_f64().to_string();
        header::put(&mut headers, wire_header::SUBMIT_ROUNDTRIP_TIME, &seconds);
    }
    headers
}
