//! Downloads over connections that break, from servers whose content changes.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream;
use http::{Request, Response};
use serde_json::json;
use tempfile::TempDir;
use tinkex::{
    CallOptions, Env, ErrorKind, HttpFailure, HttpService, Lane, ResponseBody, RestClient,
    ServiceClient,
};

use crate::scripted_server::ScriptedServer;

const FILE: &str = "https://files.test/w?sig=secret";

/// A file server whose connections break after a given number of bytes.
#[derive(Clone, Default)]
struct FlakyFileServer(Arc<Mutex<FileServerState>>);

#[derive(Default)]
struct FileServerState {
    content: Vec<u8>,
    etag: Option<&'static str>,
    supports_ranges: bool,
    /// Bytes after which the next connections break.
    breaks_after: Vec<usize>,
    /// Status of every response, instead of the content.
    status: Option<u16>,
    /// The `range` or `if-none-match` header of each request, or `all`.
    requests: Vec<String>,
}

impl FlakyFileServer {
    fn new(content: &[u8]) -> Self {
        let server = Self::default();
        server.set(|state| {
            state.content = content.to_vec();
            state.etag = Some("\"v1\"");
            state.supports_ranges = true;
        });
        server
    }

    fn set(&self, change: impl FnOnce(&mut FileServerState)) {
        change(&mut self.0.lock().unwrap());
    }

    fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().requests)
    }

    fn respond(&self, request: &Request<Bytes>) -> Response<ResponseBody> {
        let mut state = self.0.lock().unwrap();
        assert!(!request.headers().contains_key("x-api-key"), "the API key was sent");
        let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        let requested = header("range").or(header("if-none-match")).unwrap_or("all");
        state.requests.push(requested.to_owned());
        if let Some(status) = state.status {
            let body = ResponseBody::from(Bytes::from_static(b"<Error>Expired</Error>"));
            return Response::builder().status(status).body(body).unwrap();
        }
        let response = Response::builder();
        let response =
            state.etag.into_iter().fold(response, |response, etag| response.header("etag", etag));
        if state.etag.is_some() && header("if-none-match") == state.etag {
            return response.status(304).body(ResponseBody::from(Bytes::new())).unwrap();
        }
        let is_current = header("if-range") == state.etag;
        let range = header("range").filter(|_| state.supports_ranges && is_current);
        let from = range.map_or(0, |range| {
            range.trim_start_matches("bytes=").trim_end_matches('-').parse::<usize>().unwrap()
        });
        let total = state.content.len();
        let rest = state.content[from..].to_vec();
        let response = response.header("content-length", rest.len());
        let response = match from {
            0 => response.status(200),
            from => response
                .status(206)
                .header("content-range", format!("bytes {from}-{}/{total}", total - 1)),
        };
        let breaks = (!state.breaks_after.is_empty()).then(|| state.breaks_after.remove(0));
        let sent = breaks.map_or(rest.len(), |length| length.min(rest.len()));
        let chunks: Vec<_> =
            rest[..sent].chunks(7).map(|b| Ok(Bytes::copy_from_slice(b))).collect();
        let broken = breaks.map(|_| Err(HttpFailure::connect("connection reset")));
        response.body(ResponseBody::new(stream::iter(chunks.into_iter().chain(broken)))).unwrap()
    }

    fn rest(&self, retry: CallOptions) -> RestClient {
        let service = ServiceClient::builder().without_telemetry().env(Env::empty());
        let service = service.api_key("tml-test-key-0123456789").options(retry).http(self.clone());
        service.build().unwrap().rest()
    }

    async fn download(&self, to: &Path) -> tinkex::Result<u64> {
        self.rest(CallOptions::new()).download_file(FILE, to).await
    }
}

impl HttpService for FlakyFileServer {
    fn send(
        &self,
        _: Lane,
        _: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        unreachable!("files are streamed")
    }

    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        assert_eq!(lane, Lane::File);
        let response = self.respond(&request);
        Box::pin(async move { Ok(response) })
    }
}

fn content() -> Vec<u8> {
    (0..100).collect()
}

fn names_in(folder: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test(start_paused = true)]
async fn a_broken_download_resumes_where_it_ended() {
    let server = FlakyFileServer::new(&content());
    let folder = TempDir::new().unwrap();
    server.set(|state| state.breaks_after = vec![40, 0, 30]);
    let to = folder.path().join("trace");
    assert_eq!(server.download(&to).await.unwrap(), 100);
    assert_eq!(std::fs::read(&to).unwrap(), content());
    assert_eq!(server.take_requests(), ["all", "bytes=40-", "bytes=40-", "bytes=70-"]);
    assert_eq!(names_in(&folder), ["trace"]);
}

#[tokio::test(start_paused = true)]
async fn changed_content_and_servers_without_ranges_restart_the_download() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("trace");
    for (ranges, etag) in [(false, Some("\"v1\"")), (true, None), (true, Some("W/\"weak\""))] {
        let server = FlakyFileServer::new(&content());
        server.set(|state| {
            state.supports_ranges = ranges;
            state.etag = etag;
            state.breaks_after = vec![40];
        });
        assert_eq!(server.download(&to).await.unwrap(), 100);
        assert_eq!(std::fs::read(&to).unwrap(), content());
    }
    // The retries run out, and the content changes before the next download.
    let server = FlakyFileServer::new(&content());
    server.set(|state| state.breaks_after = vec![40, 0, 0, 0, 0, 0, 0]);
    let error = server.download(&to).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Connect, 6));
    assert_eq!(
        std::fs::read(&to).unwrap(),
        content(),
        "the old file is kept until the new one is complete"
    );
    let other: Vec<u8> = (100..200).collect();
    server.set(|state| {
        state.content = other.clone();
        state.etag = Some("\"v2\"");
        state.breaks_after.clear();
    });
    server.download(&to).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), other);
    assert_eq!(names_in(&folder), ["trace"]);
}

/// A complete file of one checkpoint must not be taken for a file of another, of which only a part
/// was downloaded.
#[tokio::test(start_paused = true)]
async fn a_complete_file_is_not_paired_with_the_entity_tag_of_another() {
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("adapter");
    let path = "tinker://run/external_weights/hf";
    // The first of two files is downloaded; the second fails.
    let fake = ScriptedServer::started()
        .respond(URLS, 200, urls(&["a", "b"]))
        .respond_with("GET /blob", 200, &[("etag", "\"x\"")], json!("content"))
        .respond("GET /blob", 404, json!("gone"));
    fake.client().rest().download(path, &target).parallel(1).await.unwrap_err();
    fake.finish();
    let complete = folder.path().join("adapter.part/files/a");
    assert!(complete.exists());
    // The server has other content now and the connection breaks: the old file must be removed.
    let fake = ScriptedServer::started()
        .respond(URLS, 200, urls(&["a"]))
        .respond_with(
            "GET /blob",
            200,
            &[("etag", "\"y\"")],
            json!("response to the request with if-none-match"),
        )
        .respond_with(
            "GET /blob",
            200,
            &[("etag", "\"y\""), ("content-length", "999")],
            json!("short"),
        );
    let once = fake.builder().options(CallOptions::without_retries()).build().unwrap();
    once.rest().download(path, &target).await.unwrap_err();
    fake.finish();
    assert!(!complete.exists());
}

#[tokio::test(start_paused = true)]
async fn an_error_status_is_reported_without_the_url_and_without_retries() {
    let server = FlakyFileServer::new(&content());
    let folder = TempDir::new().unwrap();
    server.set(|state| state.status = Some(403));
    let error = server.download(&folder.path().join("trace")).await.unwrap_err();
    assert_eq!(error.status(), Some(403));
    assert_eq!(server.take_requests().len(), 1);
    let shown = format!("{error} {error:?} {:?}", error.hint());
    assert!(shown.contains("trace") && shown.contains("expired"), "{shown}");
    assert!(!shown.contains("secret"), "{shown}");
    // A temporary error is retried, unless retries are disabled.
    server.set(|state| state.status = Some(503));
    assert!(server.download(&folder.path().join("trace")).await.is_err());
    assert_eq!(server.take_requests().len(), 6);
    let once = server.rest(CallOptions::without_retries());
    assert!(once.download_file(FILE, folder.path().join("t")).await.is_err());
    assert_eq!(server.take_requests().len(), 1);
}

fn urls(files: &[&str]) -> serde_json::Value {
    let urls = files.iter().map(|name| ((*name).to_owned(), json!("http://server.test/blob")));
    let urls: serde_json::Map<_, _> = urls.collect();
    json!({ "urls": urls, "expires": "2099-01-01T00:00:00Z" })
}

const URLS: &str =
    "GET /api/v1/training_runs/run/checkpoints/external_weights/hf/external_weights_urls";

#[tokio::test(start_paused = true)]
async fn a_folder_appears_complete_or_not_at_all() {
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("adapter");
    let path = || "tinker://run/external_weights/hf";
    let names = ["a.json", "deep/b.bin", "skip.txt"];

    let fake = ScriptedServer::started()
        .respond(URLS, 200, urls(&names))
        .respond("GET /blob", 200, json!("one"))
        .respond("GET /blob", 404, json!("gone"));
    let download = fake.client().rest().download(path(), &target).exclude("*.txt").parallel(1);
    let error = download.await.unwrap_err();
    assert_eq!(error.status(), Some(404));
    assert!(!target.exists());
    fake.finish();

    let reported = Arc::new(Mutex::new(Vec::new()));
    let report = Arc::clone(&reported);
    let fake = ScriptedServer::started()
        .respond(URLS, 200, urls(&names))
        .respond("GET /blob", 200, json!("one"))
        .respond("GET /blob", 200, json!("three"));
    let download = fake.client().rest().download(path(), &target).exclude("*.txt").parallel(1);
    let download = download.on_progress(move |now| report.lock().unwrap().push(*now));
    let done = download.await.unwrap();
    assert_eq!((done.bytes, done.files.len()), (12, 2));
    assert_eq!(std::fs::read(target.join("deep/b.bin")).unwrap(), b"\"three\"");
    assert_eq!(names_in(&folder), ["adapter"]);
    let last = *reported.lock().unwrap().last().unwrap();
    assert_eq!((last.files, last.files_total, last.bytes_total), (2, 2, Some(12)));
    fake.finish();

    // The folder exists now: no request is sent unless it may be replaced.
    let fake = ScriptedServer::new();
    let error = fake.client().rest().download(path(), &target).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let fake = ScriptedServer::started().respond(URLS, 200, urls(&["c"])).respond(
        "GET /blob",
        200,
        json!(1),
    );
    fake.client().rest().download(path(), &target).replace(true).await.unwrap();
    assert!(target.join("c").exists() && !target.join("a.json").exists());
    assert_eq!(names_in(&folder), ["adapter"]);
}

#[tokio::test(start_paused = true)]
async fn unsafe_file_names_are_rejected_before_anything_is_written() {
    let folder = TempDir::new().unwrap();
    for (names, kind) in [
        (&["../evil"][..], ErrorKind::Decode),
        (&["/etc/passwd"], ErrorKind::Decode),
        (&[], ErrorKind::NotFound),
    ] {
        let fake = ScriptedServer::started().respond(URLS, 200, urls(names));
        let path = "tinker://run/external_weights/hf";
        let download = fake.client().rest().download(path, folder.path().join("x"));
        let error = download.await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(!folder.path().join("x").exists());
        fake.finish();
    }
}
