//! Attacks with large or hostile documents: prompts, metadata, compressed bodies, nested JSON.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::connections::sum;
use super::{AttackCounts, Target};
use crate::api::MODEL;

/// Number of clients that send documents at the same time.
const CLIENTS: usize = 8;

/// Size of the long prompts in bytes: over and below the maximum size of a body in 1 GiB of memory.
const PROMPTS: [usize; 3] = [40_000_000, 30_000_000, 4_000_000];

/// Maximum number of sessions, and the size of the metadata of each in bytes.
const SESSIONS: usize = 2_000;
const METADATA: usize = 1_000_000;

/// Size of a compressed body after decompression, in bytes.
const BOMB: usize = 2_000_000_000;

/// A request that an attack repeats.
struct Document {
    path: &'static str,
    encoding: Option<&'static str>,
    body: Vec<u8>,
}

/// Sends documents in turn from several clients, until the attack ends or each client has sent `max`
/// documents. With `must_fail`, a successful response is a violation.
async fn send_documents(
    target: &Arc<Target>,
    documents: Vec<Document>,
    max: usize,
    must_fail: bool,
) -> AttackCounts {
    let documents = Arc::new(documents);
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let target = Arc::clone(target);
        let documents = Arc::clone(&documents);
        clients.spawn(async move {
            let api = target.api();
            let mut counts = AttackCounts::default();
            for document in documents.iter().cycle().skip(client).take(max) {
                if target.has_ended() {
                    break;
                }
                let mut headers = vec![("content-type", "application/json")];
                headers.extend(document.encoding.map(|encoding| ("content-encoding", encoding)));
                let timeout = target.time_left() + Duration::from_secs(5);
                let path = document.path;
                let sent = api.http.call("POST", path, &headers, &document.body, timeout).await;
                let status = sent.ok().map(|response| response.status);
                if must_fail && status.is_some_and(|status| status < 300) {
                    counts.violations.push(format!("{path} was accepted"));
                }
                counts.count(status);
            }
            counts
        });
    }
    sum(clients).await
}

/// Sends prompts that are much longer than the context of the model.
pub(super) async fn long_prompts(target: Arc<Target>) -> AttackCounts {
    let mut documents = Vec::new();
    for size in PROMPTS {
        for text in ["a".repeat(size), "ab 1\n".repeat(size / 5), " ".repeat(size)] {
            let completion = json!({"model": MODEL, "prompt": text, "max_tokens": 1});
            let messages = json!([{"role": "user", "content": text}]);
            let chat = json!({"model": MODEL, "messages": messages, "max_tokens": 1});
            for (path, body) in [
                ("/v1/completions", &completion),
                ("/v1/chat/completions", &chat),
                ("/v1/messages", &chat),
            ] {
                let body = body.to_string().into_bytes();
                documents.push(Document { path, encoding: None, body });
            }
        }
    }
    send_documents(&target, documents, 100, true).await
}

/// Creates sessions with large metadata, then lists and searches them.
pub(super) async fn sessions(target: Arc<Target>) -> AttackCounts {
    let body = json!({
        "tags": [], "user_metadata": {"note": "x".repeat(METADATA)}, "sdk_version": "0.36.0",
        "type": "create_session",
    });
    let body = body.to_string().into_bytes();
    let create = Document { path: "/api/v1/create_session", encoding: None, body };
    let mut counts = send_documents(&target, vec![create], SESSIONS / CLIENTS, false).await;
    let api = target.api();
    let timeout = Duration::from_secs(30);
    for path in ["/api/v1/sessions", "/api/v1/sessions?limit=1000", "/metrics"] {
        let listed = api.http.call("GET", path, &[], b"", timeout).await;
        counts.count(listed.ok().map(|response| response.status));
    }
    let found = api.http.post("/api/v1/sessions/search", &json!({"query": "x"}), timeout).await;
    counts.count(found.ok().map(|response| response.status));
    counts
}

/// Sends small compressed bodies that are large after decompression.
pub(super) async fn bombs(target: Arc<Target>) -> AttackCounts {
    let (zstd, gzip) = tokio::task::block_in_place(|| (zstd_bomb(), gzip_bomb()));
    let mut documents = Vec::new();
    for path in [
        "/api/v1/asample",
        "/api/v1/forward_backward",
        "/api/v1/create_session",
        "/v1/completions",
        "/ui/api/login",
    ] {
        for (encoding, body) in [("zstd", &zstd), ("gzip", &gzip)] {
            documents.push(Document { path, encoding: Some(encoding), body: body.clone() });
        }
    }
    send_documents(&target, documents, 200, true).await
}

fn zstd_bomb() -> Vec<u8> {
    let zeros = std::io::Read::take(std::io::repeat(b' '), BOMB as u64);
    zstd::encode_all(zeros, 1).unwrap_or_default()
}

fn gzip_bomb() -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let zeros = vec![b' '; 1 << 20];
    for _ in 0..BOMB >> 20 {
        // A vector accepts all bytes.
        let _ = encoder.write_all(&zeros);
    }
    encoder.finish().unwrap_or_default()
}

/// Sends deeply nested JSON to every kind of reader.
pub(super) async fn deep_json(target: Arc<Target>) -> AttackCounts {
    let mut documents = Vec::new();
    for size in [900_000, 30_000_000] {
        let arrays = "[".repeat(size);
        let objects = "{\"a\":".repeat(size / 5);
        let field = format!("{{\"user_metadata\":{objects}");
        let balanced = "[".repeat(size / 2) + &"]".repeat(size / 2);
        let prompt = format!("{{\"model\":\"{MODEL}\",\"prompt\":{balanced}}}");
        for path in [
            "/api/v1/create_session",
            "/api/v1/asample",
            "/api/v1/forward_backward",
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/messages",
            "/ui/api/login",
        ] {
            for text in [&arrays, &field, &prompt] {
                let body = text.clone().into_bytes();
                documents.push(Document { path, encoding: None, body });
            }
        }
    }
    let mut counts = send_documents(&target, documents, 200, true).await;
    counts.add(wide_json(&target).await);
    counts
}

/// Sends JSON with very many members, whose representation in memory is much larger than its text.
async fn wide_json(target: &Arc<Target>) -> AttackCounts {
    let wide: Vec<Value> = vec![json!({"a": 0}); 100_000];
    let body = json!({"model": MODEL, "messages": wide, "tools": wide, "max_tokens": 1});
    let body = body.to_string().into_bytes();
    let paths = ["/v1/chat/completions", "/v1/messages"];
    let documents =
        paths.map(|path| Document { path, encoding: None, body: body.clone() }).into_iter();
    send_documents(target, documents.collect(), 20, true).await
}
