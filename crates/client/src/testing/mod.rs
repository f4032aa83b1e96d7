//! A scripted server for the tests of programs that use this crate (feature `testing`).
//!
//! [`FakeServer`] implements [`HttpService`] in the test's own process: no network, no port, no
//! thread. It answers every route that a program needs to train and sample, so that a test scripts
//! only what it is about, and it records the requests:
//!
//! ```
//! use std::time::Duration;
//! use tinkex::SamplingParams;
//! use tinkex::testing::{FakeServer, Reply, Route};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
//! #     .block_on(async {
//! let server = FakeServer::new()
//!     .on(Route::Sample, Reply::status(429).retry_after(Duration::from_secs(2)))
//!     .on(Route::Sample, Reply::sampled([5, 6, 7]));
//! let service = server.builder().build()?;
//! let sampler = service.create_sampling_client("any-model").await?;
//!
//! let response = sampler.sample([1, 2], SamplingParams::new().max_tokens(8)).await?;
//! assert_eq!(response.sequences[0].tokens, [5, 6, 7]);
//!
//! let calls = server.calls_to(Route::Sample);
//! assert_eq!(calls.len(), 2);
//! assert!(calls[1].at - calls[0].at >= Duration::from_secs(2));
//! assert_eq!(calls[1].json()["sampling_params"]["max_tokens"], 8);
//! # Ok::<_, tinkex::Error>(()) }).unwrap();
//! ```
//!
//! The chapter "Testing your program" of the client guide has a complete test.

mod call;
mod defaults;
mod reply;
mod stream;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep};

use crate::config::Env;
use crate::service::{ServiceClient, ServiceClientBuilder};
use crate::transport::http::{HttpFailure, HttpService, Lane, ResponseBody};

use defaults::Defaults;
use reply::Action;

pub use call::RecordedCall;
pub use reply::Reply;
#[doc(inline)]
pub use tinkex_wire::{
    ForwardBackward, ForwardBackwardOutput, OptimStepOutput, PassMode, Route, Seq,
};

/// Scripted server in the test's own process. Clones share their state.
///
/// # Which reply a request gets
///
/// 1. The first queued reply of its path ([`on_path`](Self::on_path)), else of its route, in the
///    order of the calls of [`on`](Self::on). A reply is used once, unless [`Reply::times`] or
///    [`Reply::always`] says otherwise.
/// 2. If none is queued, the reply that the function of [`on_call`](Self::on_call) computes.
/// 3. Otherwise the default response: sessions, heartbeats, configuration, tokens and telemetry are
///    accepted; models and sampling sessions are created; training, sampling and saving are
///    accepted, and their futures resolve at the first poll to plausible results; lists are empty.
///    A request that has no default response gets status 404, with a message that names its route.
///
/// Default results are deterministic: a sample has `max_tokens` tokens, at most 4, with the ids 1,
/// 2, 3, 4 and a log-probability of −0.5 each, and a streamed one ([`Route::Completions`]) has the
/// text ` 1 2 3 4`; a training pass has a log-probability of −0.5 for every target token.
///
/// # Cancellations
///
/// The default response to [`Route::DynamicConfig`] enables cancellations
/// (`sample_cancel_enabled`): if the program drops a sample that the server has accepted, the client
/// sends a request to [`Route::CancelFuture`]. A reply of your own to `DynamicConfig` can disable
/// them, as some servers do.
///
/// # Time
///
/// Delays use the clock of tokio. In a test with `#[tokio::test(start_paused = true)]` neither
/// delays nor retries take real time.
#[derive(Clone)]
pub struct FakeServer(Arc<FakeServerShared>);

struct FakeServerShared {
    /// Base URL, different for every server, so that tests cannot affect each other.
    url: String,
    start: Instant,
    state: Mutex<FakeServerState>,
    defaults: Defaults,
    open_streams: Arc<AtomicUsize>,
}

#[derive(Default)]
struct FakeServerState {
    queued: HashMap<ReplyKey, VecDeque<Reply>>,
    functions: HashMap<ReplyKey, ReplyFunction>,
    calls: Vec<RecordedCall>,
}

/// Requests that a queued reply is for.
#[derive(PartialEq, Eq, Hash)]
enum ReplyKey {
    Route(Route),
    /// Method and path, for example `GET /file`.
    Path(String),
}

type ReplyFunction = Arc<dyn Fn(&RecordedCall) -> Reply + Send + Sync>;

impl FakeServerState {
    /// Returns the first queued reply of a key, if any, and counts its use.
    fn take(&mut self, key: &ReplyKey) -> Option<Reply> {
        let queue = self.queued.get_mut(key)?;
        let reply = queue.front_mut()?;
        let selected = reply.clone();
        if reply.use_up() {
            queue.pop_front();
        }
        Some(selected)
    }
}

impl FakeServer {
    /// Creates a server that gives the default responses.
    #[must_use]
    pub fn new() -> Self {
        static CREATED: AtomicU64 = AtomicU64::new(0);
        Self(Arc::new(FakeServerShared {
            url: format!("http://fake-{}.test", CREATED.fetch_add(1, Ordering::Relaxed)),
            start: Instant::now(),
            state: Mutex::default(),
            defaults: Defaults::default(),
            open_streams: Arc::default(),
        }))
    }

    /// Queues a reply for the next request of a route.
    #[must_use = "the server is returned; use `queue` for a server that is in use already"]
    pub fn on(self, route: Route, reply: Reply) -> Self {
        self.queue(route, reply);
        self
    }

    /// Queues a reply for the next request of a route, like [`on`](Self::on), while the server is
    /// in use.
    pub fn queue(&self, route: Route, reply: Reply) {
        self.lock().queued.entry(ReplyKey::Route(route)).or_default().push_back(reply);
    }

    /// Queues a reply for the next request with this method and path, for example `GET /file`. Use
    /// it for requests that are not routes of the API, such as downloads. The server is not
    /// compared, the query is ignored, and a reply for a path precedes those for a route.
    ///
    /// ```
    /// use tinkex::testing::{FakeServer, Reply};
    ///
    /// let server = FakeServer::new()
    ///     .on_path("GET /weights.tar", Reply::status(200).text("content of the archive"));
    /// ```
    #[must_use = "the server is returned; use `queue_path` for a server that is in use already"]
    pub fn on_path(self, method_and_path: &str, reply: Reply) -> Self {
        self.queue_path(method_and_path, reply);
        self
    }

    /// Queues a reply for the next request with this method and path, like
    /// [`on_path`](Self::on_path), while the server is in use.
    pub fn queue_path(&self, method_and_path: &str, reply: Reply) {
        let key = ReplyKey::Path(method_and_path.to_owned());
        self.lock().queued.entry(key).or_default().push_back(reply);
    }

    /// Sets a function that computes the reply to the requests of a route for which no reply is
    /// queued. It replaces an earlier function of the route. [`Reply::ok`] selects the default
    /// response.
    ///
    /// ```
    /// use tinkex::testing::{FakeServer, Reply, Route};
    ///
    /// // Reject prompts of more than two tokens.
    /// let server = FakeServer::new().on_call(Route::Sample, |call| {
    ///     match call.json()["prompt"]["chunks"][0]["tokens"].as_array() {
    ///         Some(tokens) if tokens.len() > 2 => Reply::status(400).text("prompt is too long"),
    ///         _ => Reply::ok(),
    ///     }
    /// });
    /// ```
    #[must_use = "the server is returned"]
    pub fn on_call(
        self,
        route: Route,
        function: impl Fn(&RecordedCall) -> Reply + Send + Sync + 'static,
    ) -> Self {
        self.lock().functions.insert(ReplyKey::Route(route), Arc::new(function));
        self
    }

    /// Sets a function that computes the reply to the requests with this method and path, for
    /// example `GET /file`, for which no reply is queued. It is like [`on_call`](Self::on_call) for
    /// requests that are not routes of the API, and precedes the function of a route.
    ///
    /// ```
    /// use tinkex::testing::{FakeServer, Reply};
    ///
    /// // A file that has not changed since the client downloaded it.
    /// let server = FakeServer::new().on_path_call("GET /file", |call| {
    ///     match call.header("if-none-match") {
    ///         Some(_) => Reply::status(304),
    ///         None => Reply::status(200).header("etag", "\"1\"").text("content"),
    ///     }
    /// });
    /// ```
    #[must_use = "the server is returned"]
    pub fn on_path_call(
        self,
        method_and_path: &str,
        function: impl Fn(&RecordedCall) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let key = ReplyKey::Path(method_and_path.to_owned());
        self.lock().functions.insert(key, Arc::new(function));
        self
    }

    /// Returns a builder of clients of this server, without telemetry. It does not read environment
    /// variables.
    pub fn builder(&self) -> ServiceClientBuilder {
        ServiceClient::builder()
            .env(Env::empty())
            .base_url(self.url())
            .api_key("tml-fake")
            .without_telemetry()
            .http(self.clone())
    }

    /// Returns the base URL that [`builder`](Self::builder) sets. Nothing listens on it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// Returns all requests so far, in the order of their arrival.
    #[must_use]
    pub fn calls(&self) -> Vec<RecordedCall> {
        self.lock().calls.clone()
    }

    /// Returns the requests of a route so far, in the order of their arrival.
    #[must_use]
    pub fn calls_to(&self, route: Route) -> Vec<RecordedCall> {
        let state = self.lock();
        state.calls.iter().filter(|call| call.route == Some(route)).cloned().collect()
    }

    /// Returns the number of streamed responses ([`Reply::stream`]) that the client still reads. A
    /// stream that the client drops is closed at once.
    #[must_use]
    pub fn open_streams(&self) -> usize {
        self.0.open_streams.load(Ordering::Relaxed)
    }

    /// Records a request and selects its reply.
    fn receive(&self, call: &RecordedCall) -> Reply {
        let function = {
            let mut state = self.lock();
            state.calls.push(call.clone());
            let path = call.path.split('?').next().unwrap_or_default();
            let path = ReplyKey::Path(format!("{} {path}", call.method));
            let keys = [Some(path), call.route.map(ReplyKey::Route)];
            let keys = keys.iter().flatten();
            if let Some(reply) = keys.clone().find_map(|key| state.take(key)) {
                return reply;
            }
            keys.clone().find_map(|key| state.functions.get(key)).cloned()
        };
        // Called without the lock, so that it may use the server.
        function.map_or_else(Reply::ok, |function| function(call))
    }

    async fn reply(&self, call: RecordedCall) -> Result<Response<ResponseBody>, HttpFailure> {
        let reply = self.receive(&call);
        if !reply.delay.is_zero() {
            sleep(reply.delay).await;
        }
        match reply.action {
            Action::Default => {
                let response = self.0.defaults.response(&call, reply.request_id).await;
                Ok(response.map(ResponseBody::from))
            }
            Action::Outcome(outcome) => {
                let response = self.0.defaults.accept(&call, outcome, reply.request_id);
                Ok(response.map(ResponseBody::from))
            }
            Action::Response(response) => Ok(response.to_http().map(ResponseBody::from)),
            Action::Stream(stream) => Ok(stream.to_http(call.timeout, &self.0.open_streams)),
            Action::ConnectionLost => Err(HttpFailure::connect("scripted connection loss")),
            Action::ConnectionRefused => {
                let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
                Err(HttpFailure::connect(refused))
            }
            Action::TimedOut => {
                sleep(call.timeout).await;
                Err(HttpFailure::timeout("scripted timeout"))
            }
            Action::Never => std::future::pending().await,
        }
    }

    fn lock(&self) -> MutexGuard<'_, FakeServerState> {
        self.0.state.lock()
    }
}

impl Default for FakeServer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for FakeServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeServer").field("url", &self.0.url).finish_non_exhaustive()
    }
}

impl HttpService for FakeServer {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let response = self.send_streaming(lane, request, timeout);
        Box::pin(async {
            let (head, mut body) = response.await?.into_parts();
            // Most bodies have one part, which needs no copy.
            let mut whole = body.next().await.transpose()?.unwrap_or_default();
            while let Some(part) = body.next().await {
                whole = [whole, part?].concat().into();
            }
            Ok(Response::from_parts(head, whole))
        })
    }

    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        let call = RecordedCall::new(lane, request, timeout, self.0.start.elapsed());
        Box::pin(self.reply(call))
    }
}
