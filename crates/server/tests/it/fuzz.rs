//! Fuzzes every route with mutated recordings. Each request must be accepted or rejected, and a
//! rejection must change nothing. The test suite has a short run; `cargo xtask fuzz server` has a
//! longer one.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine as _;
use fastrand::Rng;
use serde_json::{Value, json};
use tinkex_wire::{Datum, ForwardBackward, LossFn, Route, Seq};

use crate::harness::{Http, MODEL, TestServer, create_model, setting};
use crate::raw::Raw;

/// Session id in the recordings.
const RECORDED: &str = "11111111-2222-4333-8444-555555555555";
/// Number of cases per server.
const CASES_PER_SERVER: usize = 250;

/// A recorded request.
#[derive(Clone)]
struct Request {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Body,
}

#[derive(Clone)]
enum Body {
    None,
    Json(Value),
    Bytes(Vec<u8>),
}

fn recordings() -> Vec<Request> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wire");
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(".request.json"))
        .collect();
    names.sort();
    let mut all = Vec::new();
    for name in names {
        let file: Value = serde_json::from_slice(&std::fs::read(name).unwrap()).unwrap();
        let relevant = ["content-type", "content-encoding", "accept"];
        let headers = file["headers"].as_object().into_iter().flatten();
        let headers = headers
            .filter(|(name, _)| relevant.contains(&name.as_str()))
            .map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
            .collect();
        let body = match (&file["body"], file["body_base64"].as_str()) {
            (_, Some(text)) => {
                Body::Bytes(base64::engine::general_purpose::STANDARD.decode(text).unwrap())
            }
            (Value::Null, None) => Body::None,
            (value, None) => Body::Json(value.clone()),
        };
        let text = |key: &str| file[key].as_str().unwrap().to_owned();
        all.push(Request { method: text("method"), path: text("path"), headers, body });
    }
    all
}

/// A server with the objects that the recordings refer to.
struct FuzzServer {
    http: Http,
    raw: Raw,
    session: String,
    _test_server: TestServer,
}

impl FuzzServer {
    async fn new() -> Self {
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
        let (_, created) = http.post("/create_model", create_model(&session, 0)).await;
        http.result(&created).await;
        let model = format!("{session}:train:0");
        for (kind, path) in [("weights", "/save_weights"), ("sampler", "/save_weights_for_sampler")]
        {
            let seq = if kind == "weights" { 1 } else { 2 };
            let save = json!({"model_id": model, "seq_id": seq, "path": "ckpt-1"});
            let (_, saved) = http.post(path, save).await;
            http.result(&saved).await;
        }
        http.sampler(&session).await;
        let raw = Raw::new(&test_server.server.base_url());
        Self { http, raw, session, _test_server: test_server }
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
        for name in
            ["payload_bytes", "commits_total", "answers", "queued", "sessions", "jobs_total"]
        {
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
}

/// Number of polls, each held for up to 20 ms, after which a result must exist.
const MAX_POLLS: usize = 10_000;

/// Returns a value that often reveals bugs.
fn hostile_value(rng: &mut Rng) -> Value {
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let all = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e308),
        json!(0.5),
        json!(""),
        json!("x"),
        json!("../../etc/passwd"),
        json!("a/b"),
        json!("tinker://x"),
        json!("tinker://a:train:0/weights/.."),
        json!("\u{0}"),
        json!("é".repeat(300)),
        json!("x".repeat(5_000)),
        json!([]),
        json!({}),
        json!([null]),
        json!({"": {}}),
        deep,
        json!(vec![0; 3_000]),
        json!("NaN"),
        json!("2024-13-99T00:00:00Z"),
        json!(4_294_967_296_u64),
    ];
    all[rng.usize(..all.len())].clone()
}

/// Replaces, removes or inserts one part of a value.
fn mutate(value: &mut Value, rng: &mut Rng) {
    let deeper = rng.u8(..4) > 0;
    match value {
        Value::Object(fields) if deeper && !fields.is_empty() => {
            let key = fields.keys().nth(rng.usize(..fields.len())).unwrap().clone();
            match rng.u8(..8) {
                0 => drop(fields.remove(&key)),
                1 => drop(fields.insert(format!("{key}2"), json!(1))),
                _ => mutate(fields.get_mut(&key).unwrap(), rng),
            }
        }
        Value::Array(items) if deeper && !items.is_empty() => {
            let at = rng.usize(..items.len());
            match rng.u8(..6) {
                0 => drop(items.remove(at)),
                1 => items.insert(at, hostile_value(rng)),
                _ => mutate(&mut items[at], rng),
            }
        }
        Value::Number(number) if rng.bool() => {
            let nearby = number.as_i64().unwrap_or(0).wrapping_add(rng.i64(-3..4));
            *value = json!(nearby);
        }
        _ => *value = hostile_value(rng),
    }
}

fn mutate_bytes(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..rng.usize(1..6) {
        let at = rng.usize(..bytes.len().max(1));
        match rng.u8(..5) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at.min(bytes.len()), rng.u8(..)),
            2 if at < bytes.len() => bytes[at] ^= 1 << rng.u8(..8),
            3 if at < bytes.len() => bytes[at] = rng.u8(..),
            _ => {
                let piece: Vec<u8> = bytes.iter().skip(at).take(rng.usize(..64)).copied().collect();
                bytes.extend(piece);
            }
        }
    }
}

fn mutate_path(path: &str, rng: &mut Rng) -> String {
    let segments =
        ["..", "%2e%2e", "%00", "%ff", "", "a%2Fb", "%2e%2e%2f%2e%2e%2flock", "-1", "é", "%zz"];
    let segment = segments[rng.usize(..segments.len())].to_owned();
    let long = "y".repeat(3_000);
    let segment = if rng.u8(..10) == 0 { long } else { segment };
    let separators: Vec<usize> = path.match_indices(['/', '?', '&', '=']).map(|(i, _)| i).collect();
    let from = separators[rng.usize(..separators.len())] + 1;
    let to = separators.iter().copied().find(|at| *at >= from).unwrap_or(path.len());
    format!("{}{segment}{}", &path[..from], &path[to..])
}

/// Returns a training pass that the model can execute; the recorded ones need another model.
fn pass(session: &str, rng: &mut Rng) -> Vec<u8> {
    let data = vec![Datum::completion([3, 4], [5, 6]).unwrap(); rng.usize(1..3)];
    let request = ForwardBackward::new(format!("{session}:train:0"), data, LossFn::CrossEntropy)
        .seq_id(Seq::new(rng.u64(1..200)));
    request.to_proto().unwrap().to_vec()
}

/// Returns a recorded request for the server's objects, mutated at random, and its encoded body.
fn prepare(request: &Request, session: &str, rng: &mut Rng) -> (Request, Vec<u8>) {
    let with_session = |text: &str| text.replace(RECORDED, session);
    let mut request = Request { path: with_session(&request.path), ..request.clone() };
    let mut body = match &mut request.body {
        Body::None => Vec::new(),
        Body::Json(value) => {
            let mut value: Value = serde_json::from_str(&with_session(&value.to_string())).unwrap();
            if value.get("base_model").is_some() {
                value["base_model"] = json!(MODEL);
            }
            for _ in 0..rng.usize(..3) {
                mutate(&mut value, rng);
            }
            value.to_string().into_bytes()
        }
        Body::Bytes(_) if rng.u8(..4) > 0 => {
            request.headers.retain(|(name, _)| name != "content-encoding");
            pass(session, rng)
        }
        Body::Bytes(bytes) => bytes.clone(),
    };
    if !body.is_empty() && rng.u8(..3) == 0 {
        mutate_bytes(&mut body, rng);
    }
    if rng.u8(..4) == 0 {
        request.path = mutate_path(&request.path, rng);
    }
    if rng.u8(..20) == 0 {
        let encoding = ["zstd", "br", "identity", "zstd, zstd"][rng.usize(..4)];
        request.headers.push(("content-encoding".to_owned(), encoding.to_owned()));
    }
    if rng.u8(..30) == 0 {
        request.method = ["GET", "POST", "PUT", "DELETE", "PATCH"][rng.usize(..5)].to_owned();
    }
    (request, body)
}

/// Number of cases of one route by result.
#[derive(Default)]
struct Count {
    accepted: usize,
    rejected: usize,
}

/// Runs cases while `more` returns true for the number of cases so far.
async fn fuzz(seed: u64, more: impl Fn(usize) -> bool) {
    let recordings = recordings();
    let mut counts: BTreeMap<String, Count> = BTreeMap::new();
    let mut rng = Rng::with_seed(seed);
    let mut server = FuzzServer::new().await;
    let mut n = 0;
    while more(n) {
        if n % CASES_PER_SERVER == CASES_PER_SERVER - 1 {
            server = FuzzServer::new().await;
        }
        let recorded = &recordings[n % recordings.len()];
        let (request, body) = prepare(recorded, &server.session, &mut rng);
        let Request { method, path, headers, .. } = &request;
        let about = || {
            format!("seed {seed}, case {n}: {method} {path} {:?}", String::from_utf8_lossy(&body))
        };
        let before = server.visible_state().await;
        let response = server.raw.call(method, path, headers, &body).await;
        let response = response.unwrap_or_else(|| panic!("no response: {}", about()));
        let route = Route::find(&recorded.method, recorded.path.split('?').next().unwrap());
        let count = counts.entry(route.unwrap().route.to_string()).or_default();
        match response.status {
            200..300 => {
                count.accepted += 1;
                server.wait_for_result(&response.body).await;
            }
            400..500 => {
                count.rejected += 1;
                let detail: Value = serde_json::from_slice(&response.body).unwrap_or_default();
                let has_detail = detail["detail"].as_str().is_some_and(|text| !text.is_empty());
                assert!(
                    has_detail,
                    "a rejection without a detail ({}): {}",
                    response.status,
                    about()
                );
                assert_eq!(
                    server.visible_state().await,
                    before,
                    "{} changed something: {}",
                    response.status,
                    about()
                );
            }
            status => panic!("{status}: {}\n{}", about(), String::from_utf8_lossy(&response.body)),
        }
        n += 1;
    }
    assert_eq!(server.http.get("/api/v1/healthz").await.0, 200);
    let (accepted, rejected) =
        counts.values().fold((0, 0), |(a, r), count| (a + count.accepted, r + count.rejected));
    eprintln!("{n} cases, {accepted} accepted, {rejected} rejected, {} routes", counts.len());
    let missing: Vec<String> = Route::ALL
        .iter()
        .map(ToString::to_string)
        .filter(|route| !counts.contains_key(route))
        .collect();
    assert!(missing.is_empty(), "routes without a case: {missing:?}");
    assert!(accepted > n / 10 && rejected > n / 10, "{accepted} accepted, {rejected} rejected");
}

#[tokio::test(flavor = "multi_thread")]
async fn mutated_requests_are_accepted_or_rejected_without_side_effects() {
    fuzz(1, |n| n < 600).await;
}

/// Fuzzes for `TINKEX_FUZZ_SECONDS` seconds; run by `cargo xtask fuzz server`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes TINKEX_FUZZ_SECONDS; cargo xtask fuzz server runs it"]
async fn a_long_run_finds_nothing() {
    let number = |name: &str| setting(name).map(|text| text.parse::<u64>().unwrap());
    let seconds = number("TINKEX_FUZZ_SECONDS").unwrap_or(60);
    let seed = number("TINKEX_FUZZ_SEED").unwrap_or_else(|| Rng::new().u64(..));
    eprintln!("seed {seed}");
    let until = Instant::now() + Duration::from_secs(seconds);
    fuzz(seed, |n| n < 500 || Instant::now() < until).await;
}
