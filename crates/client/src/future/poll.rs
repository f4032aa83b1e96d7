//! [`Poller`]: retrieves the result of a submitted request.
//!
//! The results of all requests that the server executes asynchronously are retrieved here;
//! [`BatchPoll`](super::BatchPoll) only announces that results are ready.

use std::time::Duration;

use ::http::HeaderMap;
use ::http::header::{ACCEPT, CONTENT_TYPE};
use bytes::Bytes;
use tinkex_wire::{
    CompletedFuture, JSON, PROTO, PollResponse, ResultPayload, RetrieveFuture, SubmitRequest,
    SubmitResponse, header as wire_header,
};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::transport::{BILLING_DELAY, RequestOptions, header};

use super::poll_interval::{OutageTimer, PollInterval};
use super::queue_log::QueueLog;
use super::{BatchPoll, report};

/// Longest delay between polls while the server is unreachable or rate-limits.
const MAX_DELAY: Duration = Duration::from_secs(30);
/// Number of consecutive 400 responses that are retried: the server may not know a new request yet.
const MAX_BAD_REQUESTS: u32 = 3;

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
        let mut poll =
            RetrieveFuture::new(submitted.response.request_id.clone()).allow_metadata_only(true);
        let (mut failures, mut bad_requests) = (0_u32, 0_u32);
        let mut interval = PollInterval::new(self.session.adaptive_polling());
        let mut outage = OutageTimer::new(self.session.settings().retry.retry_timeout());
        // Hold the permit until the result is received, so that large results do not exceed the
        // budget.
        let mut _download_permit = None;
        if let Some(bytes) = self.wait_for_announcement(submitted).await? {
            poll.allow_metadata_only = false;
            _download_permit = Some(self.session.download_budget().acquire(bytes).await);
        }
        loop {
            let sent_at = Instant::now();
            let options = RequestOptions {
                headers: headers(submitted, progress.polls, accept_proto),
                ..RequestOptions::default()
            };
            let response = self.session.transport().send_raw(&poll, &options).await;
            progress.polls += 1;
            if response.as_ref().err().is_none_or(|error| error.status().is_some()) {
                outage.end();
            }
            let error = match response {
                Ok(response) => {
                    failures = 0;
                    let content_type =
                        response.headers().get(CONTENT_TYPE).and_then(|t| t.to_str().ok());
                    match PollResponse::decode(content_type.unwrap_or(JSON), response.body())? {
                        PollResponse::Ready(payload) => return Ok(payload),
                        PollResponse::Failed(failed) => {
                            return Err(Error::from_failed_request(failed)
                                .after(1, progress.start.elapsed()));
                        }
                        PollResponse::MetadataOnly { .. } if !poll.allow_metadata_only => {
                            let message = "server announced the result twice without sending it";
                            return Err(Error::new(ErrorKind::Decode, message));
                        }
                        PollResponse::MetadataOnly { response_payload_size } => {
                            poll.allow_metadata_only = false;
                            let budget = self.session.download_budget();
                            _download_permit = Some(budget.acquire(response_payload_size).await);
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
            match error.status() {
                Some(408) => {
                    failures = 0;
                    if let Some(body) = error.body() {
                        bad_requests = 0;
                        self.log.update(&PollResponse::decode_timeout(&Bytes::copy_from_slice(
                            body.as_bytes(),
                        )));
                    }
                    interval.wait(sent_at).await;
                }
                Some(500..600) => {
                    failures = 0;
                    interval.wait(sent_at).await;
                }
                Some(400) if bad_requests < MAX_BAD_REQUESTS => {
                    failures = 0;
                    bad_requests += 1;
                }
                Some(402) if self.session.transport().wait_for_billing() => {
                    sleep(BILLING_DELAY).await;
                    continue;
                }
                Some(410) => return Err(error.expired()),
                Some(429) => back_off(&mut failures).await,
                None if error.is_retryable() && outage.record(sent_at) => return Err(error),
                None if error.is_retryable() => back_off(&mut failures).await,
                _ => return Err(error),
            }
            self.record(&error, submitted, progress);
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

/// Waits 1, 2, 4, … seconds, at most 30, depending on the number of consecutive failures, and
/// counts one more failure.
async fn back_off(failures: &mut u32) {
    sleep(Duration::from_secs(1 << (*failures).min(5)).min(MAX_DELAY)).await;
    *failures += 1;
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
