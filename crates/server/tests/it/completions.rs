//! The `completions` endpoint: streamed and unstreamed responses, and their equality with samples
//! of the Tinker API.

use serde_json::{Value, json};
use tinkex::{SampleOptions, SampleResponse, SamplingParams, StopCondition};
use tinkex_server::BUILT_IN;

use crate::harness::{MODEL, TestServer, http_client};
use crate::sse::{EventStream, completions_url};

/// Returns a request with token ids for the model that has no tokenizer.
fn request(prompt: &[u32], seed: u64) -> Value {
    json!({
        "model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": seed, "ignore_eos": true,
        "logprobs": 2, "return_token_ids": true, "top_k": 30, "temperature": 0.8,
    })
}

/// Sends a request that is not streamed.
async fn complete(server: &TestServer, request: &Value) -> Value {
    let url = completions_url(&server.server.base_url());
    let response = http_client().post(url).body(request.to_string()).send().await.unwrap();
    let status = response.status();
    let body = response.text().await.unwrap();
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// Sends a streamed request and joins the pieces of each choice.
async fn stream(server: &TestServer, mut request: Value) -> Vec<Value> {
    request["stream"] = json!(true);
    let mut events = EventStream::post(&completions_url(&server.server.base_url()), &request).await;
    let mut choices: Vec<Value> = Vec::new();
    while let Some(event) = events.next().await {
        for piece in event["choices"].as_array().unwrap() {
            let index = usize::try_from(piece["index"].as_u64().unwrap()).unwrap();
            while choices.len() <= index {
                choices.push(Value::Null);
            }
            join(&mut choices[index], piece);
        }
    }
    assert!(events.is_done());
    choices
}

/// Appends the texts and lists of a piece to a choice.
fn join(choice: &mut Value, piece: &Value) {
    match (choice, piece) {
        (Value::String(choice), Value::String(piece)) => choice.push_str(piece),
        (Value::Array(choice), Value::Array(piece)) => choice.extend(piece.iter().cloned()),
        (Value::Object(choice), Value::Object(piece)) => {
            for (name, value) in piece {
                join(choice.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        (choice, piece) if !piece.is_null() => *choice = piece.clone(),
        _ => {}
    }
}

/// Returns the tokens, and the bits of the log-probabilities, of a choice.
fn tokens_of(choice: &Value) -> (Vec<u64>, Vec<u32>) {
    let numbers = |value: &Value| value.as_array().unwrap().clone();
    let tokens = numbers(&choice["token_ids"]).iter().map(|id| id.as_u64().unwrap()).collect();
    #[expect(clippy::cast_possible_truncation, reason = "the text of a 32-bit number")]
    let logprobs = numbers(&choice["logprobs"]["token_logprobs"])
        .iter()
        .map(|logprob| (logprob.as_f64().unwrap() as f32).to_bits())
        .collect();
    (tokens, logprobs)
}

/// Returns the tokens and log-probabilities of the sequences of a Tinker sample.
fn sampled(response: &SampleResponse) -> Vec<(Vec<u64>, Vec<u32>)> {
    let bits = |logprobs: &[Option<f32>]| logprobs.iter().map(|x| x.unwrap().to_bits()).collect();
    let sequences = response.sequences.iter();
    sequences
        .map(|sequence| {
            let logprobs: Vec<_> = sequence.logprobs.as_ref().unwrap().iter().collect();
            (sequence.tokens.iter().map(|token| u64::from(*token)).collect(), bits(&logprobs))
        })
        .collect()
}

/// A request alone, and among 32 others, streamed and not streamed, has the tokens and
/// log-probabilities of a Tinker sample with the same seed and parameters.
#[tokio::test(flavor = "multi_thread")]
async fn completions_have_the_bits_of_tinker_samples() {
    let test_server = TestServer::new().await;
    let client = test_server.client().create_sampling_client(MODEL).await.unwrap();
    for temperature in [0.0, 0.8] {
        let mut request = request(&[3, 4, 5], 7);
        request["temperature"] = json!(temperature);
        request["n"] = json!(3);
        let params =
            SamplingParams::new().max_tokens(24).seed(7).temperature(temperature).top_k(30);
        let sample = client.sample(
            [3, 4, 5],
            SampleOptions::new(params.stop(StopCondition::NEVER)).num_samples(3),
        );
        let expected = sampled(&sample.await.unwrap());
        let others = (0..32_u32).map(|i| {
            let mut other = self::request(&[3, 4, 5, i], u64::from(i));
            other["max_tokens"] = json!(i + 1);
            let test_server = &test_server;
            async move { stream(test_server, other).await }
        });
        let (whole, streamed, _) = tokio::join!(
            complete(&test_server, &request),
            stream(&test_server, request.clone()),
            futures_util::future::join_all(others)
        );
        let whole = whole["choices"].as_array().unwrap().clone();
        for choices in [whole.clone(), streamed.clone()] {
            let choices: Vec<_> = choices.iter().map(tokens_of).collect();
            assert_eq!(choices, expected, "temperature {temperature}");
        }
        let alone = stream(&test_server, request.clone()).await;
        assert_eq!(alone, streamed);
        for (whole, streamed) in whole.iter().zip(&streamed) {
            assert_eq!(whole["prompt_token_ids"], json!([3, 4, 5]));
            assert_eq!(whole["logprobs"], streamed["logprobs"]);
            assert_eq!(whole["finish_reason"], "length");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn text_is_streamed_without_the_stop_string() {
    let test_server = TestServer::new().await;
    let mut request = json!({
        "model": BUILT_IN, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0,
        "return_token_ids": true, "ignore_eos": true,
    });
    let whole = complete(&test_server, &request).await["choices"][0].clone();
    let text = whole["text"].as_str().unwrap().to_owned();
    assert!(text.len() > 20, "{text:?}");
    let streamed = stream(&test_server, request.clone()).await;
    assert_eq!(streamed[0]["text"], text.as_str());
    assert_eq!(streamed[0]["token_ids"], whole["token_ids"]);

    // Two characters in the middle of the text end it.
    let at = text.char_indices().nth(10).unwrap().0;
    let stop: String = text[at..].chars().take(2).collect();
    let expected = &text[..text.find(&stop).unwrap()];
    request["stop"] = json!([stop]);
    let stopped = complete(&test_server, &request).await["choices"][0].clone();
    assert_eq!(stopped["text"], expected);
    assert_eq!(stopped["finish_reason"], "stop");
    let streamed = stream(&test_server, request).await;
    assert_eq!(
        (&streamed[0]["text"], &streamed[0]["finish_reason"]),
        (&json!(expected), &json!("stop"))
    );
    assert_eq!(streamed[0]["token_ids"], stopped["token_ids"], "the tokens of the stop string");
}

#[tokio::test(flavor = "multi_thread")]
async fn echo_repeats_the_prompt_with_its_log_probabilities() {
    let test_server = TestServer::new().await;
    let client = test_server.client().create_sampling_client(BUILT_IN).await.unwrap();
    let prompt = "The cat sat on the mat";
    let mut request = json!({
        "model": BUILT_IN, "prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 1,
        "return_token_ids": true,
    });
    let scored = complete(&test_server, &request).await;
    let choice = &scored["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(prompt), &json!("length")));
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    let ids: Vec<u32> = serde_json::from_value(choice["prompt_token_ids"].clone()).unwrap();
    assert_eq!(scored["usage"]["prompt_tokens"], ids.len());
    let expected = client.compute_logprobs(ids.clone()).await.unwrap();
    let logprobs: Vec<Option<f32>> =
        serde_json::from_value(choice["logprobs"]["token_logprobs"].clone()).unwrap();
    assert_eq!(logprobs, expected.iter().collect::<Vec<_>>());
    assert_eq!(logprobs[0], None);
    let columns = &choice["logprobs"];
    let names: Vec<&str> =
        columns["tokens"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(names.concat(), prompt);
    let offsets: Vec<usize> = serde_json::from_value(columns["text_offset"].clone()).unwrap();
    let expected: Vec<usize> = (0..names.len()).map(|i| names[..i].concat().len()).collect();
    assert_eq!(offsets, expected);
    for (i, logprob) in logprobs.iter().enumerate().skip(1) {
        let top = columns["top_logprobs"][i].as_object().unwrap();
        let best = top.values().map(|x| x.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(best >= f64::from(logprob.unwrap()) - 1e-6 && top.contains_key(names[i]), "{i}");
    }
    // Streamed, with a sampled token: the first event repeats the prompt.
    request["max_tokens"] = json!(1);
    request["prompt"] = json!([ids.clone(), ids[..2]]);
    let streamed = stream(&test_server, request).await;
    assert_eq!(streamed.len(), 2);
    assert!(streamed[0]["text"].as_str().unwrap().starts_with(prompt));
    let count = |choice: &Value| choice["logprobs"]["tokens"].as_array().unwrap().len();
    assert_eq!((count(&streamed[0]), count(&streamed[1])), (ids.len() + 1, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_counts_prompt_cached_and_sampled_tokens() {
    let test_server = TestServer::new().await;
    let prompt: Vec<u32> = (1..=40).collect();
    let request = |prompts: Value| {
        json!({
            "model": MODEL, "prompt": prompts, "max_tokens": 5, "n": 2, "ignore_eos": true,
            "stream_options": {"include_usage": true},
        })
    };
    let usage = complete(&test_server, &request(json!(prompt))).await["usage"].clone();
    assert_eq!(
        usage,
        json!({
            "prompt_tokens": 40, "completion_tokens": 10, "total_tokens": 50,
            "prompt_tokens_details": {"cached_tokens": 0},
        })
    );
    let mut streamed = request(json!([prompt, prompt]));
    streamed["stream"] = json!(true);
    let url = completions_url(&test_server.server.base_url());
    let mut events = EventStream::post(&url, &streamed).await;
    let mut all = Vec::new();
    while let Some(event) = events.next().await {
        all.push(event);
    }
    let last = all.pop().unwrap();
    assert!(all.iter().all(|event| event.get("usage") == Some(&Value::Null)));
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 20);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 64, "two full pages each");

    // The tokens count for no session.
    let http = test_server.http();
    let hour = 3_600;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let from = now / hour * hour - hour;
    let to = now / hour * hour + 2 * hour;
    let path = format!("/api/v1/billing/usage/events?starting_on={from}&ending_before={to}");
    let (status, billed) = http.get(&path).await;
    assert_eq!(status, 200, "{billed}");
    let sampled = billed["data"].as_array().unwrap().iter().find(|event| {
        event["event_info"]["type"].as_str().is_some_and(|kind| kind.contains("sample"))
    });
    assert!(sampled.is_some_and(|event| event["session_id"].is_null()), "{billed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_tokens_outside_the_vocabulary_are_rejected() {
    let test_server = TestServer::new().await;
    let url = test_server.server.base_url();
    let messages = json!([{"role": "user", "content": "What does a cow say?"}]);
    for (path, mut request, vocabulary) in [
        ("completions", json!({"model": MODEL, "prompt": [3, 4]}), 113),
        ("completions", json!({"model": BUILT_IN, "prompt": "The cow"}), 1024),
        ("chat/completions", json!({"model": BUILT_IN, "messages": messages}), 1024),
    ] {
        for stream in [false, true] {
            request["max_tokens"] = json!(1);
            request["stream"] = json!(stream);
            request["stop_token_ids"] = json!([5, vocabulary - 1, vocabulary]);
            let send = http_client().post(format!("{url}/v1/{path}")).body(request.to_string());
            let response = send.send().await.unwrap();
            assert_eq!(response.status(), 400, "{request}");
            let error: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
            assert_eq!(error["error"]["param"], "stop_token_ids", "{error}");
            let message = error["error"]["message"].as_str().unwrap();
            let want = format!(
                "stop_token_ids[2]: token {vocabulary} is outside of the model's vocabulary of \
                 {vocabulary} tokens"
            );
            assert!(message.contains(&want), "{message}");
        }
        request["stream"] = json!(false);
        request["stop_token_ids"] = json!([vocabulary - 1]);
        let send = http_client().post(format!("{url}/v1/{path}")).body(request.to_string());
        assert_eq!(send.send().await.unwrap().status(), 200, "{request}");
    }
}
