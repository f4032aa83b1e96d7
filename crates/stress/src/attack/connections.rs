//! Attacks on connections: slow bodies, many connections, guessed keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::{AttackCounts, Target};
use crate::api::Api;
use crate::http::HttpClient;

/// Routes whose bodies the attack sends slowly.
const BODIES: [(&str, &str); 8] = [
    ("POST", "/ui/api/login"),
    ("POST", "/ui/api/download"),
    ("POST", "/api/v1/create_session"),
    ("POST", "/api/v1/asample"),
    ("POST", "/api/v1/forward_backward"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("PUT", "/api/v1/imports/attack"),
];

/// Number of slow bodies for each route.
const SLOW_PER_ROUTE: usize = 150;

/// Number of connections that send one byte.
const CONNECTIONS: usize = 4_096;

/// Number of attempts to log in, and of clients that make them.
const LOGINS: u64 = 10_000;
const LOGIN_CLIENTS: usize = 16;

/// Number of keys that the server may compare at once, and then per second.
const GUESSES_AT_ONCE: u64 = 200;
const GUESSES_PER_SECOND: u64 = 20;

/// Does nothing: shows the durations without an attack.
pub(super) async fn none(target: Arc<Target>) -> AttackCounts {
    tokio::time::sleep(target.time_left()).await;
    AttackCounts::default()
}

/// Sends bodies of every kind one byte per second, with and without a key.
pub(super) async fn slow_bodies(target: Arc<Target>) -> AttackCounts {
    let mut clients = JoinSet::new();
    for (method, path) in BODIES {
        for n in 0..SLOW_PER_ROUTE {
            let target = Arc::clone(&target);
            clients.spawn(async move {
                let key = (n % 2 == 0).then_some(target.key.as_str());
                let http = HttpClient::new(&target.address, key);
                let origin = format!("http://{}", target.address);
                let head = http.head(method, path, &[("origin", &origin)], 100_000);
                send_slowly(&target, &http, head.as_bytes()).await
            });
        }
    }
    sum(clients).await
}

/// Opens connections and sends a single byte over each of them.
pub(super) async fn many_connections(target: Arc<Target>) -> AttackCounts {
    let mut clients = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let target = Arc::clone(&target);
        clients.spawn(async move {
            let http = HttpClient::new(&target.address, None);
            send_slowly(&target, &http, b"G").await
        });
    }
    sum(clients).await
}

/// Sends `start` over a connection, and then a byte per second as long as the server reads. Opens a
/// new connection when the server closes it.
async fn send_slowly(target: &Target, http: &HttpClient, start: &[u8]) -> AttackCounts {
    let mut counts = AttackCounts::default();
    while !target.has_ended() {
        let Ok(mut stream) = http.connect().await else {
            counts.count(None);
            tokio::time::sleep(Duration::from_millis(500)).await;
            continue;
        };
        counts.requests += 1;
        let mut bytes = start;
        while !target.has_ended() && stream.write_all(bytes).await.is_ok() {
            bytes = b" ";
            let pause = Duration::from_secs(1).min(target.time_left());
            let mut response = [0; 512];
            // A response, or the end of the connection, ends the request.
            if tokio::time::timeout(pause, stream.read(&mut response)).await.is_ok() {
                counts.refused += 1;
                break;
            }
        }
        // Do not open connections faster than a network would allow.
        tokio::time::sleep(Duration::from_millis(200).min(target.time_left())).await;
    }
    counts
}

/// Tries wrong keys on the login of the dashboard.
pub(super) async fn logins(target: Arc<Target>) -> AttackCounts {
    let next = Arc::new(AtomicU64::new(0));
    let compared = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..LOGIN_CLIENTS {
        let target = Arc::clone(&target);
        let next = Arc::clone(&next);
        let compared = Arc::clone(&compared);
        clients.spawn(async move {
            let mut counts = AttackCounts::default();
            let api = Api::new(&target.address, None);
            let origin = format!("http://{}", target.address);
            while !target.has_ended() {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= LOGINS {
                    break;
                }
                let body = json!({"key": format!("tml-guess-{n}")}).to_string();
                let headers = [("origin", &*origin), ("content-type", "application/json")];
                let timeout = target.time_left() + Duration::from_secs(1);
                let path = "/ui/api/login";
                let sent = api.http.call("POST", path, &headers, body.as_bytes(), timeout).await;
                let status = sent.ok().map(|response| response.status);
                match status {
                    Some(429 | 503) | None => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    Some(200..300) => counts.violations.push("a wrong key was accepted".to_owned()),
                    Some(_) => {
                        compared.fetch_add(1, Ordering::Relaxed);
                    }
                }
                counts.count(status);
            }
            counts
        });
    }
    let mut counts = sum(clients).await;
    let compared = compared.load(Ordering::Relaxed);
    let seconds = start.elapsed().as_secs().max(1);
    if compared > GUESSES_AT_ONCE + GUESSES_PER_SECOND * (seconds + 1) {
        let rate = compared / seconds;
        counts.violations.push(format!("the server compared {rate} guessed keys per second"));
    }
    counts
}

/// Waits for all clients and adds their counts.
pub(super) async fn sum(mut clients: JoinSet<AttackCounts>) -> AttackCounts {
    let mut counts = AttackCounts::default();
    while let Some(ended) = clients.join_next().await {
        match ended {
            Ok(other) => counts.add(other),
            Err(error) => counts.violations.push(format!("an attacker panicked: {error}")),
        }
    }
    counts
}
