//! [`Poller`]: retrieves the result of a submitted request.
//!
//! The results of all requests that the server executes asynchronously are retrieved here;
//! [`BatchPoll`] only announces that results are ready.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::{ACCEPT, CONTENT_TYPE};
use ::http::{HeaderMap, Response};
use bytes::Bytes;
use tinkex_wire::{
    CompletedFuture, JSON, PROTO, PollResponse, ResultPayload, RetrieveFuture, SubmitRequest,
    header as wire_header,
};
use tokio::time::{Instant, timeout};

use crate::dispatch::{Limit, Permit};
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::transport::CallOptions;
use crate::transport::http::Lane;
use crate::transport::request::header;
use crate::transport::retry::call_progress::CallProgress;
use crate::transport::retry::log::RetryReason;
use crate::transport::{BILLING_DELAY, RequestOptions};

use super::poll_failures::{NextPoll, PollFailures};
use super::poll_interval::{self, OutageLimit, PollInterval};
use super::queue_log::QueueLog;
use super::{Announcement, BatchPoll, Submitted, report};

/// Polls for the results of a session's requests.
pub struct Poller<'a> {
    session: &'a Session,
    log: &'a QueueLog,
    batch_poll: Option<&'a BatchPoll>,
    options: &'a CallOptions,
    /// Whether the request is a sample. The caller resubmits a sample after a failure of category
    /// `server`, so the poller returns such a failure at once.
    is_sample: bool,
}

/// Progress of polling for one result.
struct PollState {
    /// Number of polls so far.
    polls: u64,
    start: Instant,
    /// When the last poll was sent.
    sent_at: Instant,
    failures: PollFailures,
    interval: PollInterval,
    outage: OutageLimit,
    /// Failure of category `server` that a poll returned. A later poll may return the result.
    failed_request: Option<Error>,
}

impl PollState {
    fn new(poller: &Poller<'_>) -> Self {
        let now = Instant::now();
        Self {
            polls: 0,
            start: now,
            sent_at: now,
            failures: PollFailures::new(poller.options),
            interval: PollInterval::new(poller.session.adaptive_polling()),
            outage: OutageLimit::new(poller.options),
            failed_request: None,
        }
    }
}

/// Action that follows a poll.
enum AfterPoll {
    /// The result has arrived.
    Ready(ResultPayload),
    /// The result is ready: wait for `bytes` of the download budget, then poll for the result.
    Download { bytes: u64 },
    /// Poll again after the delay.
    Wait(Duration),
}

/// Request that is sent with each poll.
struct PollRequest {
    body: RetrieveFuture,
    /// Held until the result is received, so that the results being downloaded at the same time do
    /// not exceed the session's budget.
    _download_permit: Option<Permit>,
}

impl PollRequest {
    /// Creates a request that allows the server to respond with the size of the result instead of
    /// the result.
    fn new(submitted: &Submitted) -> Self {
        let request_id = submitted.response.request_id.clone();
        let body = RetrieveFuture::new(request_id).allow_metadata_only(true);
        Self { body, _download_permit: None }
    }

    /// Waits for `bytes` of the download budget. From then on, polls accept only the result itself.
    async fn accept_payload(&mut self, budget: &Arc<Limit>, bytes: u64) {
        self.body.allow_metadata_only = false;
        self._download_permit = Some(budget.acquire(bytes).await);
    }
}

impl<'a> Poller<'a> {
    /// Creates a poller. `log` reports the queue state of pending requests.
    pub fn new(session: &'a Session, log: &'a QueueLog) -> Self {
        let options = &session.settings().options;
        Self { session, log, batch_poll: None, options, is_sample: false }
    }

    /// Replaces the options of the session by the options of one call.
    pub fn with_options(self, options: &'a CallOptions) -> Self {
        Self { options, ..self }
    }

    /// Configures the poller for a sample. If `batch_poll` is set, the poller waits until the batch
    /// poll announces the result. After a failure of category `server` the poller does not poll
    /// again, because the caller resubmits the sample.
    pub fn for_sample(self, batch_poll: Option<&'a BatchPoll>) -> Self {
        Self { batch_poll, is_sample: true, ..self }
    }

    /// Waits for the result of `submitted`, decodes it and logs the end of the call.
    ///
    /// # Errors
    /// If the request failed, its result expired, or the result did not arrive within the poll
    /// timeout.
    pub async fn result<S: SubmitRequest>(&self, submitted: &Submitted) -> Result<S::Output> {
        let mut call = CallProgress::resume(submitted.call_start, submitted.attempts);
        let result = self.result_in_call::<S>(submitted, &mut call).await;
        self.session.transport().retry_log().ended(&call, Lane::Poll, &result);
        result
    }

    /// Waits for the result of `submitted` and records failed polls in `call`. The caller logs the
    /// end of the call.
    ///
    /// # Errors
    /// Like [`result`](Self::result).
    pub async fn result_in_call<S: SubmitRequest>(
        &self,
        submitted: &Submitted,
        call: &mut CallProgress,
    ) -> Result<S::Output> {
        let mut state = PollState::new(self);
        let payload = self.poll(submitted, S::PROTO_OUTPUT, &mut state, call);
        let payload = match self.options.poll_limit() {
            None => payload.await,
            Some(limit) => match timeout(limit, payload).await {
                Ok(payload) => payload,
                Err(_) if self.is_sample => Err(Error::deadline(limit)),
                Err(_) => Err(Error::training_deadline(limit)),
            },
        };
        if let Some(batch_poll) = self.batch_poll {
            // Report the result as retrieved after an error too: no further poll for the result
            // follows, so the server may drop it.
            batch_poll.mark_retrieved(submitted.response.request_id.clone());
        }
        payload.and_then(|payload| Ok(S::decode_output(&payload)?)).map_err(|error| {
            self.report_failure(&error, submitted, &state);
            call.finish(error)
                .with_request_id(submitted.response.request_id.clone())
                .during(submitted.request_type)
        })
    }

    /// Reports a failed poll or failed request in the log and in telemetry.
    fn report_failure(&self, error: &Error, submitted: &Submitted, state: &PollState) {
        let events = self.session.connection().events();
        report::failure(events, error, submitted, state.polls, state.start.elapsed());
    }

    /// Polls until the server returns the result, or an error that polling cannot resolve.
    async fn poll(
        &self,
        submitted: &Submitted,
        accept_proto: bool,
        state: &mut PollState,
        call: &mut CallProgress,
    ) -> Result<ResultPayload> {
        let transport = self.session.transport();
        let mut request = PollRequest::new(submitted);
        let mut waits = self.batch_poll.is_some();
        loop {
            if waits {
                waits = self.wait_for_announcement(submitted, &mut request).await?;
            }
            state.sent_at = Instant::now();
            let options = RequestOptions {
                headers: headers(submitted, state.polls, accept_proto),
                ..RequestOptions::default()
            };
            // Do not count the poll in `call`: a poll is not an attempt to submit the request.
            let mut poll = CallProgress::new();
            let response = transport.send_raw_in_call(&request.body, &options, &mut poll).await;
            state.polls += 1;
            let next = match response {
                Ok(response) => self.after_response(&response, &request.body, state, call)?,
                Err(error) => AfterPoll::Wait(self.after_failure(error, submitted, state, call)?),
            };
            match next {
                AfterPoll::Ready(payload) => return Ok(payload),
                AfterPoll::Download { bytes } => {
                    request.accept_payload(self.session.download_budget(), bytes).await;
                }
                AfterPoll::Wait(delay) => poll_interval::wait(delay).await,
            }
        }
    }

    /// Decodes the response to a poll and returns the next action.
    ///
    /// # Errors
    /// If the request failed, or the response cannot be decoded.
    fn after_response(
        &self,
        response: &Response<Bytes>,
        request: &RetrieveFuture,
        state: &mut PollState,
        call: &mut CallProgress,
    ) -> Result<AfterPoll> {
        let retry_log = self.session.transport().retry_log();
        retry_log.poll_succeeded();
        state.failures.record_success();
        let next = match decode(response)? {
            PollResponse::Ready(payload) => AfterPoll::Ready(payload),
            PollResponse::Failed(failed) => {
                let error = Error::from_failed_request(failed);
                if self.is_sample {
                    return Err(error);
                }
                let delay = state.failures.record_failed_request(&error);
                let Some(delay) = delay else { return Err(error) };
                if state.outage.record(state.sent_at, delay) {
                    return Err(error);
                }
                state.failed_request = Some(error.clone());
                retry_log.retry(call, Lane::Poll, error, delay, RetryReason::Poll);
                // Return before `outage.end()`: the server is still failing.
                return Ok(AfterPoll::Wait(delay));
            }
            PollResponse::MetadataOnly { .. } if !request.allow_metadata_only => {
                let message = "server announced the result twice without sending it";
                return Err(Error::new(ErrorKind::Decode, message));
            }
            PollResponse::MetadataOnly { response_payload_size: bytes } => {
                AfterPoll::Download { bytes }
            }
            PollResponse::TryAgain(pending) => {
                self.log.update(&pending);
                AfterPoll::Wait(state.interval.next_delay(state.sent_at))
            }
        };
        state.outage.end();
        Ok(next)
    }

    /// Records a failed poll and returns the delay before the next poll.
    ///
    /// # Errors
    /// If no poll follows. The error is the failure of the request if an earlier poll reported a
    /// failure, else `error`. After a 402 the method always returns `error`, because only the user
    /// can resolve a billing problem.
    fn after_failure(
        &self,
        error: Error,
        submitted: &Submitted,
        state: &mut PollState,
        call: &mut CallProgress,
    ) -> Result<Duration> {
        let transport = self.session.transport();
        self.log_queue_state(&error);
        let delay = match state.failures.record(&error) {
            NextPoll::AtInterval => state.interval.next_delay(state.sent_at),
            NextPoll::AtOnce => Duration::ZERO,
            NextPoll::After(delay) => delay,
            NextPoll::AfterBillingDelay => {
                if !self.options.waits_for_billing() || !transport.wait_for_billing() {
                    return Err(error);
                }
                transport.retry_log().poll_failed(&error, BILLING_DELAY);
                call.record_failure(error);
                // Do not call `report_failure`: telemetry does not count a billing wait as a
                // failure.
                return Ok(BILLING_DELAY);
            }
            NextPoll::Expired => {
                return Err(state.failed_request.take().unwrap_or(error.expired()));
            }
            NextPoll::Never => return Err(state.failed_request.take().unwrap_or(error)),
        };
        let retry_after = self.options.honoured_retry_after(&error).filter(|after| *after == delay);
        // Compare the wait alone with the limits: the call may have waited for hours for its result.
        // `outage` applies `give_up_after` from the start of the outage.
        let is_too_long = |after| !self.options.allows_retry_after(after, Duration::ZERO);
        if error.status() == Some(408) {
            state.outage.end();
        } else if state.outage.record(state.sent_at, delay) || retry_after.is_some_and(is_too_long)
        {
            return Err(state.failed_request.take().unwrap_or_else(|| match retry_after {
                Some(after) if is_too_long(after) => error.asks_for_too_long_wait(after),
                _ => error,
            }));
        } else {
            transport.retry_log().poll_failed(&error, delay);
        }
        self.report_failure(&error, submitted, state);
        call.record_failure(error);
        Ok(delay)
    }

    /// Logs the queue state in the body of a 408 response.
    fn log_queue_state(&self, error: &Error) {
        if let (Some(408), Some(body)) = (error.status(), error.body()) {
            let body = Bytes::copy_from_slice(body.as_bytes());
            self.log.update(&PollResponse::decode_timeout(&body));
        }
    }

    /// Waits until the batch poll announces the result. If the announcement has the size of the
    /// result, also waits for that many bytes of the download budget. Returns whether to wait for
    /// an announcement again if the next poll reports that the result is not ready.
    async fn wait_for_announcement(
        &self,
        submitted: &Submitted,
        request: &mut PollRequest,
    ) -> Result<bool> {
        let Some(batch_poll) = self.batch_poll else { return Ok(false) };
        let completed =
            match batch_poll.wait_for(&submitted.response.request_id, self.options).await? {
                Announcement::Completed(completed) => completed,
                Announcement::Silence => return Ok(true),
                Announcement::NotOffered => return Ok(false),
            };
        if let CompletedFuture::Finished { response_payload_uncompressed_size: size, .. } =
            completed
            && let Some(bytes) = size.filter(|bytes| *bytes > 0)
        {
            request.accept_payload(self.session.download_budget(), bytes).await;
        }
        Ok(false)
    }
}

impl fmt::Debug for Poller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller")
            .field("options", &self.options)
            .field("is_sample", &self.is_sample)
            .finish_non_exhaustive()
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
