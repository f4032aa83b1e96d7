//! [`ScriptedServer`]: responds to a fixed sequence of requests. Any other request fails the test.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use serde_json::{Value, json};
use tinkex::{Env, HttpFailure, HttpService, Lane, ServiceClient, ServiceClientBuilder};
use tokio::time::{Instant, sleep};

/// Server that expects a script of requests, in order. Clones share their state.
#[derive(Clone, Default)]
pub(crate) struct ScriptedServer(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Method and path of each expected request, with its outcome.
    script: VecDeque<(String, ScriptedOutcome)>,
    received: Vec<ReceivedRequest>,
}

enum ScriptedOutcome {
    Response(Response<Bytes>),
    ConnectionLost,
    Timeout,
}

/// Request that the server received.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) at: Instant,
    pub(crate) method: String,
    pub(crate) url: String,
    pub(crate) lane: Lane,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) timeout: Duration,
}

impl ReceivedRequest {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn json(&self) -> Value {
        if self.body.is_empty() { Value::Null } else { serde_json::from_slice(&self.body).unwrap() }
    }
}

impl ScriptedServer {
    pub(crate) fn new() -> Self {
        crate::event_log::keep_events();
        Self::default()
    }

    /// Creates a script that starts with the requests for the configuration, whose responses set
    /// nothing.
    pub(crate) fn started() -> Self {
        Self::new().respond("POST /api/v1/client/config", 200, json!({})).respond(
            "POST /api/v1/client/dynamic_config",
            200,
            json!({}),
        )
    }

    /// Expects a request and responds with a status and a JSON body.
    pub(crate) fn respond(self, request: &str, status: u16, body: Value) -> Self {
        self.respond_with(request, status, &[], body)
    }

    /// Expects a request and responds with a status, headers and a JSON body. A null body is empty.
    pub(crate) fn respond_with(
        self,
        request: &str,
        status: u16,
        headers: &[(&str, &str)],
        body: Value,
    ) -> Self {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let body = if body.is_null() { Bytes::new() } else { body.to_string().into() };
        self.then(request, ScriptedOutcome::Response(response.body(body).unwrap()))
    }

    /// Expects a request and loses its connection.
    pub(crate) fn lose(self, request: &str) -> Self {
        self.then(request, ScriptedOutcome::ConnectionLost)
    }

    /// Expects a request and lets it time out.
    pub(crate) fn time_out(self, request: &str) -> Self {
        self.then(request, ScriptedOutcome::Timeout)
    }

    fn then(self, request: &str, outcome: ScriptedOutcome) -> Self {
        self.0.lock().unwrap().script.push_back((request.to_owned(), outcome));
        self
    }

    /// Returns all received requests.
    pub(crate) fn received(&self) -> Vec<ReceivedRequest> {
        self.0.lock().unwrap().received.clone()
    }

    /// Returns the last received request.
    pub(crate) fn last(&self) -> ReceivedRequest {
        self.received().pop().expect("a request")
    }

    /// Asserts that the whole script was used.
    pub(crate) fn finish(&self) {
        let state = self.0.lock().unwrap();
        let left: Vec<_> = state.script.iter().map(|(request, _)| request).collect();
        assert!(left.is_empty(), "requests that were not received: {left:?}");
    }

    /// Creates a client of this server.
    pub(crate) fn client(&self) -> ServiceClient {
        self.builder().build().unwrap()
    }

    /// Returns a builder of a client of this server, without telemetry.
    pub(crate) fn builder(&self) -> ServiceClientBuilder {
        ServiceClient::builder()
            .without_telemetry()
            .env(Env::empty())
            .base_url("http://server.test")
            .api_key("tml-test-key-0123456789")
            .http(self.clone())
    }
}

impl HttpService for ScriptedServer {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let (parts, body) = request.into_parts();
        let received = format!("{} {}", parts.method, parts.uri.path());
        let mut state = self.0.lock().unwrap();
        state.received.push(ReceivedRequest {
            at: Instant::now(),
            method: parts.method.to_string(),
            url: parts.uri.to_string(),
            lane,
            headers: parts.headers,
            body,
            timeout,
        });
        let (expected, outcome) =
            state.script.pop_front().unwrap_or_else(|| panic!("{received} was not expected"));
        assert_eq!(received, expected, "unexpected request");
        drop(state);
        Box::pin(async move {
            match outcome {
                ScriptedOutcome::Response(response) => Ok(response),
                ScriptedOutcome::ConnectionLost => Err(HttpFailure::connect("scripted")),
                ScriptedOutcome::Timeout => {
                    sleep(timeout).await;
                    Err(HttpFailure::timeout("scripted"))
                }
            }
        })
    }
}
