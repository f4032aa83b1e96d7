//! Files of checkpoints, over lines that break and servers that change their mind.

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
    Env, ErrorKind, HttpFailure, HttpService, Lane, ResponseBody, RestClient, RetryPolicy,
    ServiceClient,
};

use crate::scripted_server::ScriptedServer;

const FILE: &str = "https://files.test/w?sig=hush";

/// A server of files whose connections break after so many bytes.
#[derive(Clone, Default)]
struct Files(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    content: Vec<u8>,
    tag: Option<&'static str>,
    knows_parts: bool,
    breaks_after: Vec<usize>,
    status: Option<u16>,
    /// What was asked for: the range, or everything.
    asked: Vec<String>,
}

impl Files {
    fn new(content: &[u8]) -> Self {
        let files = Self::default();
        files.set(|state| {
            state.content = content.to_vec();
            state.tag = Some("\"v1\"");
            state.knows_parts = true;
        });
        files
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.0.lock().unwrap());
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().asked)
    }

    fn answer(&self, request: &Request<Bytes>) -> Response<ResponseBody> {
        let mut state = self.0.lock().unwrap();
        assert!(!request.headers().contains_key("x-api-key"), "no credential leaves for a file");
        let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        state.asked.push(text("range").or(text("if-none-match")).unwrap_or("all").to_owned());
        if let Some(status) = state.status {
            let body = ResponseBody::from(Bytes::from_static(b"<Error>Expired</Error>"));
            return Response::builder().status(status).body(body).unwrap();
        }
        let reply = Response::builder();
        let reply = state.tag.into_iter().fold(reply, |reply, tag| reply.header("etag", tag));
        if state.tag.is_some() && text("if-none-match") == state.tag {
            return reply.status(304).body(ResponseBody::from(Bytes::new())).unwrap();
        }
        let same = text("if-range") == state.tag;
        let from = text("range").filter(|_| state.knows_parts && same).map_or(0, |range| {
            range.trim_start_matches("bytes=").trim_end_matches('-').parse::<usize>().unwrap()
        });
        let total = state.content.len();
        let rest = state.content[from..].to_vec();
        let reply = reply.header("content-length", rest.len());
        let reply = match from {
            0 => reply.status(200),
            from => reply
                .status(206)
                .header("content-range", format!("bytes {from}-{}/{total}", total - 1)),
        };
        let breaks = (!state.breaks_after.is_empty()).then(|| state.breaks_after.remove(0));
        let comes = breaks.map_or(rest.len(), |most| most.min(rest.len()));
        let pieces: Vec<_> =
            rest[..comes].chunks(7).map(|b| Ok(Bytes::copy_from_slice(b))).collect();
        let broken = breaks.map(|_| Err(HttpFailure::connect("it broke")));
        reply.body(ResponseBody::new(stream::iter(pieces.into_iter().chain(broken)))).unwrap()
    }

    fn rest(&self, retry: RetryPolicy) -> RestClient {
        let service = ServiceClient::builder().without_telemetry().env(Env::empty());
        let service = service.api_key("tml-test-key-0123456789").retry(retry).http(self.clone());
        service.build().unwrap().rest()
    }

    async fn fetch(&self, to: &Path) -> tinkex::Result<u64> {
        self.rest(RetryPolicy::default()).download_file(FILE, to, |_| {}).await
    }
}

impl HttpService for Files {
    fn send(
        &self,
        _: Lane,
        _: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        unreachable!("files come as streams")
    }

    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        assert_eq!(lane, Lane::File);
        let reply = self.answer(&request);
        Box::pin(async move { Ok(reply) })
    }
}

fn content() -> Vec<u8> {
    (0..100).collect()
}

fn left_in(folder: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test(start_paused = true)]
async fn a_file_goes_on_where_it_broke() {
    let (files, folder) = (Files::new(&content()), TempDir::new().unwrap());
    files.set(|state| state.breaks_after = vec![40, 0, 30]);
    let to = folder.path().join("trace");
    assert_eq!(files.fetch(&to).await.unwrap(), 100);
    assert_eq!(std::fs::read(&to).unwrap(), content());
    assert_eq!(files.asked(), ["all", "bytes=40-", "bytes=40-", "bytes=70-"]);
    assert_eq!(left_in(&folder), ["trace"]);
}

#[tokio::test(start_paused = true)]
async fn other_content_and_servers_without_parts_begin_again() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("trace");
    for (parts, tag) in [(false, Some("\"v1\"")), (true, None), (true, Some("W/\"weak\""))] {
        let files = Files::new(&content());
        files.set(|state| {
            (state.knows_parts, state.tag) = (parts, tag);
            state.breaks_after = vec![40];
        });
        assert_eq!(files.fetch(&to).await.unwrap(), 100);
        assert_eq!(std::fs::read(&to).unwrap(), content());
    }
    // Given up half-way, and changed meanwhile.
    let files = Files::new(&content());
    files.set(|state| state.breaks_after = vec![40, 0, 0, 0, 0, 0, 0]);
    let error = files.fetch(&to).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Connect, 6));
    assert_eq!(std::fs::read(&to).unwrap(), content(), "the old file stays until then");
    let other: Vec<u8> = (100..200).collect();
    files.set(|state| {
        (state.content, state.tag) = (other.clone(), Some("\"v2\""));
        state.breaks_after.clear();
    });
    files.fetch(&to).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), other);
    assert_eq!(left_in(&folder), ["trace"]);
}

/// A whole file of one checkpoint is not taken for the same file of another, of which a part came.
#[tokio::test(start_paused = true)]
async fn a_whole_file_does_not_get_the_tag_of_another() {
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("adapter");
    let path = || "tinker://run/external_weights/hf".parse().unwrap();
    let bring = async |reply: Option<(u16, &str)>| {
        let fake = ScriptedServer::started().reply(URLS, 200, urls(&["a", "b"]));
        let fake = match reply {
            Some((status, tag)) => fake
                .reply_with("GET /blob", status, &[("etag", tag)], json!("content"))
                .reply("GET /blob", 404, json!("gone")),
            None => fake.reply("GET /blob", 404, json!("gone")),
        };
        fake.client().rest().download(path()).parallel(1).to(&target).await.unwrap_err();
        fake
    };
    bring(Some((200, "\"x\""))).await;
    let whole = folder.path().join("adapter.part/files/a");
    assert!(whole.exists());
    // The server has other content by now, and breaks: what is here must not pass for it.
    let fake = ScriptedServer::started()
        .reply(URLS, 200, urls(&["a"]))
        .reply_with("GET /blob", 200, &[("etag", "\"y\"")], json!("not asked with a range"))
        .reply_with(
            "GET /blob",
            200,
            &[("etag", "\"y\""), ("content-length", "999")],
            json!("short"),
        );
    let once = fake.builder().retry(RetryPolicy::disabled()).build().unwrap();
    once.rest().download(path()).to(&target).await.unwrap_err();
    assert!(!whole.exists());
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_told_without_the_url_and_at_once() {
    let (files, folder) = (Files::new(&content()), TempDir::new().unwrap());
    files.set(|state| state.status = Some(403));
    let error = files.fetch(&folder.path().join("trace")).await.unwrap_err();
    assert_eq!(error.status(), Some(403));
    assert_eq!(files.asked().len(), 1);
    let shown = format!("{error} {error:?} {:?}", error.hint());
    assert!(shown.contains("trace") && shown.contains("expired"), "{shown}");
    assert!(!shown.contains("hush"), "{shown}");
    // What passes is asked for again, unless nothing is.
    files.set(|state| state.status = Some(503));
    assert!(files.fetch(&folder.path().join("trace")).await.is_err());
    assert_eq!(files.asked().len(), 6);
    let once = files.rest(RetryPolicy::disabled());
    assert!(once.download_file(FILE, &folder.path().join("t"), |_| {}).await.is_err());
    assert_eq!(files.asked().len(), 1);
}

fn urls(files: &[&str]) -> serde_json::Value {
    let urls = files.iter().map(|name| ((*name).to_owned(), json!("http://server.test/blob")));
    let urls: serde_json::Map<_, _> = urls.collect();
    json!({ "urls": urls, "expires": "2099-01-01T00:00:00Z" })
}

const URLS: &str =
    "GET /api/v1/training_runs/run/checkpoints/external_weights/hf/external_weights_urls";

#[tokio::test(start_paused = true)]
async fn a_folder_appears_whole_or_not_at_all() {
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("adapter");
    let path = || "tinker://run/external_weights/hf".parse().unwrap();
    let names = ["a.json", "deep/b.bin", "skip.txt"];

    let fake = ScriptedServer::started()
        .reply(URLS, 200, urls(&names))
        .reply("GET /blob", 200, json!("one"))
        .reply("GET /blob", 404, json!("gone"));
    let download = fake.client().rest().download(path()).exclude("*.txt").parallel(1);
    let error = download.to(&target).await.unwrap_err();
    assert_eq!(error.status(), Some(404));
    assert!(!target.exists());
    fake.finish();

    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&told);
    let fake = ScriptedServer::started()
        .reply(URLS, 200, urls(&names))
        .reply("GET /blob", 200, json!("one"))
        .reply("GET /blob", 200, json!("three"));
    let download = fake.client().rest().download(path()).exclude("*.txt").parallel(1);
    let download = download.on_progress(move |now| seen.lock().unwrap().push(*now));
    let done = download.to(&target).await.unwrap();
    assert_eq!((done.bytes, done.files.len()), (12, 2));
    assert_eq!(std::fs::read(target.join("deep/b.bin")).unwrap(), b"\"three\"");
    assert_eq!(left_in(&folder), ["adapter"]);
    let last = *told.lock().unwrap().last().unwrap();
    assert_eq!((last.files, last.files_total, last.bytes_total), (2, 2, Some(12)));
    fake.finish();

    // It is there now: nothing is asked before it may be replaced.
    let fake = ScriptedServer::new();
    let error = fake.client().rest().download(path()).to(&target).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let fake =
        ScriptedServer::started().reply(URLS, 200, urls(&["c"])).reply("GET /blob", 200, json!(1));
    fake.client().rest().download(path()).replace(true).to(&target).await.unwrap();
    assert!(target.join("c").exists() && !target.join("a.json").exists());
    assert_eq!(left_in(&folder), ["adapter"]);
}

#[tokio::test(start_paused = true)]
async fn names_that_leave_the_folder_write_nothing() {
    let folder = TempDir::new().unwrap();
    for (names, kind) in [
        (&["../evil"][..], ErrorKind::Decode),
        (&["/etc/passwd"], ErrorKind::Decode),
        (&[], ErrorKind::NotFound),
    ] {
        let fake = ScriptedServer::started().reply(URLS, 200, urls(names));
        let download =
            fake.client().rest().download("tinker://run/external_weights/hf".parse().unwrap());
        let error = download.to(folder.path().join("x")).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(!folder.path().join("x").exists());
        fake.finish();
    }
    let fake = ScriptedServer::new();
    let sampler = "tinker://run/sampler_weights/s".parse().unwrap();
    let error = fake.client().rest().download(sampler).to(folder.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}
