//! [`SimulatedNetwork`]: carries requests from a client to the server, with faults.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::future::BoxFuture;
use http::header::CONTENT_LENGTH;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tinkex::{HttpFailure, HttpService, Lane};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::faults::FaultPlan;
use crate::host::Host;
use crate::oracle::Oracle;
use crate::task::{self, Delayed};
use crate::trace::{EventTrace, event};

/// Connection of one client to the server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct SimulatedNetwork(Arc<NetworkInner>);

struct NetworkInner {
    client: usize,
    host: Host,
    oracle: Oracle,
    plan: FaultPlan,
    calm_at: Instant,
    trace: EventTrace,
    rng: Mutex<Rng>,
}

/// What happens to one request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Delivered,
    RequestLost,
    ResponseLost,
    Duplicated,
    /// The connection breaks after this fraction of the body.
    RequestCut(f64),
    /// A proxy answers with this status without passing the request on.
    Status(u16),
    /// A proxy answers with this status although the request has been executed.
    StatusAfter(u16),
}

/// Fate and delays of one request.
#[derive(Clone, Copy, Debug)]
struct Passage {
    fate: Fate,
    before: Duration,
    after: Duration,
    /// Delay of the second copy of a duplicated request.
    again: Duration,
}

impl SimulatedNetwork {
    pub(crate) fn new(
        client: usize,
        host: Host,
        oracle: Oracle,
        plan: &FaultPlan,
        seed: u64,
        trace: EventTrace,
    ) -> Self {
        let (calm_at, plan) = (Instant::now() + plan.duration, plan.clone());
        let rng = Mutex::new(Rng::with_seed(seed));
        Self(Arc::new(NetworkInner { client, host, oracle, plan, calm_at, trace, rng }))
    }

    fn choose_passage(&self, path: &str) -> Passage {
        let mut rng = self.0.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let rng = &mut *rng;
        let plan = &self.0.plan;
        let calm = Instant::now() >= self.0.calm_at;
        let delay = |rng: &mut Rng| {
            let slow = !calm && rng.f64() < plan.slow_message;
            let most = if slow { plan.max_delay } else { Duration::from_millis(3) };
            most.mul_f64(rng.f64())
        };
        let (before, after, again) = (delay(rng), delay(rng), delay(rng));
        let mut draw = rng.f64();
        let mut hit = |probability: f64| {
            draw -= probability;
            draw < 0.0
        };
        let status = [429, 500, 502, 503][rng.usize(0..4)];
        let fate = if calm {
            Fate::Delivered
        } else if path.ends_with("/session_heartbeat") && rng.f64() < plan.drop_heartbeat
            || hit(plan.drop_request)
        {
            Fate::RequestLost
        } else if hit(plan.drop_response) {
            Fate::ResponseLost
        } else if hit(plan.duplicate) {
            Fate::Duplicated
        } else if hit(plan.cut_request) {
            Fate::RequestCut(rng.f64())
        } else if hit(plan.error_status / 2.0) {
            Fate::Status(status)
        } else if hit(plan.error_status / 2.0) {
            Fate::StatusAfter(status)
        } else {
            Fate::Delivered
        };
        Passage { fate, before, after, again }
    }

    /// Carries a request to the server after `delay` and returns the response, or `None` if the
    /// connection broke: after the fraction `cut` of the body, when the server process ended, or
    /// when `client_gone` was ready.
    async fn exchange(
        self,
        request: Request<Bytes>,
        delay: Duration,
        cut: Option<f64>,
        mut client_gone: impl AsyncWaiter,
    ) -> Option<Response<Bytes>> {
        let inner = &self.0;
        tokio::time::sleep(delay).await;
        let handler = inner.host.handler()?;
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let length = HeaderValue::from(body.len());
        parts.headers.insert(CONTENT_LENGTH, length);
        let sent = cut.map_or(body.len(), |fraction| part_of(body.len(), fraction));
        let is_cut = cut.is_some();
        let request =
            Request::from_parts(parts, SentBody { rest: body.slice(..sent), breaks: is_cut });
        let loads = path.ends_with("/load_weights").then(|| body.clone());
        let handled = {
            let watched = handler.clone();
            let (oracle, host) = (inner.oracle.clone(), inner.host.clone());
            let handling = Box::pin(async move { handler.handle(request).await });
            let delay = move |_| host.interruption().unwrap_or_default();
            let after = move || {
                if let Some(body) = &loads {
                    oracle.load_admitted(&watched, body);
                }
            };
            let handling = Delayed::new(handling, delay, after);
            let respond = async {
                let response = handling.await;
                let (parts, body) = response.into_parts();
                let body = body.collect().await.ok()?.to_bytes();
                Some(Response::from_parts(parts, body))
            };
            tokio::select! {
                biased;
                () = inner.host.process_ended() => None,
                response = respond => response,
                () = client_gone.wait() => None,
            }
        };
        let response = handled.filter(|_| !inner.host.is_dead() && !is_cut)?;
        event!(
            inner.trace,
            "client {}: {path} -> {} ({} bytes)",
            inner.client,
            response.status().as_u16(),
            response.body().len()
        );
        inner.oracle.responded(&path, &body, &response);
        Some(response)
    }
}

/// Something to wait for.
trait AsyncWaiter: Send {
    fn wait(&mut self) -> impl Future<Output = ()> + Send;
}

/// A client that never disconnects.
struct Never;

impl AsyncWaiter for Never {
    async fn wait(&mut self) {
        std::future::pending::<()>().await;
    }
}

impl HttpService for SimulatedNetwork {
    fn send(
        &self,
        _lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let passage = self.choose_passage(request.uri().path());
        let network = self.clone();
        Box::pin(async move {
            let path = request.uri().path().to_owned();
            if passage.fate != Fate::Delivered {
                let client = network.0.client;
                event!(network.0.trace, "client {client}: {path}: {:?}", passage.fate);
                network.0.trace.count(fate_name(passage.fate));
            }
            match passage.fate {
                Fate::RequestLost => {
                    tokio::time::sleep(passage.before).await;
                    return Err(HttpFailure::connect("request lost (simulated)"));
                }
                Fate::Status(status) => {
                    tokio::time::sleep(passage.before).await;
                    return Ok(proxy_response(status));
                }
                Fate::Duplicated => {
                    let (copy, network) = (copy(&request), network.clone());
                    let delay = passage.before + passage.again;
                    task::spawn(async move {
                        let _ = network.exchange(copy, delay, None, Never).await;
                    });
                }
                _ => {}
            }
            let cut = match passage.fate {
                Fate::RequestCut(fraction) => Some(fraction),
                _ => None,
            };
            let (mut sender, receiver) = oneshot::channel();
            task::spawn(async move {
                let waiter = ClientGone(&mut sender);
                let response = network.exchange(request, passage.before, cut, waiter).await;
                tokio::time::sleep(passage.after).await;
                let _ = sender.send(response);
            });
            let received = tokio::time::timeout(timeout, receiver).await;
            let Ok(received) = received else {
                return Err(HttpFailure::timeout("no response in time (simulated)"));
            };
            match (received.ok().flatten(), passage.fate) {
                (Some(_), Fate::ResponseLost) => {
                    Err(HttpFailure::connect("response lost (simulated)"))
                }
                (Some(_), Fate::StatusAfter(status)) => Ok(proxy_response(status)),
                (Some(response), _) => Ok(response),
                (None, _) => Err(HttpFailure::connect("connection closed (simulated)")),
            }
        })
    }
}

/// Waits until the client stops waiting for a response.
struct ClientGone<'a>(&'a mut oneshot::Sender<Option<Response<Bytes>>>);

impl AsyncWaiter for ClientGone<'_> {
    async fn wait(&mut self) {
        self.0.closed().await;
    }
}

fn fate_name(fate: Fate) -> &'static str {
    match fate {
        Fate::Delivered => "delivered",
        Fate::RequestLost => "request lost",
        Fate::ResponseLost => "response lost",
        Fate::Duplicated => "request duplicated",
        Fate::RequestCut(_) => "request cut",
        Fate::Status(_) | Fate::StatusAfter(_) => "error status",
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a random part of a small body"
)]
fn part_of(length: usize, fraction: f64) -> usize {
    ((length as f64 * fraction) as usize).min(length)
}

fn copy(request: &Request<Bytes>) -> Request<Bytes> {
    let mut copy = Request::new(request.body().clone());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    copy
}

fn proxy_response(status: u16) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from_static(b"{\"detail\":\"simulated\"}"));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response
}

/// Body that arrives at the server; it breaks at its end if `breaks` is true.
struct SentBody {
    rest: Bytes,
    breaks: bool,
}

impl Body for SentBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(rest))));
        }
        Poll::Ready(std::mem::take(&mut self.breaks).then_some(Err(Broken)))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[derive(Debug)]
struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("connection closed (simulated)")
    }
}
