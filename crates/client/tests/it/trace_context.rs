//! W3C trace context on requests (feature `opentelemetry`).

use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_sdk::trace::SdkTracerProvider;
use serde_json::{Value, json};
use tinkex::rest::{AuditLogRequest, ListSessions};
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{SampleStreamOptions, SamplingParams};
use tracing::Instrument as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

use crate::scripted_server::ScriptedServer;

/// Installs a tracer for this thread. Spans from `level` up are traced.
fn trace(level: LevelFilter) -> (SdkTracerProvider, tracing::subscriber::DefaultGuard) {
    let provider = SdkTracerProvider::builder().build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(level));
    (provider, tracing::subscriber::set_default(subscriber))
}

const LIST: &str = "GET /api/v1/sessions";

#[tokio::test(start_paused = true)]
async fn requests_carry_the_trace_context_of_the_callers_span() {
    let fake = ScriptedServer::started().respond(LIST, 200, json!({"sessions": []})).respond(
        LIST,
        200,
        json!({"sessions": []}),
    );
    let client = fake.client();
    let list = || async { client.rest().list_sessions(&ListSessions::default()).await.unwrap() };
    let (_provider, _guard) = trace(LevelFilter::INFO);
    let span = tracing::info_span!("step");
    list().instrument(span.clone()).await;
    let context = span.context();
    let traced = context.span().span_context().clone();
    assert!(traced.is_valid());
    let expected = format!("00-{}-{}-01", traced.trace_id(), traced.span_id());
    assert_eq!(fake.last().header("traceparent"), Some(&*expected));
    list().await;
    assert_eq!(fake.last().header("traceparent"), None, "outside a span");
    fake.finish();
}

/// With debug spans enabled, the parent is the client's own span of the request.
#[tokio::test(start_paused = true)]
async fn the_span_of_a_request_is_part_of_the_callers_trace() {
    let fake = ScriptedServer::started().respond(LIST, 200, json!({"sessions": []}));
    let client = fake.client();
    let (_provider, _guard) = trace(LevelFilter::DEBUG);
    let span = tracing::info_span!("step");
    let request = async { client.rest().list_sessions(&ListSessions::default()).await.unwrap() };
    request.instrument(span.clone()).await;
    let context = span.context();
    let traced = context.span().span_context().clone();
    let parent = fake.last().header("traceparent").unwrap().to_owned();
    let parts: Vec<&str> = parent.split('-').collect();
    assert_eq!(parts[1], traced.trace_id().to_string());
    assert_ne!(parts[2], traced.span_id().to_string());
    fake.finish();
}

/// In a web server, the connection polls the stream, outside of the span of the handler.
#[tokio::test(start_paused = true)]
async fn a_stream_belongs_to_the_span_in_which_it_was_created() {
    for (replies, route) in
        [(Reply::ok(), Route::Completions), (Reply::status(404).always(), Route::Sample)]
    {
        let server = FakeServer::new().on(Route::Completions, replies);
        let service = server.builder().build().unwrap();
        let sampler = service.create_sampling_client("base").await.unwrap();
        let (_provider, _guard) = trace(LevelFilter::INFO);
        let span = tracing::info_span!("handler");
        let options = SampleStreamOptions::new(SamplingParams::new().max_tokens(4)).without_text();
        let mut stream = span.in_scope(|| sampler.sample_stream([1], options));
        let mut tokens = 0;
        while let Some(token) = stream.next().await {
            token.unwrap();
            tokens += 1;
        }
        assert_eq!(tokens, 4);
        let context = span.context();
        let traced = context.span().span_context().clone();
        let expected = format!("00-{}-{}-01", traced.trace_id(), traced.span_id());
        let calls = server.calls_to(route);
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0].header("traceparent"), Some(&*expected), "{route}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_trace_context_does_not_follow_a_redirect_to_another_server() {
    let to_other_server = [("location", "https://storage.test/f")];
    let fake = ScriptedServer::started()
        .respond_with("GET /api/v1/audit", 307, &to_other_server, Value::Null)
        .respond("GET /f", 200, json!({"entries": []}));
    let client = fake.client();
    let (_provider, _guard) = trace(LevelFilter::INFO);
    let request =
        async { client.admin().get_audit_log(&AuditLogRequest::default()).await.unwrap() };
    request.instrument(tracing::info_span!("audit")).await;
    let received = fake.received();
    assert!(received[received.len() - 2].header("traceparent").is_some());
    assert_eq!(fake.last().header("traceparent"), None);
    fake.finish();
}
