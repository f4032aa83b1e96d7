//! Samples that arrive token by token: events, retries, failures, and pieces for servers without
//! the endpoint.

use std::time::Duration;

use serde_json::{Value, json};
use tinkex::ImageFormat;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{
    CallOptions, Env, Error, ErrorKind, ModelInput, SampleStream, SampleStreamOptions,
    SamplingClient, SamplingParams, ServiceClient, StopReason, StreamedToken,
};
use tokio::time::Instant;

use crate::raw_server::{RawServer, json_response};

const SECOND: Duration = Duration::from_secs(1);

fn params() -> SamplingParams {
    SamplingParams::new().max_tokens(4)
}

async fn sampler(server: &FakeServer) -> SamplingClient {
    server.builder().build().unwrap().create_sampling_client("base").await.unwrap()
}

/// Reads a stream to its end. Returns the tokens, and the error that ended it.
async fn collect(mut stream: SampleStream) -> (Vec<StreamedToken>, Option<Error>) {
    let mut tokens = Vec::new();
    while let Some(next) = stream.next().await {
        match next {
            Ok(token) => tokens.push(token),
            Err(error) => {
                assert!(stream.next().await.is_none(), "the stream ends with an error");
                return (tokens, Some(error));
            }
        }
    }
    assert!(stream.next().await.is_none());
    (tokens, None)
}

fn ids(tokens: &[StreamedToken]) -> Vec<u32> {
    tokens.iter().map(|token| token.token).collect()
}

fn text(tokens: &[StreamedToken]) -> String {
    tokens.iter().map(|token| token.text.as_str()).collect()
}

/// Returns an event with one token.
fn event(token: u32, text: &str, reason: Option<&str>) -> String {
    let data = json!({"choices": [{
        "index": 0, "text": text, "token_ids": [token],
        "logprobs": {"token_logprobs": [-1.5]}, "finish_reason": reason,
    }]});
    format!("data: {data}\n\n")
}

/// Returns the completion of a stream whose body consists of `parts`.
async fn stream_of(parts: Vec<String>) -> (Vec<StreamedToken>, Option<Error>) {
    let server = FakeServer::new().on(Route::Completions, Reply::stream(parts));
    collect(sampler(&server).await.sample_stream([1, 2], params())).await
}

#[tokio::test(start_paused = true)]
async fn one_request_streams_all_tokens() {
    let server = FakeServer::new();
    let sampler = sampler(&server).await;
    let params = SamplingParams::new().max_tokens(3).seed(7).temperature(0.5).stop(["\n"]);
    let (tokens, error) = collect(sampler.sample_stream([1, 2], params)).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!((ids(&tokens), &*text(&tokens)), (vec![1, 2, 3], " 1 2 3"));
    assert!(tokens.iter().all(|token| token.logprob == Some(-0.5)));
    let reasons: Vec<_> = tokens.iter().map(|token| token.stop_reason).collect();
    assert_eq!(reasons, [None, None, Some(StopReason::Stop)]);
    let calls = server.calls_to(Route::Completions);
    assert_eq!((calls.len(), server.calls_to(Route::Sample).len()), (1, 0));
    let expected = json!({
        "model": sampler.sampler_id(), "prompt": [1, 2], "max_tokens": 3, "temperature": 0.5,
        "top_p": 1.0, "seed": 7, "stop": ["\n"], "logprobs": 0, "stream": true,
        "return_token_ids": true,
    });
    assert_eq!(calls[0].json(), expected);
    assert_eq!(calls[0].header("accept"), Some("text/event-stream"));
    assert_eq!(calls[0].header("x-api-key"), Some("tml-fake"));
    assert_eq!(calls[0].header("x-tinker-sampling-backpressure"), Some("1"));
    assert_eq!(calls[0].path, "/oai/api/v1/completions");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_before_the_first_poll() {
    let server = FakeServer::new();
    let sampler = sampler(&server).await;
    let stream = sampler.sample_stream([1], params());
    assert!(server.calls_to(Route::Completions).is_empty());
    drop(stream);
    assert!(server.calls_to(Route::Completions).is_empty());
}

/// Pings, CRLF, several events in a part and parts that end anywhere, even inside a character.
#[tokio::test(start_paused = true)]
async fn tokens_do_not_depend_on_how_the_body_is_split() {
    let body = [
        ": ping\r\n\r\n".to_owned(),
        "data: {\"choices\": []}\n\n".to_owned(),
        "data: {\"choices\": [{\"text\": \"\", \"index\": 0}]}\n\n".to_owned(),
        event(7, "", None).replace('\n', "\r\n"),
        event(8, "é…", None),
        "event: ping\ndata: {}\n\n".to_owned(),
        event(9, " done", Some("length")),
        "data: {\"choices\": [], \"usage\": {\"total_tokens\": 5}}\n\n".to_owned(),
        "data: [DONE]\n\n".to_owned(),
    ]
    .concat()
    .into_bytes();
    for size in [1, 2, 3, 5, 7, 64, body.len()] {
        let parts: Vec<Vec<u8>> = body.chunks(size).map(<[u8]>::to_vec).collect();
        let server = FakeServer::new().on(Route::Completions, Reply::stream(parts));
        let stream = sampler(&server).await.sample_stream([1, 2], params());
        let (tokens, error) = collect(stream).await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!((ids(&tokens), &*text(&tokens)), (vec![7, 8, 9], "é… done"), "{size}");
        assert_eq!(tokens[2].stop_reason, Some(StopReason::Length));
        assert_eq!((tokens[0].logprob, server.open_streams()), (Some(-1.5), 0));
    }
}

/// Bug: the text of an event with several tokens was on its last token.
#[tokio::test(start_paused = true)]
async fn the_text_of_an_event_is_on_the_tokens_that_it_belongs_to() {
    let event = |offsets: &[usize], reason: Option<&str>| {
        let data = json!({"choices": [{
            "index": 0, "text": "née!", "token_ids": [7, 8, 9], "finish_reason": reason,
            "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0], "text_offset": offsets},
        }]});
        format!("data: {data}\n\n")
    };
    let (tokens, error) = stream_of(vec![event(&[0, 1, 1], None), event(&[], Some("stop"))]).await;
    assert!(error.is_none(), "{error:?}");
    let texts: Vec<_> = tokens.iter().map(|token| token.text.as_str()).collect();
    // Without offsets, only the end of the text is known.
    assert_eq!(texts, ["n", "", "ée!", "", "", "née!"]);
    let logprobs: Vec<_> = tokens[..3].iter().map(|token| token.logprob).collect();
    assert_eq!(logprobs, [Some(-1.0), Some(-2.0), Some(-3.0)]);
}

#[tokio::test(start_paused = true)]
async fn requests_are_retried_until_the_first_byte() {
    let server = FakeServer::new()
        .on(Route::Completions, Reply::status(503))
        .on(Route::Completions, Reply::connection_lost())
        .on(Route::Completions, Reply::stream([""; 0]).then_connection_lost())
        .on(Route::Completions, Reply::status(429).retry_after(20 * SECOND));
    let sampler = sampler(&server).await;
    let (tokens, error) = collect(sampler.sample_stream([1], params())).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(tokens.len(), 4);
    let calls = server.calls_to(Route::Completions);
    assert_eq!(calls.len(), 5);
    assert!(calls[4].at - calls[3].at >= 20 * SECOND);

    server.queue(Route::Completions, Reply::status(429).retry_after(20 * SECOND));
    let once = sampler.with_options(CallOptions::without_retries());
    let (tokens, error) = collect(once.sample_stream([1], params())).await;
    assert_eq!((tokens.len(), error.unwrap().kind()), (0, ErrorKind::RateLimited));
    let left = sampler.backoff_remaining().unwrap();
    let start = Instant::now();
    sampler.sample([1], params()).await.unwrap();
    assert!(start.elapsed() >= left, "all samples share the backoff");
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_breaks_is_not_repeated() {
    let server = FakeServer::new().on(
        Route::Completions,
        Reply::stream([event(5, "a", None), event(6, "b", None)]).then_connection_lost(),
    );
    let sampler = sampler(&server).await;
    let (tokens, error) = collect(sampler.sample_stream([1], params())).await;
    let error = error.unwrap();
    assert_eq!((ids(&tokens), error.kind(), error.attempts()), (vec![5, 6], ErrorKind::Connect, 1));
    let message = error.to_string();
    assert!(message.starts_with("sample_stream failed: stream was interrupted after 2 tokens"));
    assert_eq!(server.calls_to(Route::Completions).len(), 1);

    // All tokens have arrived: a connection that is lost before the end of the body is no failure.
    let lost = Reply::stream([event(5, "a", Some("stop"))]).then_connection_lost();
    server.queue(Route::Completions, lost);
    let (tokens, error) = collect(sampler.sample_stream([1], params())).await;
    assert_eq!((ids(&tokens), error.is_none()), (vec![5], true));
}

#[tokio::test(start_paused = true)]
async fn silence_ends_a_stream() {
    let silent = Reply::stream([event(5, "a", None)]).part_delay(9 * SECOND).then_silence();
    let server = FakeServer::new().on(Route::Completions, silent);
    let sampler = sampler(&server).await;
    let start = Instant::now();
    let stream =
        sampler.sample_stream([1], SampleStreamOptions::new(params()).idle_timeout(10 * SECOND));
    let (tokens, error) = collect(stream).await;
    assert_eq!((ids(&tokens), error.unwrap().kind()), (vec![5], ErrorKind::Timeout));
    assert_eq!((start.elapsed(), server.open_streams()), (19 * SECOND, 0));

    // The limit of the whole call covers all waits.
    let slow = Reply::streamed([1, 2, 3, 4]).part_delay(9 * SECOND);
    server.queue(Route::Completions, slow);
    let start = Instant::now();
    let limited = sampler.with_options(CallOptions::new().timeout(20 * SECOND));
    let (tokens, error) = collect(limited.sample_stream([1], params())).await;
    let error = error.unwrap();
    assert_eq!((ids(&tokens), error.kind()), (vec![1, 2], ErrorKind::Timeout));
    assert!(!error.is_retryable());
    assert_eq!((start.elapsed(), server.open_streams()), (20 * SECOND, 0));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_stream_closes_its_response() {
    let server = FakeServer::new()
        .on(Route::Completions, Reply::stream([event(5, "a", None)]).then_silence().times(2));
    let sampler = sampler(&server).await;
    let mut stream = sampler.sample_stream([1], params());
    assert_eq!(stream.next().await.unwrap().unwrap().token, 5);
    assert_eq!(server.open_streams(), 1);
    drop(stream);
    assert_eq!(server.open_streams(), 0);

    // Dropping the future of a token keeps the stream.
    let mut stream = sampler.sample_stream([1], params());
    assert_eq!(stream.next().await.unwrap().unwrap().token, 5);
    let waiting = tokio::time::timeout(SECOND, stream.next()).await;
    assert!(waiting.is_err());
    assert_eq!(server.open_streams(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_closed_client_ends_its_streams() {
    let server = FakeServer::new()
        .on(Route::Completions, Reply::stream([event(5, "a", None)]).then_silence());
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let mut stream = sampler.sample_stream([1], params());
    assert_eq!(stream.next().await.unwrap().unwrap().token, 5);
    service.finish().await;
    assert_eq!(stream.next().await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    let (_, error) = collect(sampler.sample_stream([1], params())).await;
    assert_eq!(error.unwrap().kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn concurrent_streams_are_limited() {
    let slow = || Reply::streamed([1, 2]).part_delay(SECOND);
    let server = FakeServer::new().on(Route::Completions, slow()).on(Route::Completions, slow());
    let sampler = sampler(&server).await.with_max_concurrent_samples(1).unwrap();
    let start = Instant::now();
    let (first, second) = tokio::join!(
        collect(sampler.sample_stream([1], params())),
        collect(sampler.sample_stream([2], params())),
    );
    assert_eq!((first.0.len(), second.0.len()), (2, 2));
    assert_eq!(start.elapsed(), 6 * SECOND, "one after the other");
}

#[tokio::test(start_paused = true)]
async fn malformed_streams_are_decode_errors() {
    let start = event(5, "a", None);
    let text_only = "data: {\"choices\": [{\"text\": \"x\"}]}\n\n";
    for (rest, cause) in [
        ("data: {\"choices\": 7}\n\n", "choices"),
        ("data: [DONE]\n\n", "before the last token"),
        (text_only, "text without token ids"),
        ("data: {\"choices\": [{\"text\": \"x\", \"token_ids\": []}]}\n\n", "without a token"),
        ("data: \u{0}\n\n", "JSON"),
    ] {
        let (tokens, error) = stream_of(vec![start.clone(), rest.to_owned()]).await;
        let error = error.unwrap();
        assert_eq!((ids(&tokens), error.kind()), (vec![5], ErrorKind::Decode), "{rest}");
        assert!(error.to_string().contains(cause), "{error}");
    }
    let endless = (0..20).map(|_| "x".repeat(100_000)).collect::<Vec<_>>();
    let (_, error) = stream_of([vec![start], endless].concat()).await;
    assert!(error.unwrap().to_string().contains("more than 1048576 bytes"));
}

#[tokio::test(start_paused = true)]
async fn failures_of_the_server_are_reported_with_its_message() {
    let failed = json!({"error": {"message": "the model is gone", "type": "server_error"}});
    let parts = vec![event(5, "a", None), format!("data: {failed}\n\n")];
    let (tokens, error) = stream_of(parts).await;
    let error = error.unwrap();
    assert_eq!((ids(&tokens), error.kind()), (vec![5], ErrorKind::WorkFailed));
    assert_eq!(error.to_string(), "sample_stream failed: the model is gone");

    // The server refuses the prompt itself: a piece of it would be sampled first otherwise.
    let body = json!({"error": {"message": "prompt exceeds the context length"}});
    let server = FakeServer::new().on(Route::Completions, Reply::status(400).with_json(body));
    let (_, error) = collect(sampler(&server).await.sample_stream([1], params())).await;
    assert_eq!(error.unwrap().kind(), ErrorKind::Rejected);
    assert!(server.calls_to(Route::Sample).is_empty());

    let infinite = params().temperature(f64::INFINITY);
    let (_, error) = collect(sampler(&server).await.sample_stream([1], infinite)).await;
    let error = error.unwrap();
    assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidInput, Some("sample_stream")));
}

/// Returns a server without the endpoint, on which samples have the tokens 10, 11, 12, …
fn server_without_streams(refusal: Reply) -> FakeServer {
    FakeServer::new().on(Route::Completions, refusal.always()).on_call(Route::Sample, |call| {
        let body = call.json();
        let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
        let chunks = body["prompt"]["chunks"].as_array().unwrap();
        let tokens = chunks.iter().filter_map(|chunk| chunk["tokens"].as_array()).flatten();
        let start = 10 + u32::try_from(tokens.filter(|token| **token != 1).count()).unwrap();
        let count = number(&body["sampling_params"]["max_tokens"]);
        let tokens: Vec<u32> = (start..start + count).collect();
        let logprobs = vec![-0.25; tokens.len()].into();
        let sequence = tinkex::SampledSequence::default()
            .tokens(tokens)
            .logprobs(Some(logprobs))
            .stop_reason(StopReason::Length);
        Reply::sample(&tinkex::SampleResponse::default().sequences(vec![sequence]))
    })
}

#[tokio::test(start_paused = true)]
async fn a_server_without_the_endpoint_is_sampled_in_pieces() {
    let unknown_model = json!({"error": {"message": "no such model", "code": "model_not_found"}});
    for (refusal, remembered) in [
        (Reply::status(404).with_json(json!({"detail": "Not Found"})), true),
        (Reply::status(405), true),
        (Reply::status(501), true),
        // A website that answers everything.
        (Reply::status(200).text("<html>"), true),
        // The endpoint without our extensions.
        (Reply::stream(["data: {\"choices\": [{\"text\": \"x\", \"index\": 0}]}\n\n"]), true),
        (Reply::status(404).with_json(unknown_model), false),
        (Reply::status(422).with_json(json!({"detail": "extra field"})), false),
    ] {
        let server = server_without_streams(refusal);
        let sampler = sampler(&server).await;
        let params = SamplingParams::new().max_tokens(30).seed(100);
        for _ in 0..2 {
            let stream = sampler
                .sample_stream([1, 1], SampleStreamOptions::new(params.clone()).without_text());
            let (tokens, error) = collect(stream).await;
            assert!(error.is_none(), "{error:?}");
            assert_eq!(ids(&tokens), (10..40).collect::<Vec<_>>());
            assert_eq!(tokens[29].stop_reason, Some(StopReason::Length));
            assert!(tokens[..29].iter().all(|token| token.stop_reason.is_none()));
            assert!(tokens.iter().all(|token| token.logprob == Some(-0.25)));
        }
        let asked = server.calls_to(Route::Completions).len();
        assert_eq!(asked, if remembered { 1 } else { 2 });
        let pieces: Vec<Value> = server.calls_to(Route::Sample).iter().map(|c| c.json()).collect();
        let first = &pieces[0]["sampling_params"];
        assert_eq!((&first["max_tokens"], &first["seed"]), (&json!(8), &json!(100)));
        assert_eq!(pieces[1]["sampling_params"]["seed"], 108, "each piece has its own seed");
    }
}

/// Some servers do not return the stop token, so that a piece can be empty.
#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_with_an_empty_piece_has_a_stop_reason() {
    let full = |tokens: std::ops::Range<u32>| {
        let sequence = tinkex::SampledSequence::default()
            .tokens(tokens.collect::<Vec<_>>())
            .stop_reason(StopReason::Length);
        Reply::sample(&tinkex::SampleResponse::default().sequences(vec![sequence]))
    };
    let empty = tinkex::SampledSequence::default().stop_reason(StopReason::Stop);
    let empty = Reply::sample(&tinkex::SampleResponse::default().sequences(vec![empty]));
    let server = FakeServer::new()
        .on(Route::Completions, Reply::status(404).always())
        .on(Route::Sample, full(10..18))
        .on(Route::Sample, empty.clone());
    let sampler = sampler(&server).await;
    let stream = || {
        sampler
            .sample_stream([1, 1], SampleStreamOptions::new(params().max_tokens(30)).without_text())
    };
    let (tokens, error) = collect(stream()).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(ids(&tokens), (10..18).collect::<Vec<_>>());
    assert_eq!(tokens[7].stop_reason, Some(StopReason::Stop));
    // A completion without tokens is a stream without tokens, a response without one an error.
    server.queue(Route::Sample, empty);
    let (tokens, error) = collect(stream()).await;
    assert!(tokens.is_empty() && error.is_none(), "{error:?}");
    server.queue(Route::Sample, Reply::sample(&tinkex::SampleResponse::default()));
    let (_, error) = collect(stream()).await;
    assert_eq!(error.unwrap().kind(), tinkex::ErrorKind::Decode);
}

#[tokio::test(start_paused = true)]
async fn prompts_with_images_are_sampled_in_pieces() {
    let server = server_without_streams(Reply::ok());
    let prompt = ModelInput::default().image(vec![0; 4], ImageFormat::Png).tokens([1, 1]);
    let options = SampleStreamOptions::new(SamplingParams::new().max_tokens(9)).without_text();
    let (tokens, error) = collect(sampler(&server).await.sample_stream(prompt, options)).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(ids(&tokens), (10..19).collect::<Vec<_>>());
    assert!(server.calls_to(Route::Completions).is_empty());
}

#[tokio::test(start_paused = true)]
async fn requests_with_a_body_are_not_redirected_to_another_server() {
    let elsewhere = Reply::status(307).header("location", "http://other.test/steal");
    let server = FakeServer::new().on(Route::Completions, elsewhere);
    let (_, error) = collect(sampler(&server).await.sample_stream([1], params())).await;
    assert!(error.unwrap().to_string().contains("redirects a POST request to another server"));
    assert!(server.calls().iter().all(|call| call.url.starts_with(server.url())));
}

#[tokio::test]
async fn dropping_the_stream_closes_the_connection() {
    let server = RawServer::new(|request| match request.path() {
        "create_session" => json_response(br#"{"session_id": "s"}"#),
        "create_sampling_session" => json_response(br#"{"sampling_session_id": "s:sample:0"}"#),
        "/oai/api/v1/completions" => {
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                        transfer-encoding: chunked\r\n\r\n";
            let event = event(5, "a", None);
            format!("{head}{:x}\r\n{event}\r\n", event.len()).into_bytes()
        }
        _ => json_response(b"{}"),
    });
    let server = server.start().await;
    let service = ServiceClient::builder()
        .env(Env::empty())
        .base_url(&server.url)
        .api_key("tml-test")
        .without_telemetry()
        .build()
        .unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let mut stream = sampler.sample_stream([1], params());
    assert_eq!(stream.next().await.unwrap().unwrap().token, 5);
    assert_eq!(server.closed.available_permits(), 0);
    drop(stream);
    server.closed.acquire().await.unwrap().forget();
}

/// Decodes tokens to letters: 10 is `a`, 11 is `b`, and so on.
#[cfg(feature = "tokenizer")]
fn letters() -> tinkex::Tokenizer {
    let vocab: serde_json::Map<String, Value> = (b'a'..=b'z')
        .zip(10..)
        .map(|(letter, id)| (char::from(letter).into(), json!(id)))
        .collect();
    let json = json!({
        "version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
    });
    tinkex::Tokenizer::from_json(json.to_string()).unwrap()
}

/// The first piece ends after `abcdefgh`, within the stop string. The server cannot see it.
#[cfg(feature = "tokenizer")]
#[tokio::test(start_paused = true)]
async fn a_stop_string_that_spans_two_pieces_ends_the_completion() {
    let server = server_without_streams(Reply::status(404));
    let sampler = sampler(&server).await;
    let stream = |params| {
        sampler.sample_stream([1, 1], SampleStreamOptions::new(params).tokenizer(letters()))
    };
    let params = SamplingParams::new().max_tokens(20);
    let (tokens, error) = collect(stream(params.clone().stop(["ghij"]))).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!((&*text(&tokens), tokens.len()), ("abcdef", 10));
    assert_eq!(tokens[9].stop_reason, Some(StopReason::Stop));
    let (tokens, _) = collect(stream(params.clone())).await;
    assert_eq!(text(&tokens), "abcdefghijklmnopqrst");
    assert_eq!(tokens[19].stop_reason, Some(StopReason::Length));
    // Text that could begin a stop string is returned at the end.
    let (tokens, _) = collect(stream(params.stop(["stuv"]))).await;
    assert_eq!(text(&tokens), "abcdefghijklmnopqrst");
    assert_eq!((&*tokens[18].text, &*tokens[19].text), ("", "st"));
}

/// The tokenizer writes the first word of a text without the space before it.
#[cfg(feature = "tokenizer")]
#[tokio::test(start_paused = true)]
async fn text_sampled_in_pieces_keeps_the_space_after_the_prompt() {
    let words = ["<unk>", "▁a", "▁b"];
    let vocab: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let decoder = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
        "split": true});
    let json = json!({"version": "1.0", "decoder": decoder,
        "model": {"type": "BPE", "merges": [], "vocab": vocab}});
    let tokenizer = tinkex::Tokenizer::from_json(json.to_string()).unwrap();
    let sequence = tinkex::SampledSequence::default().tokens(vec![2]).stop_reason(StopReason::Stop);
    let server = FakeServer::new().on(Route::Completions, Reply::status(404).always()).on(
        Route::Sample,
        Reply::sample(&tinkex::SampleResponse::default().sequences(vec![sequence])),
    );
    let stream = sampler(&server)
        .await
        .sample_stream([1], SampleStreamOptions::new(params()).tokenizer(tokenizer));
    let (tokens, error) = collect(stream).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(text(&tokens), " b");
}
