use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::Value;
use tinkex::{Env, HttpFailure, HttpService, Lane};
use tinkex_cli::{Input, Interrupt, Terminals, World};

/// The captures that are replayed, with the exit code that is ours. The others wait for their
/// commands.
const COVERED: [(&str, u8); 12] = [
    ("run-list", 0),
    ("run-list-all-pages", 0),
    ("run-list-columns", 0),
    ("run-list-empty", 0),
    ("run-list-more", 0),
    ("run-list-negative-limit", 0),
    ("run-list-one-more", 0),
    ("run-info", 0),
    ("error-400", 1),
    ("error-401", 3),
    ("error-403", 3),
    ("error-404", 4),
];

fn file(name: &str) -> Option<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/cli");
    std::fs::read_to_string(folder.join(name)).ok()
}

/// A value of a query, which may be written as a number.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[derive(Clone)]
struct Server {
    replies: Arc<Value>,
    seen: Arc<Mutex<Vec<String>>>,
}

impl HttpService for Server {
    fn send(
        &self,
        _: Lane,
        request: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let (path, query) = (request.uri().path(), request.uri().query().unwrap_or(""));
        let call = format!("{} {path}?{query}", request.method());
        let route = self.replies["replies"].as_array().unwrap().iter().find(|route| {
            let asked = |(key, value): (&String, &Value)| {
                query.split('&').any(|pair| pair == format!("{key}={}", text(value)))
            };
            route["path"] == path && route["query"].as_object().is_none_or(|q| q.iter().all(asked))
        });
        let (status, body) = match route {
            Some(route) => (route["status"].as_u64().unwrap(), route["body"].to_string()),
            None if path.contains("/client/") => (200, "{}".to_owned()),
            None => (404, "{}".to_owned()),
        };
        let mut seen = self.seen.lock().unwrap();
        if seen.last() != Some(&call) {
            seen.push(call);
        }
        let status = u16::try_from(status).unwrap();
        let reply = Response::builder().status(status).body(Bytes::from(body)).unwrap();
        Box::pin(async move { Ok(reply) })
    }
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Sink {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// Covers T7.1.2, T7.2.1.
#[tokio::test(start_paused = true)]
async fn captures_are_replayed() {
    let index: Value = serde_json::from_str(&file("index.json").unwrap()).unwrap();
    for (case, code) in COVERED {
        let replies = serde_json::from_str(&file(&format!("{case}.reply.json")).unwrap()).unwrap();
        let server = Server { replies: Arc::new(replies), seen: Arc::default() };
        let (out, err, http) = (Sink::default(), Sink::default(), server.clone());
        let mut world = World {
            env: Env::from_pairs([
                ("TINKER_API_KEY", "tml-test-0000"),
                ("TINKER_BASE_URL", "http://server.test"),
            ]),
            folder: std::env::temp_dir(),
            out: Box::new(out.clone()),
            err: Box::new(err.clone()),
            input: Input::new(std::io::empty()),
            terminals: Terminals::default(),
            interrupt: Interrupt::default(),
            prepare: Box::new(move |client| client.http(http.clone())),
        };
        let line = index[case]["argv"].as_array().unwrap().iter();
        let line = line.map(|word| word.as_str().unwrap().into()).collect();
        let exit = tinkex_cli::run(&mut world, line).await;
        assert_eq!(exit.code(), code, "{case}: {}", err.text());
        let expected = file(&format!("{case}.table.txt")).unwrap_or_default();
        let progress = |line: &&str| !line.starts_with("Fetching ");
        let expected: Vec<_> = expected.lines().filter(progress).collect();
        assert_eq!(out.text().lines().collect::<Vec<_>>(), expected, "{case}");
        let seen = server.seen.lock().unwrap();
        let calls = index[case]["modes"]["table"]["requests"].as_array().unwrap();
        assert_eq!(seen.len(), calls.len(), "{case}: {seen:?}");
        for (seen, call) in seen.iter().zip(calls) {
            let start =
                format!("{} {}?", call["method"].as_str().unwrap(), call["path"].as_str().unwrap());
            assert!(seen.starts_with(&start), "{case}: {seen}");
            for (key, value) in call["query"].as_object().into_iter().flatten() {
                assert!(
                    seen.contains(&format!("{key}={}", value.as_str().unwrap())),
                    "{case}: {seen}"
                );
            }
        }
        if code != 0 {
            assert!(err.text().starts_with("error: ") && err.text().contains("hint") | (code == 1));
        }
    }
}
