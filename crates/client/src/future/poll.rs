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

use crate::dispatch::{Limit, Permit};
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::transport::{BILLING_DELAY, RequestOptions, header};

use super::poll_failures::{NextPoll, PollFailures};
use super::poll_interval::{OutageTimer, PollInterval};
use super::queue_log::QueueLog;
use super::{BatchPoll, report};

/// Polls for the results of a session's requests.
pub(crate) struct Poller<'a> {
    session: &'a Session,
    log: &'a QueueLog,
    batch_poll: Option<&'a BatchPoll>,
}

/// Request that the server has accepted.
#[derive(Clone, Debug)]
pub(crate) struct Submitted {
    pub(crate) response: SubmitResponse,
    pub(crate) request_type: &'static str,
    /// Time that submitting the request took. Reported to the server with the first poll.
    pub(crate) submit_duration: Duration,
}

impl Submitted {
    /// Sends a request and measures how long the server takes to accept it.
    pub(crate) async fn send<S: SubmitRequest>(
        session: &Session,
        request: &S,
        options: &RequestOptions,
    ) -> Result<Self> {
        let start = Instant::now();
        let response = session.transport().send(request, options).await?;
        let request_type = request.request_type();
        Ok(Self { response, request_type, submit_duration: start.elapsed() })
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
        Self { session, log, batch_poll: None }
    }

    /// Polls for a result only once `batch_poll`, if any, has announced it.
    pub(crate) fn with_batch_poll(self, batch_poll: Option<&'a BatchPoll>) -> Self {
        Self { batch_poll, ..self }
    }

    /// Waits for the result of `submitted` and decodes it.
    ///
    /// # Errors
    /// If the request failed, its result expired, or it did not arrive within the poll timeout.
    pub(crate) async fn result<S: SubmitRequest>(
        &self,
        submitted: &Submitted,
    ) -> Result<S::Output> {
        let mut progress = PollProgress { polls: 0, start: Instant::now() };
        let payload = self.poll(submitted, S::PROTO_OUTPUT, &mut progress);
        let payload = match self.session.settings().poll_timeout {
            None => payload.await,
            Some(limit) => match timeout(limit, payload).await {
                Ok(payload) => payload,
                Err(_) => {
                    let polls = u32::try_from(progress.polls).unwrap_or(u32::MAX);
                    Err(Error::deadline().after(polls, progress.start.elapsed()))
                }
            },
        };
        if let Some(batch_poll) = self.batch_poll {
            batch_poll.mark_retrieved(submitted.response.request_id.clone());
        }
        payload.and_then(|payload| Ok(S::decode_output(&payload)?)).map_err(|error| {
            self.record(&error, submitted, &progress);
            error
                .with_request_id(submitted.response.request_id.clone())
                .during(submitted.request_type)
        })
    }

    fn record(&self, error: &Error, submitted: &Submitted, progress: &PollProgress) {
        let events = self.session.connection().events();
        report::failure(events, error, submitted, progress.polls, progress.start.elapsed());
    }

    /// Polls until the server returns the result, or an error that polling cannot resolve.
    async fn poll(
        &self,
        submitted: &Submitted,
        accept_proto: bool,
        progress: &mut PollProgress,
    ) -> Result<ResultPayload> {
        let mut request = PollRequest::new(submitted);
        let mut failures = PollFailures::default();
        let mut interval = PollInterval::new(self.session.adaptive_polling());
        let mut outage = OutageTimer::new(self.session.settings().retry.retry_timeout());
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
                    outage.end();
                    failures.record_success();
                    match decode(&response)? {
                        PollResponse::Ready(payload) => return Ok(payload),
                        PollResponse::Failed(failed) => {
                            // The server executed the request once, whatever the number of polls.
                            return Err(Error::from_failed_request(failed)
                                .after(1, progress.start.elapsed()));
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
                            interval.wait(sent_at).await;
                        }
                    }
                    continue;
                }
                Err(error) => error,
            };
            let responded = error.status().is_some();
            if responded {
                outage.end();
            }
            self.log_queue_state(&error);
            match failures.record(&error) {
                NextPoll::AtInterval => interval.wait(sent_at).await,
                NextPoll::AtOnce => {}
                NextPoll::After(delay) => {
                    if !responded && outage.record(sent_at) {
                        return Err(error);
                    }
                    sleep(delay).await;
                }
                NextPoll::WhenSettled => {
                    if !self.session.transport().wait_for_billing() {
                        return Err(error);
                    }
                    sleep(BILLING_DELAY).await;
                    // The billing state logs the wait; the poll is not reported as failed.
                    continue;
                }
                NextPoll::Expired => return Err(error.expired()),
                NextPoll::Never => return Err(error),
            }
            self.record(&error, submitted, progress);
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
