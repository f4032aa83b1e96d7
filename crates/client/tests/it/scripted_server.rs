//! [`ScriptedServer`]: a [`FakeServer`] that expects a fixed sequence of requests. Any other request
//! fails the test.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::{Value, json};
use tinkex::testing::{FakeServer, RecordedCall, Reply};
use tinkex::{HttpFailure, HttpService, Lane, ServiceClient, ServiceClientBuilder};

/// Server that expects a script of requests, in order. Clones share their state.
#[derive(Clone)]
pub(crate) struct ScriptedServer {
    server: FakeServer,
    /// Method and path of each expected request, with its reply.
    script: Arc<Mutex<VecDeque<(String, Reply)>>>,
}

impl ScriptedServer {
    pub(crate) fn new() -> Self {
        crate::event_log::keep_events();
        Self { server: FakeServer::new(), script: Arc::default() }
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
        let body = if body.is_null() { Bytes::new() } else { body.to_string().into() };
        let reply = Reply::status(status).text(body);
        let with_header = |reply: Reply, (name, value): &(&str, &str)| reply.header(name, value);
        self.then(request, headers.iter().fold(reply, with_header))
    }

    /// Expects a request and loses its connection.
    pub(crate) fn lose(self, request: &str) -> Self {
        self.then(request, Reply::connection_lost())
    }

    /// Expects a request and lets it time out.
    pub(crate) fn time_out(self, request: &str) -> Self {
        self.then(request, Reply::timeout())
    }

    fn then(self, request: &str, reply: Reply) -> Self {
        self.script.lock().unwrap().push_back((request.to_owned(), reply));
        self
    }

    /// Returns all received requests.
    pub(crate) fn received(&self) -> Vec<RecordedCall> {
        self.server.calls()
    }

    /// Returns the last received request.
    pub(crate) fn last(&self) -> RecordedCall {
        self.received().pop().expect("a request")
    }

    /// Asserts that the whole script was used.
    pub(crate) fn finish(&self) {
        let script = self.script.lock().unwrap();
        let left: Vec<_> = script.iter().map(|(request, _)| request).collect();
        assert!(left.is_empty(), "requests that were not received: {left:?}");
    }

    /// Creates a client of this server.
    pub(crate) fn client(&self) -> ServiceClient {
        self.builder().build().unwrap()
    }

    /// Returns a builder of a client of this server, without telemetry.
    pub(crate) fn builder(&self) -> ServiceClientBuilder {
        let builder = self.server.builder().base_url("http://server.test");
        builder.api_key("tml-test-key-0123456789").http(self.clone())
    }
}

impl HttpService for ScriptedServer {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let received = format!("{} {}", request.method(), request.uri().path());
        let expected = self.script.lock().unwrap().pop_front();
        let (expected, reply) = expected.unwrap_or_else(|| panic!("{received} was not expected"));
        assert_eq!(received, expected, "unexpected request");
        self.server.queue_path(&expected, reply);
        self.server.send(lane, request, timeout)
    }
}
