//! W3C trace context of requests (feature `opentelemetry`).
//!
//! A request carries the `traceparent` and `tracestate` headers of the current `tracing` span if
//! the program has installed a `tracing-opentelemetry` layer.

use ::http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, TraceContextExt as _};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Adds the trace context of the current span, if it has one, unless the caller set `traceparent`.
pub(crate) fn inject(headers: &mut HeaderMap) {
    if headers.contains_key(TRACEPARENT) {
        return;
    }
    // The current span is the client's own debug-level span. If the filter of the layer excludes
    // that span, for example a filter for `info`, the span has no trace context. OpenTelemetry's
    // current context then belongs to the enclosing span, so try both.
    let contexts = [tracing::Span::current().context(), opentelemetry::Context::current()];
    let span = contexts.iter().map(|context| context.span().span_context().clone());
    let Some(span) = span.into_iter().find(SpanContext::is_valid) else { return };
    let trace = span.trace_id();
    let id = span.span_id();
    let flags = span.trace_flags().to_u8();
    let parent = HeaderValue::from_str(&format!("00-{trace:032x}-{id:016x}-{flags:02x}"));
    if let Ok(parent) = parent {
        headers.insert(TRACEPARENT, parent);
    }
    let state = span.trace_state().header();
    if let Ok(state) = HeaderValue::from_str(&state)
        && !state.is_empty()
    {
        headers.insert(TRACESTATE, state);
    }
}
