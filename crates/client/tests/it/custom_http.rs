//! HTTP services of the caller: panics, backoffs and tracing spans.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::json;
use tinkex::rest::ListSessions;
use tinkex::{
    AdamParams, CallOptions, Error, ErrorKind, HttpFailure, HttpService, Lane, SamplingParams,
    ServiceClient,
};
use tokio::time::Instant;
use tracing::Instrument as _;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use crate::numbered_server::NumberedServer;

fn params() -> SamplingParams {
    SamplingParams::new().max_tokens(1)
}

/// Service that panics for requests whose path ends with `path`.
struct Panicking {
    server: NumberedServer,
    path: &'static str,
}

impl HttpService for Panicking {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        assert!(!request.uri().path().ends_with(self.path), "not expected: {}", self.path);
        self.server.send(lane, request, timeout)
    }
}

fn panicking(path: &'static str) -> ServiceClient {
    let server =
        NumberedServer::new(json!({"sample_use_retrieve_futures": path == "/retrieve_futures"}));
    server.builder().http(Panicking { server: server.clone(), path }).build().unwrap()
}

fn assert_panicked(error: Error, path: &str) {
    assert_eq!(error.kind(), ErrorKind::Panicked, "{path}: {error}");
    let message = format!("HTTP service panicked: not expected: {path}");
    assert!(error.to_string().ends_with(&message), "{error}");
    assert!(!error.is_retryable());
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_an_http_service_is_reported_as_a_panic() {
    for path in ["/asample", "/retrieve_future", "/retrieve_futures"] {
        let sampler = panicking(path).create_sampling_client("base").await.unwrap();
        assert_panicked(sampler.sample([1], params()).await.unwrap_err(), path);
        assert_panicked(sampler.compute_logprobs([1]).await.unwrap_err(), path);
    }
    let path = "/optim_step";
    let model = panicking(path).create_lora_training_client("base").await.unwrap();
    assert_panicked(model.optim_step(AdamParams::default()).await.unwrap_err(), path);
    let path = "/create_sampling_session";
    assert_panicked(panicking(path).create_sampling_client("base").await.unwrap_err(), path);
    let path = "/sessions";
    let rest = panicking(path).rest();
    assert_panicked(rest.list_sessions(&ListSessions::default()).await.unwrap_err(), path);
}

#[tokio::test(start_paused = true)]
async fn a_429_of_one_fake_does_not_delay_requests_to_another() {
    for retry in [CallOptions::new(), CallOptions::without_retries()] {
        let limited = NumberedServer::new(json!({}));
        let free = NumberedServer::new(json!({}));
        let sampler = async |server: &NumberedServer| {
            let service = server.builder().options(retry).build().unwrap();
            service.create_sampling_client("base").await.unwrap()
        };
        let limited_sampler = sampler(&limited).await;
        let free_sampler = sampler(&free).await;
        limited.samples(vec![json!({"status": 429, "retry-after": "30"})]);
        let held = limited_sampler.sample([1], params());
        while limited_sampler.backoff_remaining().is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(free_sampler.backoff_remaining(), None);
        let start = Instant::now();
        free_sampler.sample([1], params()).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
        drop(held);
    }
}

/// Records the names of the spans that each event of the crate is in.
#[derive(Clone, Default)]
struct SpanNames(Arc<Mutex<Vec<EventSpans>>>);

/// Target of an event, and the names of its spans from the inside out.
type EventSpans = (String, Vec<&'static str>);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanNames {
    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        let names = context.event_scope(event).into_iter().flatten().map(|span| span.name());
        let target = event.metadata().target().to_owned();
        self.0.lock().unwrap().push((target, names.collect()));
    }
}

#[tokio::test(start_paused = true)]
async fn requests_run_in_the_span_of_the_caller() {
    let server = NumberedServer::new(json!({}));
    let names = SpanNames::default();
    let subscriber = tracing_subscriber::registry().with(names.clone());
    let _log = tracing::subscriber::set_default(subscriber);
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    names.0.lock().unwrap().clear();
    let work = async {
        sampler.sample([1], params()).await.unwrap();
        model.optim_step(AdamParams::default()).await.unwrap();
    };
    work.instrument(tracing::info_span!("training loop")).await;
    let events = names.0.lock().unwrap().clone();
    let http: Vec<_> =
        events.iter().filter(|(target, _)| target == tinkex::targets::HTTP).collect();
    assert!(http.len() >= 8, "two events for each of two submissions and two polls: {http:?}");
    for (_, spans) in http {
        assert_eq!(*spans, ["request", "training loop"]);
    }
}
