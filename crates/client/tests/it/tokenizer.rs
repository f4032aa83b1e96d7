//! Tokenizers: encoding, decoding, and the download and cache of their files.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use serde_json::json;
use tempfile::TempDir;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{
    Env, ErrorKind, HttpFailure, HttpService, Hub, Lane, LoraOptions, Tokenizer, TokenizerId,
};

use crate::raw_server::RawServer;
use crate::tiny::{self, FIRST_SPECIAL, HE, HELL, LL};

const END: u32 = FIRST_SPECIAL;

fn tokenizer() -> Tokenizer {
    tiny::tokenizer(&["<end>"], json!({"eos_token": "<end>"}))
}

/// Covers T5.3.1, T5.3.2.
#[test]
fn encoding_and_decoding_are_inverse() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode("hello all<end>").unwrap();
    assert_eq!(
        tokens[..],
        [HELL, 111, 32, 97, LL, END],
        "the truncation to three tokens in the file is ignored"
    );
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "hello all<end>");
    assert_eq!(tokenizer.decode_text(&tokens).unwrap(), "hello all");
    assert_eq!(tokenizer.decode(&[HE, 99_999]).unwrap(), "he", "unknown ids are skipped");

    let input = tokenizer.input("hello all<end>").unwrap();
    assert_eq!(input.chunks.len(), 1);
    assert_eq!(input.token_count(), Some(tokens.len()));
}

#[test]
fn ids_tokens_and_bytes_can_be_looked_up() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.eos_id(), Some(END));
    assert_eq!((tokenizer.bos_id(), tokenizer.pad_id()), (None, None));
    assert_eq!(tokenizer.vocab_size(), 260);
    assert_eq!(tokenizer.token_id("hell"), Some(HELL));
    assert_eq!(tokenizer.token(32).as_deref(), Some("Ġ"));
    assert!(tokenizer.is_special(END) && !tokenizer.is_special(HE));
    let euro: Vec<u8> = tokenizer
        .encode_piece("€")
        .unwrap()
        .iter()
        .flat_map(|id| tokenizer.token_bytes(*id).unwrap())
        .collect();
    assert_eq!(euro, "€".as_bytes(), "three tokens, one per byte of the character");
    assert_eq!(tokenizer.token_bytes(END).unwrap(), b"<end>");
    assert_eq!(tokenizer.token_bytes(99_999), None);
}

/// Covers T5.1, T0.1.6.
#[test]
fn a_tokenizer_can_be_used_by_several_threads() {
    fn shared<T: Send + Sync + Clone + std::fmt::Debug + 'static>() {}
    shared::<Tokenizer>();
    shared::<Hub>();
    assert_eq!(size_of::<Tokenizer>(), size_of::<usize>());
    let tokenizer = tokenizer();
    let expected = tokenizer.encode("hello").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let tokenizer = tokenizer.clone();
            let expected = &expected;
            scope.spawn(move || {
                for _ in 0..100 {
                    assert_eq!(tokenizer.encode("hello").unwrap(), *expected);
                }
            });
        }
    });
}

#[test]
fn the_error_of_a_folder_without_a_tokenizer_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    let error = Tokenizer::from_json("{}").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Decode);
}

/// Hub that serves files from memory.
#[derive(Clone, Default)]
pub(crate) struct FakeHub(Arc<Mutex<FakeHubState>>);

#[derive(Default)]
struct FakeHubState {
    files: HashMap<String, HubFile>,
    /// Failures of the next requests for content, last first.
    faults: Vec<Fault>,
    /// Status and error code of every response.
    refusal: Option<(u16, &'static str)>,
    requests: Vec<RecordedRequest>,
}

#[derive(Clone)]
struct HubFile {
    bytes: Bytes,
    etag: String,
    /// Whether the content is stored under another origin.
    linked: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    ConnectionLost,
    Unavailable,
    None,
}

#[derive(Clone, Debug)]
struct RecordedRequest {
    /// Method and URL.
    line: String,
    headers: HeaderMap,
}

impl RecordedRequest {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl FakeHub {
    pub(crate) fn file(self, name: &str, bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let etag = format!("tag-of-{name}");
        self.with(name, HubFile { bytes, etag, linked: false })
    }

    fn with(self, name: &str, file: HubFile) -> Self {
        self.0.lock().unwrap().files.insert(name.to_owned(), file);
        self
    }

    fn faults(&self, faults: &[Fault]) {
        self.0.lock().unwrap().faults = faults.iter().rev().copied().collect();
    }

    /// Creates a hub that responds to every request with this status and error code.
    fn refusing(status: u16, code: &'static str) -> Self {
        let fake = Self::default();
        fake.0.lock().unwrap().refusal = Some((status, code));
        fake
    }

    /// Returns the requests whose method and URL contain `text`.
    fn requests(&self, text: &str) -> Vec<RecordedRequest> {
        let state = self.0.lock().unwrap();
        state.requests.iter().filter(|request| request.line.contains(text)).cloned().collect()
    }

    /// Returns a client of this hub with the given cache.
    fn hub(&self, cache: &TempDir) -> Hub {
        Hub::from_env(&Env::empty())
            .unwrap()
            .endpoint("https://hub.test".parse().unwrap())
            .token("hf_secret")
            .cache(cache.path())
            .http(self.clone())
    }

    fn respond(&self, request: &Request<Bytes>) -> Result<Response<Bytes>, HttpFailure> {
        let uri = request.uri().to_string();
        let mut state = self.0.lock().unwrap();
        let line = format!("{} {uri}", request.method());
        state.requests.push(RecordedRequest { line, headers: request.headers().clone() });
        let response = Response::builder();
        if let Some((status, code)) = state.refusal {
            return Ok(response
                .status(status)
                .header("x-error-code", code)
                .body(Bytes::new())
                .unwrap());
        }
        let name = uri.rsplit('/').next().unwrap();
        let Some(file) = state.files.get(name).cloned() else {
            let response = response.status(404).header("x-error-code", "EntryNotFound");
            return Ok(response.body(Bytes::new()).unwrap());
        };
        let tag = format!("\"{}\"", file.etag);
        let response = response.header("x-repo-commit", COMMIT);
        if file.linked && uri.starts_with("https://hub.test/") {
            let response =
                response.status(302).header("location", format!("https://cdn.test/{name}"));
            let response =
                response.header("x-linked-etag", tag).header("x-linked-size", file.bytes.len());
            return Ok(response.body(Bytes::from_static(b"redirect")).unwrap());
        }
        let tag = if file.linked { "\"tag-of-the-storage\"".to_owned() } else { tag };
        let response = response.header("etag", &tag);
        if request.method() == "HEAD" {
            return Ok(response
                .header("content-length", file.bytes.len())
                .body(Bytes::new())
                .unwrap());
        }
        match state.faults.pop().unwrap_or(Fault::None) {
            Fault::ConnectionLost => return Err(HttpFailure::connect("connection lost")),
            Fault::Unavailable => {
                return Ok(Response::builder().status(503).body(Bytes::new()).unwrap());
            }
            Fault::None => {}
        }
        let range = request.headers()["range"].to_str().unwrap().strip_prefix("bytes=").unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let start: usize = start.parse().unwrap();
        let end: usize = end.parse().unwrap();
        let total = file.bytes.len();
        let changed = request.headers().get("if-range").is_some_and(|old| *old != *tag);
        if changed {
            return Ok(response.body(file.bytes).unwrap());
        }
        if start >= total {
            return Ok(response.status(416).body(Bytes::new()).unwrap());
        }
        let end = total.min(end + 1);
        let response =
            response.header("content-range", format!("bytes {start}-{}/{total}", end - 1));
        Ok(response.status(206).body(file.bytes.slice(start..end)).unwrap())
    }
}

impl HttpService for FakeHub {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        _timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        assert_eq!(lane, Lane::Hub);
        let response = self.respond(&request);
        Box::pin(async move {
            // Lets concurrent calls start their own requests, if they send any.
            tokio::task::yield_now().await;
            response
        })
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A tokenizer padded with spaces to two and a half pieces of 4 MiB.
fn large() -> Bytes {
    let mut text = tiny::json(&["<end>"]).into_bytes();
    text.resize((10 << 20) + 5, b' ');
    text.into()
}

fn cache() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test]
async fn files_are_downloaded_once_into_the_layout_that_all_hub_clients_share() {
    let fake = FakeHub::default()
        .file("tokenizer.json", tiny::json(&["<end>"]))
        .file("tokenizer_config.json", r#"{"eos_token":"<end>"}"#);
    let cache = cache();
    let tokenizer = Tokenizer::from_hub(&fake.hub(&cache), "org/name:peft:1024").await.unwrap();
    assert_eq!((tokenizer.name(), tokenizer.eos_id()), ("org/name", Some(END)));
    let requests = fake.requests("");
    assert!(requests.iter().all(|r| r.header("authorization") == Some("Bearer hf_secret")));
    assert_eq!(requests[0].line, "HEAD https://hub.test/org/name/resolve/main/tokenizer.json");
    let pinned = format!("https://hub.test/org/name/resolve/{COMMIT}/");
    assert!(requests[1..].iter().all(|r| r.line.contains(&pinned)), "all from one commit");
    let main_file = requests.iter().filter(|r| r.line.ends_with("/tokenizer.json"));
    assert_eq!(main_file.count(), 2, "one HEAD and one GET");

    let repo = cache.path().join("models--org--name");
    let read = |path: &str| std::fs::read_to_string(repo.join(path)).unwrap();
    assert_eq!(read("refs/main"), COMMIT);
    assert_eq!(
        read(&format!("snapshots/{COMMIT}/tokenizer_config.json")),
        r#"{"eos_token":"<end>"}"#
    );
    assert_eq!(read(&format!(".no_exist/{COMMIT}/chat_template.jinja")), "");

    Tokenizer::from_hub(&fake.hub(&cache), "org/name").await.unwrap();
    assert_eq!(fake.requests("").len(), requests.len(), "loaded from memory");
    // Another hub uses the same cache folder, but not the tokenizers in memory.
    let other = fake.hub(&cache).endpoint("https://other.test".parse().unwrap()).offline(true);
    assert_eq!(Tokenizer::from_hub(&other, "org/name").await.unwrap().eos_id(), Some(END));
    assert_eq!(fake.requests("").len(), requests.len(), "loaded from the cache");
}

#[tokio::test]
async fn concurrent_calls_share_one_download() {
    let fake = FakeHub::default().file("tokenizer.json", tiny::json(&[]));
    let cache = cache();
    let hub = fake.hub(&cache);
    let load = || async { Tokenizer::from_hub(&hub.clone(), "org/shared").await.unwrap() };
    tokio::join!(load(), load(), load());
    assert_eq!(fake.requests("GET").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lost_piece_is_requested_again_from_the_end_of_the_file() {
    let fake = FakeHub::default().file("tokenizer.json", large());
    fake.faults(&[Fault::None, Fault::ConnectionLost, Fault::Unavailable, Fault::None]);
    let cache = cache();
    Tokenizer::from_hub(&fake.hub(&cache), "org/large").await.unwrap();
    let ranges: Vec<_> =
        fake.requests("GET").iter().map(|r| r.header("range").unwrap().to_owned()).collect();
    let piece = |n: usize| format!("bytes={}-{}", n << 22, ((n + 1) << 22) - 1);
    assert_eq!(ranges, [piece(0), piece(1), piece(1), piece(1), piece(2)]);
    let conditional: Vec<_> =
        fake.requests("GET").iter().map(|r| r.header("if-range").is_some()).collect();
    assert_eq!(conditional, [false, true, true, true, true]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_download_is_resumed_by_the_next() {
    let fake = FakeHub::default().file("tokenizer.json", large());
    let cache = cache();
    fake.faults(&[
        Fault::None,
        Fault::ConnectionLost,
        Fault::ConnectionLost,
        Fault::ConnectionLost,
        Fault::ConnectionLost,
        Fault::ConnectionLost,
    ]);
    let error = Tokenizer::from_hub(&fake.hub(&cache), "org/later").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect);
    let text = error.to_string();
    assert!(text.contains("org/later") && text.contains("hub.test cannot be reached"), "{text}");
    assert!(error.hint().unwrap().as_str().contains("HF_ENDPOINT"));
    let before = fake.requests("GET").len();
    Tokenizer::from_hub(&fake.hub(&cache), "org/later").await.unwrap();
    let resumed = &fake.requests("GET")[before];
    assert_eq!(resumed.header("range"), Some("bytes=4194304-8388607"));
    assert_eq!(resumed.header("if-range"), Some("\"tag-of-tokenizer.json\""));
}

#[tokio::test]
async fn a_damaged_partial_file_is_discarded() {
    let bytes = large();
    let etag = sha256(&bytes);
    let fake = FakeHub::default()
        .with("tokenizer.json", HubFile { bytes, etag: etag.clone(), linked: true });
    let cache = cache();
    let blobs = cache.path().join("models--org--left/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join(format!("{etag}.tinkex-incomplete")), "garbage").unwrap();
    Tokenizer::from_hub(&fake.hub(&cache), "org/left").await.unwrap();
    assert_eq!(fake.requests("GET https://cdn.test")[0].header("range"), Some("bytes=7-4194310"));
    assert_eq!(std::fs::read_dir(blobs).unwrap().count(), 1);
}

#[tokio::test]
async fn content_with_a_wrong_checksum_is_rejected() {
    let etag = sha256(b"something else");
    let bytes = Bytes::from(tiny::json(&[]));
    let fake = FakeHub::default().with("tokenizer.json", HubFile { bytes, etag, linked: false });
    let cache = cache();
    let error = Tokenizer::from_hub(&fake.hub(&cache), "org/bad").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Decode);
    assert!(error.to_string().contains("checksum"), "{error}");
    assert!(!cache.path().join("models--org--bad/refs/main").exists());
    assert!(
        !cache.path().join(format!("models--org--bad/snapshots/{COMMIT}/tokenizer.json")).exists()
    );
}

#[tokio::test]
async fn the_token_does_not_follow_a_redirect_to_another_origin() {
    let bytes = Bytes::from(tiny::json(&[]));
    let etag = sha256(&bytes);
    let fake = FakeHub::default().with("tokenizer.json", HubFile { bytes, etag, linked: true });
    let cache = cache();
    Tokenizer::from_hub(&fake.hub(&cache), "org/elsewhere").await.unwrap();
    let to_storage = fake.requests("https://cdn.test");
    assert_eq!(to_storage.len(), 1, "metadata comes from the hub alone");
    assert_eq!(to_storage[0].header("authorization"), None);
    assert!(fake.requests("https://hub.test").iter().all(|r| r.header("authorization").is_some()));
}

#[tokio::test]
async fn error_statuses_have_hints_and_are_not_retried() {
    for (status, code, kind, hint, requests) in [
        (401, "", ErrorKind::Auth, "the token (HF_TOKEN)", 1),
        (403, "GatedRepo", ErrorKind::Permission, "Request access", 1),
        (404, "RepoNotFound", ErrorKind::NotFound, "Check the name", 1),
        (404, "EntryNotFound", ErrorKind::NotFound, "tokenizer.json", 2),
    ] {
        let fake = FakeHub::refusing(status, code);
        let cache = cache();
        let error = Tokenizer::from_hub(&fake.hub(&cache), "org/refused").await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains("org/refused"), "{error}");
        assert!(error.hint().unwrap().as_str().contains(hint), "{error:?}");
        assert!(!format!("{error} {error:?}").contains("hf_secret"));
        assert_eq!(fake.requests("").len(), requests, "no retry");
    }
}

#[tokio::test]
async fn the_offline_error_names_the_cache_folder_and_the_setting() {
    let fake = FakeHub::default();
    let cache = cache();
    let by_caller = fake.hub(&cache).offline(true);
    let variable = Env::from_pairs([("HF_HUB_OFFLINE", "1")]);
    let by_variable = Hub::from_env(&variable).unwrap().cache(cache.path()).http(fake.clone());
    for (hub, setting, other) in [
        (by_caller, "Hub::offline", "HF_HUB_OFFLINE"),
        (by_variable, "HF_HUB_OFFLINE", "Hub::offline"),
    ] {
        let error = Tokenizer::from_hub(&hub, "org/offline").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let text = error.to_string();
        assert!(text.contains("models--org--offline"), "{text}");
        assert!(text.contains(setting) && !text.contains(other), "{text}");
    }
    assert!(fake.requests("").is_empty());
}

#[tokio::test]
async fn missing_settings_of_a_cached_tokenizer_are_downloaded() {
    let fake = FakeHub::default()
        .file("tokenizer.json", tiny::json(&["<end>"]))
        .file("tokenizer_config.json", r#"{"eos_token":"<end>"}"#);
    let cache = cache();
    let repo = cache.path().join("models--org--half");
    let snapshot = repo.join("snapshots").join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), COMMIT).unwrap();
    std::fs::write(snapshot.join("tokenizer.json"), tiny::json(&["<end>"])).unwrap();
    let offline = fake.hub(&cache).endpoint("https://off.test".parse().unwrap()).offline(true);
    assert_eq!(
        Tokenizer::from_hub(&offline, "org/half").await.unwrap().eos_id(),
        None,
        "used without settings"
    );
    assert_eq!(
        Tokenizer::from_hub(&fake.hub(&cache), "org/half").await.unwrap().eos_id(),
        Some(END)
    );
}

#[tokio::test]
async fn a_tiktoken_model_is_downloaded_if_there_is_no_tokenizer_json() {
    use base64::Engine as _;
    let line = |byte: u8| {
        let token = base64::engine::general_purpose::STANDARD.encode([byte]);
        format!("{token} {byte}\n")
    };
    let ranks: String = (0..=u8::MAX).map(line).collect();
    let config = r#"{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]},
        "eos_token": "[EOS]", "added_tokens_decoder": {"256": {"content": "[EOS]", "special": true}}}"#;
    let fake =
        FakeHub::default().file("tiktoken.model", ranks).file("tokenizer_config.json", config);
    let cache = cache();
    let hub = fake.hub(&cache);
    let tokenizer = Tokenizer::from_hub(&hub, "org/ranks").await.unwrap();
    assert_eq!(tokenizer.encode("hi[EOS]").unwrap()[..], [104, 105, 256]);
    assert_eq!(tokenizer.eos_id(), Some(256));
    let other = hub.endpoint("https://off.test".parse().unwrap()).offline(true);
    assert_eq!(Tokenizer::from_hub(&other, "org/ranks").await.unwrap().eos_id(), Some(256));
}

#[tokio::test]
async fn a_pinned_revision_is_requested_by_its_name() {
    let fake = FakeHub::default().file("tokenizer.json", tiny::json(&[]));
    let cache = cache();
    let id = TokenizerId::new("org/pinned").unwrap().at("v2").unwrap();
    Tokenizer::from_hub_id(&fake.hub(&cache), &id).await.unwrap();
    assert!(fake.requests("HEAD")[0].line.contains("/org/pinned/resolve/v2/"));
    assert!(cache.path().join("models--org--pinned/refs/v2").is_file());
}

/// Uses the real network stack against a plain web server that supports ranges.
#[tokio::test]
async fn a_plain_web_server_can_serve_as_hub() {
    let file = tiny::json(&["<end>"]);
    let server = RawServer::new(move |request| {
        let head = &request.head;
        let total = file.len();
        let last = file.len() - 1;
        let response = if !head.contains("/tokenizer.json ") {
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned()
        } else if head.starts_with("head ") {
            format!("HTTP/1.1 200 OK\r\netag: \"e\"\r\ncontent-length: {total}\r\n\r\n")
        } else {
            assert!(head.contains("range: bytes=0-4194303\r\n"), "{head}");
            assert!(head.contains("accept-encoding: identity\r\n"), "{head}");
            format!(
                "HTTP/1.1 206 Partial Content\r\netag: \"e\"\r\n\
                 content-range: bytes 0-{last}/{total}\r\ncontent-length: {total}\r\n\r\n{file}"
            )
        };
        response.into_bytes()
    });
    let address = format!("{}/mirror", server.start().await.url);
    let cache = cache();
    let hub = Hub::from_env(&Env::empty()).unwrap().cache(cache.path());
    let tokenizer =
        Tokenizer::from_hub(&hub.endpoint(address.parse().unwrap()), "org/plain").await.unwrap();
    assert_eq!(tokenizer.token_id("<end>"), Some(END));
    // The server does not send commits, so the name of the revision is used as one.
    assert!(cache.path().join("models--org--plain/snapshots/main/tokenizer.json").is_file());
}

/// Covers T6.1.4.
#[tokio::test]
async fn training_and_sampling_clients_load_the_tokenizer_of_their_model() {
    let folder = tiny::folder(&["<end>"], json!({"eos_token": "<end>"}));
    let path = folder.path().to_str().unwrap();
    let data = json!({"model_name": "org/unknown", "tokenizer_id": format!("{path}:rev")});
    let info = json!({"type": "get_info", "model_id": "m", "model_data": data});
    let sampler = json!({"sampler_id": "s", "base_model": path});
    let server = FakeServer::new()
        .on(Route::GetInfo, Reply::json(info))
        .on(Route::GetSampler, Reply::json(sampler));
    let service = server.builder().build().unwrap();
    let model =
        service.create_lora_training_client(LoraOptions::new("base").rank(8)).await.unwrap();
    assert_eq!(model.tokenizer().await.unwrap().eos_id(), Some(END));
    let sampler = service.create_sampling_client("base").await.unwrap();
    assert_eq!(sampler.tokenizer().await.unwrap().eos_id(), Some(END));
}
