//! The only loop that waits for an answer.

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
use crate::transport::{BILLING_PAUSE, RequestOptions, header};

use super::poll_interval::{Contact, PollInterval};
use super::queue_log::QueueLog;
use super::{BatchPoll, report};

const LONGEST_PAUSE: Duration = Duration::from_secs(30);
const BAD_REQUESTS: u32 = 3;

/// What polling needs besides the ticket.
pub(crate) struct Poller<'a> {
    session: &'a Session,
    log: &'a QueueLog,
    batch_poll: Option<&'a BatchPoll>,
}

/// A request that was taken: what to ask for, and how long it took to hand it over.
#[derive(Clone, Debug)]
pub(crate) struct Submitted {
    pub(crate) response: SubmitResponse,
    pub(crate) request_type: &'static str,
    pub(crate) submit_duration: Duration,
}

/// How waiting for one answer goes.
struct Progress {
    polls: u64,
    start: Instant,
}

impl<'a> Poller<'a> {
    /// Waits for answers of a session, and tells `log` why there are none yet.
    pub(crate) fn new(session: &'a Session, log: &'a QueueLog) -> Self {
        Self { session, log, batch_poll: None }
    }

    /// Asks for an answer only when it is announced.
    pub(crate) fn with_batch_poll(self, batch_poll: Option<&'a BatchPoll>) -> Self {
        Self { batch_poll, ..self }
    }

    /// Waits for the answer behind a ticket.
    pub(crate) async fn result<S: SubmitRequest>(&self, taken: &Submitted) -> Result<S::Output> {
        let mut progress = Progress { polls: 0, start: Instant::now() };
        let waiting = self.wait(taken, S::PROTO_OUTPUT, &mut progress);
        let payload = match self.session.settings().poll_timeout {
            None => waiting.await,
            Some(longest) => match timeout(longest, waiting).await {
                Ok(payload) => payload,
                Err(_) => {
                    let polls = u32::try_from(progress.polls).unwrap_or(u32::MAX);
                    Err(Error::deadline().after(polls, progress.start.elapsed()))
                }
            },
        };
        if let Some(batch_poll) = self.batch_poll {
            batch_poll.fetched(taken.response.request_id.clone());
        }
        payload.and_then(|payload| Ok(S::decode_output(&payload)?)).map_err(|error| {
            self.write_down(&error, taken, &progress);
            error.with_request_id(taken.response.request_id.clone()).during(taken.request_type)
        })
    }

    fn write_down(&self, error: &Error, taken: &Submitted, progress: &Progress) {
        let events = self.session.connection().events();
        report::failure(events, error, taken, progress.polls, progress.start.elapsed());
    }

    async fn wait(
        &self,
        taken: &Submitted,
        proto: bool,
        progress: &mut Progress,
    ) -> Result<ResultPayload> {
        let mut poll = RetrieveFuture {
            request_id: taken.response.request_id.clone(),
            allow_metadata_only: true,
        };
        let (mut lost, mut bad) = (0_u32, 0_u32);
        let mut interval = PollInterval::new(self.session.adaptive_polling());
        let mut contact = Contact::new(self.session.settings().retry.patience());
        let mut _room = None;
        if let Some(bytes) = self.announced(taken).await? {
            poll.allow_metadata_only = false;
            _room = Some(self.session.download_budget().acquire(bytes).await);
        }
        loop {
            let asked = Instant::now();
            let options = RequestOptions {
                headers: headers(taken, progress.polls, proto),
                ..RequestOptions::default()
            };
            let reply = self.session.transport().send_raw(&poll, &options).await;
            progress.polls += 1;
            if reply.as_ref().err().is_none_or(|error| error.status().is_some()) {
                contact.seen();
            }
            let error = match reply {
                Ok(reply) => {
                    lost = 0;
                    let kind = reply.headers().get(CONTENT_TYPE).and_then(|t| t.to_str().ok());
                    match PollResponse::decode(kind.unwrap_or(JSON), reply.body())? {
                        PollResponse::Ready(payload) => return Ok(payload),
                        PollResponse::Failed(failed) => {
                            return Err(Error::from_failed_request(failed)
                                .after(1, progress.start.elapsed()));
                        }
                        PollResponse::MetadataOnly { .. } if !poll.allow_metadata_only => {
                            let why = "the server announced the answer twice and did not send it";
                            return Err(Error::new(ErrorKind::Decode, why));
                        }
                        PollResponse::MetadataOnly { response_payload_size } => {
                            poll.allow_metadata_only = false;
                            let downloads = self.session.download_budget();
                            _room = Some(downloads.acquire(response_payload_size).await);
                        }
                        PollResponse::TryAgain(pending) => {
                            self.log.notice(&pending);
                            interval.wait(asked).await;
                        }
                    }
                    continue;
                }
                Err(error) => error,
            };
            match error.status() {
                Some(408) => {
                    lost = 0;
                    if let Some(body) = error.body() {
                        bad = 0;
                        self.log.notice(&PollResponse::decode_timeout(&Bytes::copy_from_slice(
                            body.as_bytes(),
                        )));
                    }
                    interval.wait(asked).await;
                }
                Some(500..600) => {
                    lost = 0;
                    interval.wait(asked).await;
                }
                Some(400) if bad < BAD_REQUESTS => {
                    lost = 0;
                    bad += 1;
                }
                Some(402) if self.session.transport().pause_for_billing() => {
                    sleep(BILLING_PAUSE).await;
                    continue;
                }
                Some(410) => return Err(error.expired()),
                Some(429) => back_off(&mut lost).await,
                None if error.is_retryable() && contact.lost(asked) => return Err(error),
                None if error.is_retryable() => back_off(&mut lost).await,
                _ => return Err(error),
            }
            self.write_down(&error, taken, progress);
        }
    }

    /// Waits until the answer is announced, where answers are; returns its size if that is known.
    async fn announced(&self, taken: &Submitted) -> Result<Option<u64>> {
        let Some(batch_poll) = self.batch_poll else { return Ok(None) };
        Ok(match batch_poll.wait_for(&taken.response.request_id).await? {
            Some(CompletedFuture::Finished {
                response_payload_uncompressed_size: size, ..
            }) => size.filter(|bytes| *bytes > 0),
            Some(CompletedFuture::Failed { .. }) | None => None,
        })
    }
}

async fn back_off(lost: &mut u32) {
    sleep(Duration::from_secs(1 << (*lost).min(5)).min(LONGEST_PAUSE)).await;
    *lost += 1;
}

fn headers(taken: &Submitted, iteration: u64, proto: bool) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if proto {
        headers.insert(ACCEPT, ::http::HeaderValue::from_static(PROTO));
    }
    header::put(&mut headers, wire_header::REQUEST_TYPE, taken.request_type);
    header::put(&mut headers, wire_header::REQUEST_ITERATION, &iteration.to_string());
    if iteration == 0 {
        let seconds = taken.submit_duration.as_secs_f64().to_string();
        header::put(&mut headers, wire_header::SUBMIT_ROUNDTRIP_TIME, &seconds);
    }
    headers
}
