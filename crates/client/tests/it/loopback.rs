//! The network stack over loopback, against misbehaving servers.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tinkex::rest::ListSessions;
use tinkex::{
    AdamParams, CallOptions, Env, ErrorKind, Hint, SamplingParams, ServiceClient,
    ServiceClientBuilder,
};
use tokio::net::TcpListener;

use crate::raw_server::{
    CLOSES_AT_ONCE, CLOSES_MID_BODY, LocalTls, RawServer, json_response, response,
};

const SESSIONS: &[u8] = br#"{"sessions":["s"]}"#;

/// Returns a server that responds to `list_sessions` with these bytes.
fn sessions(response: Vec<u8>) -> RawServer {
    RawServer::new(move |request| {
        if request.path().starts_with("sessions") { response.clone() } else { json_response(b"{}") }
    })
}

fn client_builder(address: &str) -> ServiceClientBuilder {
    ServiceClient::builder()
        .env(Env::empty())
        .base_url(address)
        .api_key("tml-test")
        .options(CallOptions::without_retries())
}

fn client(address: &str) -> ServiceClient {
    client_builder(address).build().unwrap()
}

#[tokio::test]
async fn connections_are_reused() {
    let server = sessions(json_response(SESSIONS)).start().await;
    let rest = client(&server.url).rest();
    for _ in 0..5 {
        let found = rest.list_sessions(&ListSessions::default()).await.unwrap();
        assert_eq!(found.sessions[0], "s");
    }
    // One for each lane: configuration, session, REST.
    assert_eq!(server.connections.load(Ordering::Relaxed), 3);
}

/// Bug: the idle connections of several clients filled the server, and each client waited until the
/// connections of the others were closed.
#[tokio::test]
async fn clients_of_one_server_share_their_connections() {
    let server = sessions(json_response(SESSIONS)).start().await;
    let other = sessions(json_response(SESSIONS)).start().await;
    let clients = [client(&server.url), client(&server.url), client(&server.url)];
    for service in &clients {
        let found = service.rest().list_sessions(&ListSessions::default()).await.unwrap();
        assert_eq!(found.sessions[0], "s");
    }
    // One for each lane: configuration, session, REST.
    assert_eq!(server.connections.load(Ordering::Relaxed), 3);
    client(&other.url).rest().list_sessions(&ListSessions::default()).await.unwrap();
    assert_eq!(server.connections.load(Ordering::Relaxed), 3);
    // A proxy is part of the settings of a connection.
    let through_proxy = Env::from_pairs([("HTTP_PROXY", server.url.as_str())]);
    let proxied = client_builder(&server.url).env(through_proxy).build().unwrap();
    // The proxy does not apply to a loopback address; only the number of connections matters.
    proxied.rest().list_sessions(&ListSessions::default()).await.unwrap();
    assert!(server.connections.load(Ordering::Relaxed) > 3);
}

#[tokio::test]
async fn compressed_responses_are_decoded() {
    let body = tinkex_wire::codec::compress::compress(SESSIONS).unwrap();
    let server = sessions(response(&body, "content-encoding: zstd\r\n")).start().await;
    let found = client(&server.url).rest().list_sessions(&ListSessions::default()).await.unwrap();
    assert_eq!(found.sessions[0], "s");
}

#[tokio::test]
async fn broken_connections_are_reported_as_such() {
    for response in [CLOSES_MID_BODY, CLOSES_AT_ONCE, b"not an HTTP response\r\n\r\n"] {
        let server = sessions(response.to_vec()).start().await;
        let error =
            client(&server.url).rest().list_sessions(&ListSessions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Connect, "{error:?}");
        assert!(error.is_retryable());
        assert!(std::error::Error::source(&error).is_some(), "the cause is kept");
    }
}

/// Returns the responses of a server that trains, where `polls` answer the polls for the results of
/// optimizer steps, in order. Later steps succeed.
fn training(polls: &[&[u8]]) -> RawServer {
    let polls = Mutex::new(polls.iter().map(|poll| poll.to_vec()).collect::<VecDeque<_>>());
    RawServer::new(move |request| match request.path() {
        "create_session" => json_response(br#"{"session_id":"s"}"#),
        "create_model" => json_response(br#"{"request_id":"created"}"#),
        "optim_step" => json_response(br#"{"request_id":"step"}"#),
        "retrieve_future" if contains(&request.body, b"created") => {
            json_response(br#"{"type":"create_model","model_id":"m"}"#)
        }
        "retrieve_future" => {
            let scripted = polls.lock().unwrap().pop_front();
            scripted.unwrap_or_else(|| json_response(br#"{"metrics":{"grad_norm":0.5}}"#))
        }
        _ => json_response(b"{}"),
    })
}

fn contains(body: &[u8], word: &[u8]) -> bool {
    body.windows(word.len()).any(|part| part == word)
}

/// Covers P4C.2, T4.1.2.
#[tokio::test]
async fn broken_poll_responses_fail_at_most_their_own_call() {
    let server = training(&[CLOSES_MID_BODY, &json_response(b"<html>\t")]).start().await;
    let builder = client_builder(&server.url).options(CallOptions::new()).poll_immediately();
    let service = builder.build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let step = || model.optim_step(AdamParams::default());
    // A poll whose connection closes in the middle of the body is repeated. Its repetition gets a
    // body that is not JSON.
    let error = step().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Decode, "{error}");
    assert_eq!(step().await.unwrap().metrics["grad_norm"].as_f64(), 0.5);
}

/// Covers P4C.2.
#[tokio::test]
async fn without_retries_a_poll_response_that_is_cut_off_fails_its_call_only() {
    let server = training(&[CLOSES_MID_BODY]).start().await;
    let service = client(&server.url);
    let model = service.create_lora_training_client("base").await.unwrap();
    let error = model.optim_step(AdamParams::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect, "{error:?}");
    assert_eq!(error.request_id().unwrap(), &"step", "the result can be polled later");
    let next = model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(next.metrics["grad_norm"].as_f64(), 0.5);
}

/// Clients that use the network find their backoff in the registry of the process.
///
/// Covers T0.1.5, T4.2.2.
#[tokio::test]
async fn services_of_one_key_share_the_backoff_of_a_429_and_another_key_does_not() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let samples = Arc::clone(&seen);
    let server = RawServer::new(move |request| match request.path() {
        "create_session" => json_response(br#"{"session_id":"s"}"#),
        "create_sampling_session" => json_response(br#"{"sampling_session_id":"s:sample:0"}"#),
        "asample" => {
            let limited = request.head.contains("x-api-key: tml-limited");
            samples.lock().unwrap().push(limited);
            if limited {
                let head = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 30\r\n";
                format!("{head}content-length: 0\r\n\r\n").into_bytes()
            } else {
                json_response(br#"{"request_id":"sample"}"#)
            }
        }
        "retrieve_future" => json_response(br#"{"type":"sample","sequences":[]}"#),
        _ => json_response(b"{}"),
    });
    let server = server.start().await;
    let sampler = async |key: &str| {
        // The sample fails instead of waiting for more than a second.
        let options = CallOptions::new().give_up_after(Duration::from_secs(1));
        let builder = client_builder(&server.url).api_key(key).options(options);
        builder.build().unwrap().create_sampling_client("base").await.unwrap()
    };
    let limited = sampler("tml-limited").await;
    let same_key = sampler("tml-limited").await;
    let other_key = sampler("tml-other").await;
    let params = || SamplingParams::new().max_tokens(1);

    let error = limited.sample([1], params()).await.unwrap_err();
    assert_eq!((error.status(), error.attempts()), (Some(429), 1), "{error}");
    let error = same_key.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::RateLimited, 0), "{error}");
    assert!(same_key.backoff_remaining().is_some());
    assert_eq!(*seen.lock().unwrap(), [true], "the second client of the key sent nothing");

    other_key.sample([1], params()).await.unwrap();
    assert_eq!(other_key.backoff_remaining(), None);
    assert_eq!(*seen.lock().unwrap(), [true, false]);
}

#[tokio::test]
async fn an_unreachable_server_is_reported_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = client(&address).rest().list_sessions(&ListSessions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect);
}

/// A response that cannot be decompressed is not a lost connection: it is not retried.
#[tokio::test]
async fn an_undecodable_body_is_a_decoding_error_and_is_not_retried() {
    let broken = response(b"not compressed", "content-encoding: zstd\r\n");
    let server = sessions(broken).start().await;
    let service = client_builder(&server.url).options(CallOptions::new()).build().unwrap();
    let error = service.rest().list_sessions(&ListSessions::default()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Decode, 1), "{error:?}");
}

#[tokio::test]
async fn an_untrusted_certificate_is_reported_as_such_and_is_not_retried() {
    let LocalTls { acceptor, .. } = LocalTls::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    #[expect(clippy::disallowed_methods, reason = "a test server")]
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = acceptor.accept(stream).await;
        }
    });
    let service = client_builder(&address).options(CallOptions::new()).build().unwrap();
    let error = service.server_capabilities().await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Certificate, 1), "{error:?}");
    assert_eq!(error.hint(), Some(Hint::CheckCertificate));
}
