//! [`Proxy`]: a server between a gateway and its upstream that changes some responses.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::harness::http_client;

/// Requests that a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Submissions to an endpoint, such as `optim_step`.
    Submission(&'static str),
    /// Polls for the results of the requests that were submitted to an endpoint.
    Result(&'static str),
}

/// What happens to a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    /// The upstream does not get the request, and the response has this status and body.
    Refuse(u16, &'static str),
    /// The upstream executes the request, and its response is replaced by status 200 with this body.
    /// A response that the result is not ready is not replaced.
    Replace(&'static str),
}

struct Rule {
    target: Target,
    /// Number of requests before the first that is changed.
    skip: usize,
    /// Number of requests that are changed.
    times: usize,
    change: Change,
}

#[derive(Default)]
struct State {
    upstream: String,
    rules: Mutex<Vec<Rule>>,
    /// Endpoints to which requests were submitted, by request id.
    endpoints: Mutex<HashMap<String, String>>,
    /// Number of accepted submissions by endpoint.
    accepted: Mutex<HashMap<String, usize>>,
}

/// Server between a gateway and its upstream.
pub(super) struct Proxy {
    pub(super) url: String,
    state: Arc<State>,
    /// Dropping it ends the listener and all connections.
    _tasks: JoinSet<()>,
}

impl Proxy {
    pub(super) async fn new(upstream: &str) -> Self {
        let state = Arc::new(State { upstream: upstream.to_owned(), ..State::default() });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let owner = Arc::clone(&state);
        let client = http_client();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let state = Arc::clone(&owner);
                let client = client.clone();
                let service = hyper::service::service_fn(move |request| {
                    let state = Arc::clone(&state);
                    let client = client.clone();
                    async move { Ok::<_, Infallible>(state.relay(&client, request).await) }
                });
                let io = hyper_util::rt::TokioIo::new(stream);
                let connection = hyper::server::conn::http1::Builder::new();
                connections.spawn(connection.serve_connection(io, service));
            }
        });
        Self { url, state, _tasks: tasks }
    }

    /// Changes `times` requests after the next `skip` ones.
    pub(super) fn change(&self, target: Target, skip: usize, times: usize, change: Change) {
        self.state.rules.lock().unwrap().push(Rule { target, skip, times, change });
    }

    /// Returns the number of requests to an endpoint that the upstream has accepted.
    pub(super) fn accepted(&self, endpoint: &str) -> usize {
        self.state.accepted.lock().unwrap().get(endpoint).copied().unwrap_or(0)
    }
}

impl State {
    /// Returns the change of a request, and the index of its rule, if a rule applies to it.
    fn take_change(&self, endpoint: &str, body: &[u8]) -> Option<(usize, Change)> {
        let submitted_to = match endpoint {
            "retrieve_future" => {
                let poll: Value = serde_json::from_slice(body).ok()?;
                self.endpoints.lock().unwrap().get(poll["request_id"].as_str()?).cloned()
            }
            _ => None,
        };
        let mut rules = self.rules.lock().unwrap();
        let (index, rule) = rules.iter_mut().enumerate().find(|(_, rule)| {
            rule.times > 0
                && match rule.target {
                    Target::Submission(target) => target == endpoint,
                    Target::Result(target) => submitted_to.as_deref() == Some(target),
                }
        })?;
        if rule.skip > 0 {
            rule.skip -= 1;
            return None;
        }
        rule.times -= 1;
        Some((index, rule.change))
    }

    async fn relay(
        &self,
        client: &reqwest::Client,
        request: Request<hyper::body::Incoming>,
    ) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let path = head.uri.path_and_query().unwrap().to_string();
        let endpoint = head.uri.path().trim_start_matches("/api/v1/").to_owned();
        let change = self.take_change(&endpoint, &body);
        let reply = |status: u16, text: &'static str| {
            Response::builder().status(status).body(Full::from(text)).unwrap()
        };
        if let Some((_, Change::Refuse(status, text))) = change {
            return reply(status, text);
        }
        let mut relayed =
            client.request(head.method, format!("{}{path}", self.upstream)).body(body);
        for (name, value) in &head.headers {
            if !["host", "content-length", "connection"].contains(&name.as_str()) {
                relayed = relayed.header(name, value);
            }
        }
        let Ok(response) = relayed.send().await else { return reply(502, "no upstream") };
        let status = response.status();
        let headers = response.headers().clone();
        let Ok(body) = response.bytes().await else { return reply(502, "no upstream") };
        if status == 200 {
            self.record(&endpoint, &body);
        }
        let is_pending = body.windows(9).any(|part| part == b"try_again");
        match change {
            // Replace the next response instead.
            Some((rule, _)) if is_pending => self.rules.lock().unwrap()[rule].times += 1,
            Some((_, Change::Replace(text))) => return reply(200, text),
            _ => {}
        }
        let mut response = Response::builder().status(status);
        for (name, value) in &headers {
            if !["content-length", "transfer-encoding", "connection"].contains(&name.as_str()) {
                response = response.header(name, value);
            }
        }
        response.body(Full::from(body)).unwrap()
    }

    /// Remembers the id of an accepted request.
    fn record(&self, endpoint: &str, body: &[u8]) {
        let accepted: Option<Value> = serde_json::from_slice(body).ok();
        if let Some(id) = accepted.as_ref().and_then(|accepted| accepted["request_id"].as_str()) {
            self.endpoints.lock().unwrap().insert(id.to_owned(), endpoint.to_owned());
            *self.accepted.lock().unwrap().entry(endpoint.to_owned()).or_default() += 1;
        }
    }
}
