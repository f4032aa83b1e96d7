//! The server under test, and the check of one case.

use std::time::Duration;

use serde_json::{Value, json};

use super::mutation::FuzzRequest;
use crate::harness::{Http, TestServer};
use crate::raw::{Raw, RawResponse};

/// Number of polls, each held for up to 20 ms, after which a result must exist.
const MAX_POLLS: usize = 10_000;

/// Metrics that a rejected request must not change.
const METRICS: [&str; 6] =
    ["payload_bytes", "commits_total", "requests", "queued", "sessions", "requests_total"];

/// A server with the objects that the recordings refer to.
pub(super) struct FuzzServer {
    http: Http,
    raw: Raw,
    pub(super) session: String,
    _test_server: TestServer,
}

/// How the server responded to a case.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Verdict {
    Accepted,
    Rejected,
}

impl FuzzServer {
    pub(super) async fn new() -> Self {
        let test_server = TestServer::with(|options| {
            options.timeouts.poll_hold = Duration::from_millis(20);
            options.timeouts.sequence_gap = Duration::ZERO;
            // Prevent writes that no request causes.
            options.timeouts.snapshot_after = Duration::from_secs(3_600);
            options.timeouts.expiry_interval = Duration::from_secs(3_600);
            options.limits.body_bytes = 1 << 20;
            options.limits.queued_requests = 200;
        })
        .await;
        let http = test_server.http();
        let session = http.session().await;
        let model = http.model(&session).await;
        for (path, seq) in [("/save_weights", 1), ("/save_weights_for_sampler", 2)] {
            let save = json!({"model_id": model, "seq_id": seq, "path": "ckpt-1"});
            let (_, saved) = http.post(path, save).await;
            http.result(&saved).await;
        }
        http.sampler(&session).await;
        let raw = Raw::new(&test_server.server.base_url());
        Self { http, raw, session, _test_server: test_server }
    }

    /// Sends a request. Checks that the server accepts and finishes it, or rejects it with an
    /// explanation and without side effects. `case` identifies the case in the message of a panic.
    pub(super) async fn check(&mut self, request: &FuzzRequest, case: &str) -> Verdict {
        let FuzzRequest { method, path, headers, body } = request;
        let case = format!("{case}: {method} {path} {:?}", String::from_utf8_lossy(body));
        let before = self.visible_state().await;
        let response = self.raw.call(method, path, headers, body).await;
        let RawResponse { status, body } =
            response.unwrap_or_else(|| panic!("no response: {case}"));
        match status {
            200..300 => {
                self.wait_for_result(&body).await;
                Verdict::Accepted
            }
            400..500 => {
                let error: Value = serde_json::from_slice(&body).unwrap_or_default();
                let explained = error["detail"].as_str().is_some_and(|text| !text.is_empty());
                assert!(explained, "a rejection without a detail ({status}): {case}");
                let after = self.visible_state().await;
                assert_eq!(after, before, "{status} changed something: {case}");
                Verdict::Rejected
            }
            _ => panic!("{status}: {case}\n{}", String::from_utf8_lossy(&body)),
        }
    }

    /// Returns the state that a rejected request must not change.
    async fn visible_state(&self) -> String {
        let mut state = String::new();
        for path in ["/sessions?limit=1000", "/training_runs?limit=1000", "/checkpoints?limit=1000"]
        {
            let (status, response) = self.http.get(&format!("/api/v1{path}")).await;
            assert_eq!(status, 200, "{path}: {response}");
            state.push_str(&response.to_string());
        }
        let (_, session) = self.http.get(&format!("/api/v1/sessions/{}", self.session)).await;
        state.push_str(&session.to_string());
        let metrics = self.http.metrics().await;
        for name in METRICS {
            state.push_str(&format!("\n{name} {}", metrics[name]));
        }
        state
    }

    /// Waits until the request with this response has a result.
    async fn wait_for_result(&self, response: &[u8]) {
        let Ok(future) = serde_json::from_slice::<Value>(response) else { return };
        if !future["request_id"].is_string() {
            return;
        }
        for _ in 0..MAX_POLLS {
            let poll = json!({"request_id": future["request_id"]});
            let (status, result) = self.http.post("/retrieve_future", poll).await;
            if status != 200 || result["type"] != "try_again" {
                return;
            }
        }
        panic!("no result for {future}");
    }

    /// Returns whether the server still responds.
    pub(super) async fn is_healthy(&self) -> bool {
        self.http.get("/api/v1/healthz").await.0 == 200
    }
}
