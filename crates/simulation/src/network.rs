//! [`SimulatedNetwork`]: carries requests from a client to the server, with faults.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::future::BoxFuture;
use http::header::CONTENT_LENGTH;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use tinkex::{HttpFailure, HttpService, Lane};
use tinkex_server::simulation::RequestHandler;
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
    /// Whether the process of the client has died.
    dead: AtomicBool,
}

/// Outcome of the delivery of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DeliveryOutcome {
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

/// Outcome and delays of the delivery of one request.
#[derive(Clone, Copy, Debug)]
struct DeliveryPlan {
    outcome: DeliveryOutcome,
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
        let calm_at = Instant::now() + plan.duration;
        let plan = plan.clone();
        let rng = Mutex::new(Rng::with_seed(seed));
        let dead = AtomicBool::new(false);
        Self(Arc::new(NetworkInner { client, host, oracle, plan, calm_at, trace, rng, dead }))
    }

    /// Ends the process of the client: its remaining tasks can no longer send requests.
    pub(crate) fn kill_client(&self) {
        self.0.dead.store(true, Ordering::Relaxed);
    }

    fn plan_delivery(&self, path: &str) -> DeliveryPlan {
        let mut rng = self.0.rng.lock();
        let rng = &mut *rng;
        let plan = &self.0.plan;
        let calm = Instant::now() >= self.0.calm_at;
        let delay = |rng: &mut Rng| {
            let slow = !calm && rng.f64() < plan.slow_message;
            let most = if slow { plan.max_delay } else { Duration::from_millis(3) };
            most.mul_f64(rng.f64())
        };
        let before = delay(rng);
        let after = delay(rng);
        let again = delay(rng);
        let mut draw = rng.f64();
        let mut hit = |probability: f64| {
            draw -= probability;
            draw < 0.0
        };
        let status = [429, 500, 502, 503][rng.usize(0..4)];
        let outcome = if calm {
            DeliveryOutcome::Delivered
        } else if path.ends_with("/session_heartbeat") && rng.f64() < plan.drop_heartbeat
            || hit(plan.drop_request)
        {
            DeliveryOutcome::RequestLost
        } else if hit(plan.drop_response) {
            DeliveryOutcome::ResponseLost
        } else if hit(plan.duplicate) {
            DeliveryOutcome::Duplicated
        } else if hit(plan.cut_request) {
            DeliveryOutcome::RequestCut(rng.f64())
        } else if hit(plan.error_status / 2.0) {
            DeliveryOutcome::Status(status)
        } else if hit(plan.error_status / 2.0) {
            DeliveryOutcome::StatusAfter(status)
        } else {
            DeliveryOutcome::Delivered
        };
        DeliveryPlan { outcome, before, after, again }
    }

    /// Lets the server handle a request that has arrived. If `cut` is set, only this fraction of
    /// the body arrives. Returns `None` if the client gets no response: the server is not running,
    /// the server process ends while it handles the request, or the body was cut.
    ///
    /// Dropping the future simulates that the client disconnects.
    async fn serve(&self, request: Request<Bytes>, cut: Option<f64>) -> Option<Response<Bytes>> {
        let NetworkInner { host, oracle, trace, client, .. } = &*self.0;
        let handler = host.handler()?;
        let path = request.uri().path().to_owned();
        let body = request.body().clone();
        let response = tokio::select! {
            biased;
            () = host.process_ended() => None,
            response = self.handle(handler, request, cut) => response,
        };
        let response = response.filter(|_| !host.is_dead() && cut.is_none())?;
        let status = response.status().as_u16();
        let size = response.body().len();
        event!(trace, "client {client}: {path} -> {status} ({size} bytes)");
        oracle.responded(&path, &body, &response);
        Some(response)
    }

    /// Passes a request to the handler of the server, and collects the response. The handler makes
    /// no progress while the process is frozen.
    async fn handle(
        &self,
        handler: RequestHandler,
        request: Request<Bytes>,
        cut: Option<f64>,
    ) -> Option<Response<Bytes>> {
        let is_load = request.uri().path().ends_with("/load_weights");
        let load = is_load.then(|| (handler.clone(), request.body().clone()));
        let host = self.0.host.clone();
        let oracle = self.0.oracle.clone();
        let delay = move |_| host.interruption().unwrap_or_default();
        let after_poll = move || {
            if let Some((handler, body)) = &load {
                oracle.load_admitted(handler, body);
            }
        };
        let request = as_received(request, cut);
        let handling = Box::pin(async move { handler.handle(request).await });
        let (parts, body) = Delayed::new(handling, delay, after_poll).await.into_parts();
        // Copy the body: the server counts the memory of a response until it has been sent.
        let body = Bytes::copy_from_slice(&body.collect().await.ok()?.to_bytes());
        Some(Response::from_parts(parts, body))
    }

    /// Sends a request and returns the response or the failure. The network still delivers a
    /// request whose client has stopped waiting.
    async fn deliver(
        self,
        request: Request<Bytes>,
        delivery: DeliveryPlan,
        timeout: Duration,
    ) -> Result<Response<Bytes>, HttpFailure> {
        self.0.host.clients_run().await;
        let cut = match delivery.outcome {
            DeliveryOutcome::RequestLost => {
                tokio::time::sleep(delivery.before).await;
                return Err(HttpFailure::connect("request lost (simulated)"));
            }
            DeliveryOutcome::Status(status) => {
                tokio::time::sleep(delivery.before).await;
                return Ok(proxy_response(status));
            }
            DeliveryOutcome::RequestCut(fraction) => Some(fraction),
            DeliveryOutcome::Duplicated => {
                let network = self.clone();
                let request = copy(&request);
                task::spawn(async move {
                    tokio::time::sleep(delivery.before + delivery.again).await;
                    network.serve(request, None).await;
                });
                None
            }
            DeliveryOutcome::Delivered
            | DeliveryOutcome::ResponseLost
            | DeliveryOutcome::StatusAfter(_) => None,
        };
        let (mut sender, receiver) = oneshot::channel();
        task::spawn(async move {
            tokio::time::sleep(delivery.before).await;
            let response = tokio::select! {
                biased;
                response = self.serve(request, cut) => response,
                () = sender.closed() => None,
            };
            tokio::time::sleep(delivery.after).await;
            let _ = sender.send(response);
        });
        let Ok(received) = tokio::time::timeout(timeout, receiver).await else {
            return Err(HttpFailure::timeout("no response in time (simulated)"));
        };
        let Some(response) = received.ok().flatten() else {
            return Err(HttpFailure::connect("connection closed (simulated)"));
        };
        match delivery.outcome {
            DeliveryOutcome::ResponseLost => Err(HttpFailure::connect("response lost (simulated)")),
            DeliveryOutcome::StatusAfter(status) => Ok(proxy_response(status)),
            _ => Ok(response),
        }
    }
}

impl HttpService for SimulatedNetwork {
    fn send(
        &self,
        _lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        if self.0.dead.load(Ordering::Relaxed) {
            return Box::pin(std::future::pending());
        }
        let path = request.uri().path();
        let delivery = self.plan_delivery(path);
        if delivery.outcome != DeliveryOutcome::Delivered {
            let NetworkInner { client, trace, .. } = &*self.0;
            event!(trace, "client {client}: {path}: {:?}", delivery.outcome);
            trace.count(outcome_name(delivery.outcome));
        }
        Box::pin(self.clone().deliver(request, delivery, timeout))
    }
}

fn outcome_name(outcome: DeliveryOutcome) -> &'static str {
    match outcome {
        DeliveryOutcome::Delivered => "delivered",
        DeliveryOutcome::RequestLost => "request lost",
        DeliveryOutcome::ResponseLost => "response lost",
        DeliveryOutcome::Duplicated => "request duplicated",
        DeliveryOutcome::RequestCut(_) => "request cut",
        DeliveryOutcome::Status(_) | DeliveryOutcome::StatusAfter(_) => "error status",
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

/// Returns a request as the server receives it. The header has the length of the whole body; if
/// `cut` is set, only this fraction of the body arrives.
fn as_received(request: Request<Bytes>, cut: Option<f64>) -> Request<SentBody> {
    let (mut parts, body) = request.into_parts();
    parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    let sent = cut.map_or(body.len(), |fraction| part_of(body.len(), fraction));
    Request::from_parts(parts, SentBody { rest: body.slice(..sent), breaks: cut.is_some() })
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

/// Body that arrives at the server. If `breaks` is true, it ends with a connection error.
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
