//! [`SimulatedNetwork`]: carries requests from a client to the server, with faults.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
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
        let (rng, dead) = (Mutex::new(Rng::with_seed(seed)), AtomicBool::new(false));
        Self(Arc::new(NetworkInner { client, host, oracle, plan, calm_at, trace, rng, dead }))
    }

    /// Ends the process of the client: tasks that it leaves behind send nothing any more.
    pub(crate) fn kill_client(&self) {
        self.0.dead.store(true, Ordering::Relaxed);
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

    /// Lets the server handle a request that has arrived, of which the body ends after the fraction
    /// `cut`, if any. Returns `None` if the client gets no response: the server does not run, its
    /// process ends meanwhile, or the body was cut.
    ///
    /// Dropping the future is a disconnection of the client.
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
        let (status, size) = (response.status().as_u16(), response.body().len());
        event!(trace, "client {client}: {path} -> {status} ({size} bytes)");
        oracle.responded(&path, &body, &response);
        Some(response)
    }

    /// Passes a request to the handler of the server, and collects the response. Nothing happens
    /// while the process is frozen.
    async fn handle(
        &self,
        handler: RequestHandler,
        request: Request<Bytes>,
        cut: Option<f64>,
    ) -> Option<Response<Bytes>> {
        let is_load = request.uri().path().ends_with("/load_weights");
        let load = is_load.then(|| (handler.clone(), request.body().clone()));
        let (host, oracle) = (self.0.host.clone(), self.0.oracle.clone());
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

    /// Sends a request and returns what becomes of it. The network continues to carry a request
    /// whose client has stopped waiting.
    async fn carry(
        self,
        request: Request<Bytes>,
        passage: Passage,
        timeout: Duration,
    ) -> Result<Response<Bytes>, HttpFailure> {
        self.0.host.clients_run().await;
        let cut = match passage.fate {
            Fate::RequestLost => {
                tokio::time::sleep(passage.before).await;
                return Err(HttpFailure::connect("request lost (simulated)"));
            }
            Fate::Status(status) => {
                tokio::time::sleep(passage.before).await;
                return Ok(proxy_response(status));
            }
            Fate::RequestCut(fraction) => Some(fraction),
            Fate::Duplicated => {
                let (network, request) = (self.clone(), copy(&request));
                task::spawn(async move {
                    tokio::time::sleep(passage.before + passage.again).await;
                    network.serve(request, None).await;
                });
                None
            }
            Fate::Delivered | Fate::ResponseLost | Fate::StatusAfter(_) => None,
        };
        let (mut sender, receiver) = oneshot::channel();
        task::spawn(async move {
            tokio::time::sleep(passage.before).await;
            let response = tokio::select! {
                biased;
                response = self.serve(request, cut) => response,
                () = sender.closed() => None,
            };
            tokio::time::sleep(passage.after).await;
            let _ = sender.send(response);
        });
        let Ok(received) = tokio::time::timeout(timeout, receiver).await else {
            return Err(HttpFailure::timeout("no response in time (simulated)"));
        };
        let Some(response) = received.ok().flatten() else {
            return Err(HttpFailure::connect("connection closed (simulated)"));
        };
        match passage.fate {
            Fate::ResponseLost => Err(HttpFailure::connect("response lost (simulated)")),
            Fate::StatusAfter(status) => Ok(proxy_response(status)),
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
        let passage = self.choose_passage(path);
        if passage.fate != Fate::Delivered {
            let NetworkInner { client, trace, .. } = &*self.0;
            event!(trace, "client {client}: {path}: {:?}", passage.fate);
            trace.count(fate_name(passage.fate));
        }
        Box::pin(self.clone().carry(request, passage, timeout))
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

/// Returns a request as the server receives it: with the length of the whole body, of which only the
/// fraction `cut` arrives, if any.
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
