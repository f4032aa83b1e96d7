//! The only loop that waits for an answer.

use std::time::Duration;

use ::http::HeaderMap;
use ::http::header::{ACCEPT, CONTENT_TYPE};
use bytes::Bytes;
use tinkex_wire::{
    JSON, Outcome, PROTO, Payload, RetrieveFuture, Submit, Ticket, header as wire_header,
};
use tokio::time::{Instant, sleep};

use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::transport::{BILLING_PAUSE, Extras, header};

use super::observe::QueueLog;

const LONGEST_PAUSE: Duration = Duration::from_secs(30);
const BAD_REQUESTS: u32 = 3;
/// An answer that comes faster than this was not waited for by the server.
const FAST: Duration = Duration::from_secs(1);
const LONGEST_FAST_PAUSE: Duration = Duration::from_secs(5);

/// What polling needs besides the ticket.
pub(crate) struct Poller<'a> {
    session: &'a Session,
    log: &'a QueueLog,
}

/// A request that was taken: what to ask for, and how long it took to hand it over.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) ticket: Ticket,
    pub(crate) request_type: &'static str,
    pub(crate) handed_over_in: Duration,
}

impl<'a> Poller<'a> {
    /// Waits for answers of a session, and tells `log` why there are none yet.
    pub(crate) fn new(session: &'a Session, log: &'a QueueLog) -> Self {
        Self { session, log }
    }

    /// Waits for the answer behind a ticket.
    pub(crate) async fn answer<S: Submit>(&self, taken: &Taken) -> Result<S::Output> {
        let payload = self.wait(taken, S::PROTO_OUTPUT).await;
        payload.and_then(|payload| Ok(S::output(&payload)?)).map_err(|error| {
            error.about(taken.ticket.request_id.clone()).during(taken.request_type)
        })
    }

    async fn wait(&self, taken: &Taken, proto: bool) -> Result<Payload> {
        let start = Instant::now();
        let mut poll = RetrieveFuture {
            request_id: taken.ticket.request_id.clone(),
            allow_metadata_only: true,
        };
        let (mut iteration, mut lost, mut bad, mut fast) = (0_u64, 0_u32, 0_u32, 0_u32);
        let mut _room = None;
        loop {
            let asked = Instant::now();
            let extras = Extras { headers: headers(taken, iteration, proto), ..Extras::default() };
            let reply = self.session.transport().send(&poll, &extras).await;
            iteration += 1;
            let error = match reply {
                Ok(reply) => {
                    lost = 0;
                    let kind = reply.headers().get(CONTENT_TYPE).and_then(|t| t.to_str().ok());
                    match Outcome::read(kind.unwrap_or(JSON), reply.body())? {
                        Outcome::Ready(payload) => return Ok(payload),
                        Outcome::Failed(failed) => {
                            return Err(Error::of_work(failed).after(1, start.elapsed()));
                        }
                        Outcome::MetadataOnly { .. } if !poll.allow_metadata_only => {
                            let why = "the server announced the answer twice and did not send it";
                            return Err(Error::new(ErrorKind::Decode, why));
                        }
                        Outcome::MetadataOnly { response_payload_size } => {
                            poll.allow_metadata_only = false;
                            let downloads = self.session.downloads();
                            _room = Some(downloads.take(response_payload_size).await);
                        }
                        Outcome::TryAgain(pending) => {
                            self.log.notice(&pending);
                            self.pace(asked, &mut fast).await;
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
                        self.log.notice(&Outcome::read_timeout(&Bytes::copy_from_slice(
                            body.as_bytes(),
                        )));
                    }
                    self.pace(asked, &mut fast).await;
                }
                Some(500..600) => {
                    lost = 0;
                    self.pace(asked, &mut fast).await;
                }
                Some(400) if bad < BAD_REQUESTS => {
                    lost = 0;
                    bad += 1;
                }
                Some(402) if self.session.transport().pause_for_billing() => {
                    sleep(BILLING_PAUSE).await;
                }
                Some(410) => return Err(error.expired()),
                Some(429) => back_off(&mut lost).await,
                None if error.is_retryable() => back_off(&mut lost).await,
                _ => return Err(error),
            }
        }
    }

    /// A server should hold a poll until there is something to say. One that does not must not be
    /// asked as fast as it answers.
    async fn pace(&self, asked: Instant, fast: &mut u32) {
        if !self.session.paced() || asked.elapsed() >= FAST {
            *fast = 0;
            return;
        }
        let most = Duration::from_millis(250 << (*fast).min(5)).min(LONGEST_FAST_PAUSE);
        *fast += 1;
        sleep(most.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
    }
}

async fn back_off(lost: &mut u32) {
    sleep(Duration::from_secs(1 << (*lost).min(5)).min(LONGEST_PAUSE)).await;
    *lost += 1;
}

fn headers(taken: &Taken, iteration: u64, proto: bool) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if proto {
        headers.insert(ACCEPT, ::http::HeaderValue::from_static(PROTO));
    }
    header::put(&mut headers, wire_header::REQUEST_TYPE, taken.request_type);
    header::put(&mut headers, wire_header::REQUEST_ITERATION, &iteration.to_string());
    if iteration == 0 {
        let seconds = taken.handed_over_in.as_secs_f64().to_string();
        header::put(&mut headers, wire_header::TICKET_ROUNDTRIP, &seconds);
    }
    headers
}
