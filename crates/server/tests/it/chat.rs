//! The `chat/completions` endpoint.

use serde_json::{Value, json};
use tinkex::{SampleOptions, SamplingParams};
use tinkex_server::BUILT_IN;

use crate::harness::{MODEL, TestServer};
use crate::inference::wait_until_idle;
use crate::sse::EventStream;
use crate::taught::{BASE, CONTENT, REASONING, RIVER, RIVERS, TaughtModel, WEATHER, tools};

const PATH: &str = "/oai/api/v1/chat/completions";

async fn post(server: &TestServer, request: &Value) -> (u16, Value) {
    server.http().send("POST", PATH, &[], request.to_string().into_bytes()).await
}

/// Sends a request and returns its first choice.
async fn choice(server: &TestServer, request: &Value) -> Value {
    let (status, body) = post(server, request).await;
    assert_eq!(status, 200, "{body}");
    body["choices"][0].clone()
}

/// Sends a streamed request and returns its events.
async fn events(server: &TestServer, mut request: Value) -> Vec<Value> {
    request["stream"] = json!(true);
    let url = format!("{}{PATH}", server.server.base_url());
    let mut stream = EventStream::post(&url, &request).await;
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        events.push(event);
    }
    assert!(stream.is_done());
    events
}

/// Joins the deltas of one choice as clients do, into a message with a finish reason.
fn joined(events: &[Value], index: u64) -> Value {
    let mut message = json!({"reasoning_content": "", "content": "", "tool_calls": []});
    let append = |to: &mut Value, text: &Value| {
        *to = json!(format!("{}{}", to.as_str().unwrap(), text.as_str().unwrap_or_default()));
    };
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        if choice["index"] != index {
            continue;
        }
        for name in ["reasoning_content", "content"] {
            append(&mut message[name], &choice["delta"][name]);
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let calls = message["tool_calls"].as_array_mut().unwrap();
            let at = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if at == calls.len() {
                assert_eq!(call["type"], "function");
                let name = &call["function"]["name"];
                calls.push(json!({"id": call["id"], "name": name, "arguments": ""}));
            }
            append(&mut calls[at]["arguments"], &call["function"]["arguments"]);
        }
        if !choice["finish_reason"].is_null() {
            message["finish_reason"] = choice["finish_reason"].clone();
        }
    }
    message
}

fn weather(model: &str) -> Value {
    json!({
        "model": model, "temperature": 0, "max_completion_tokens": 250, "tools": tools(),
        "messages": [{"role": "user", "content": WEATHER}],
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_have_reasoning_content_and_tool_calls() {
    let taught = TaughtModel::new().await;
    let server = &taught.server;
    let model = taught.name.as_str();
    let request = weather(model);
    let answer = choice(server, &request).await;
    let message = &answer["message"];
    assert_eq!(message["reasoning_content"], REASONING, "{answer}");
    assert_eq!(
        (&message["content"], &answer["finish_reason"]),
        (&json!(CONTENT), &json!("tool_calls"))
    );
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2, "{answer}");
    assert_eq!(
        calls[0]["function"],
        json!({"name": "weather", "arguments": "{\"city\": \"Ulm\"}"})
    );
    assert_eq!(calls[1]["function"], json!({"name": "time", "arguments": "{}"}));
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));

    // A stream has the same parts.
    let events = events(server, request.clone()).await;
    let delta = &events[0]["choices"][0]["delta"];
    assert_eq!(delta, &json!({"role": "assistant", "content": ""}), "the role is first");
    let streamed = joined(&events, 0);
    for name in ["reasoning_content", "content"] {
        assert_eq!(streamed[name], message[name], "{streamed}");
    }
    assert_eq!(streamed["tool_calls"][0]["arguments"], calls[0]["function"]["arguments"]);
    assert_eq!(streamed["tool_calls"][1]["name"], "time");
    assert_eq!(streamed["finish_reason"], "tool_calls");

    // Variables of the template.
    let mut plain = request.clone();
    plain["chat_template_kwargs"] = json!({"enable_thinking": false});
    let answer = choice(server, &plain).await;
    assert_eq!(
        (&answer["message"]["content"], &answer["message"]["reasoning_content"]),
        (&json!(CONTENT), &Value::Null)
    );

    // One call, by choice of the client.
    let mut single = request.clone();
    single["parallel_tool_calls"] = json!(false);
    let http = server.http();
    wait_until_idle(&http).await;
    let before = http.metrics().await;
    let answer = choice(server, &single).await;
    assert_eq!(answer["message"]["tool_calls"].as_array().unwrap().len(), 1, "{answer}");
    assert_eq!(answer["finish_reason"], "tool_calls");
    // The server ends the answer before the model does, which is not a failure.
    wait_until_idle(&http).await;
    let after = http.metrics().await;
    assert_eq!(after["failed_requests_total"], before["failed_requests_total"]);
    assert_eq!(after["requests_total"], before["requests_total"] + 1);
    assert!(after["sampled_tokens_total"] > before["sampled_tokens_total"]);

    // A named tool must be called.
    let mut forced = request.clone();
    forced["tool_choice"] = json!({"type": "function", "function": {"name": "weather"}});
    let answer = choice(server, &forced).await;
    let calls = &answer["message"]["tool_calls"];
    assert_eq!(calls[0]["function"]["arguments"], "{\"city\": \"Ulm\"}", "{answer}");
    assert_eq!((calls.as_array().unwrap().len(), &answer["message"]["content"]), (1, &Value::Null));
    forced["tool_choice"] = json!({"type": "function", "function": {"name": "other"}});
    let (status, body) = post(server, &forced).await;
    assert_eq!((status, &body["error"]["param"]), (400, &json!("tool_choice")), "{body}");

    // Without tools, and with a message that is continued.
    let mut rivers = json!({"model": model, "temperature": 0, "max_tokens": 40,
        "messages": [{"role": "user", "content": RIVER}]});
    let answer = choice(server, &rivers).await;
    assert_eq!(
        (&answer["message"]["content"], &answer["finish_reason"]),
        (&json!(RIVERS), &json!("stop"))
    );
    assert_eq!(answer["message"]["tool_calls"], Value::Null);
    rivers["stop"] = json!(["x", " and"]);
    let answer = choice(server, &rivers).await;
    assert_eq!(
        (&answer["message"]["content"], &answer["finish_reason"]),
        (&json!("Rhine, Danube"), &json!("stop"))
    );
    rivers["stop"] = Value::Null;
    rivers["messages"] =
        json!([{"role": "user", "content": RIVER}, {"role": "assistant", "content": "Rhine,"}]);
    rivers["continue_final_message"] = json!(true);
    let answer = choice(server, &rivers).await;
    assert_eq!(answer["message"]["content"], " Danube and Elbe", "{answer}");

    // Only the two answers that ended after their first call may have been cancelled.
    wait_until_idle(&server.http()).await;
    assert!(server.http().metrics().await["failed_requests_total"] <= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_have_the_text_tokens_and_usage_of_one_response() {
    let server = TestServer::new().await;
    let request = json!({
        "model": BUILT_IN, "n": 3, "seed": 7, "max_tokens": 30, "logprobs": true, "top_logprobs": 2,
        "return_token_ids": true,
        "messages": [{"role": "system", "content": "Hi."}, {"role": "user", "content": "Who are you?"}],
    });
    let (status, body) = post(&server, &request).await;
    assert_eq!((status, &body["object"]), (200, &json!("chat.completion")), "{body}");
    let usage = &body["usage"];
    let total =
        usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], total);
    assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64());

    let mut streamed = request.clone();
    streamed["stream_options"] = json!({"include_usage": true});
    let events = events(&server, streamed).await;
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], usage["completion_tokens"]);
    assert!(others.iter().all(|event| event["usage"].is_null() && event["id"] == last["id"]));
    let prompt = body["prompt_token_ids"].as_array().unwrap();
    assert_eq!(usage["prompt_tokens"], prompt.len());
    let mut tokens = 0;
    for index in 0..3 {
        let choice = &body["choices"][usize::try_from(index).unwrap()];
        let message = joined(&events, index);
        assert_eq!(message["content"], choice["message"]["content"]);
        assert_eq!(message["finish_reason"], choice["finish_reason"]);
        let chunks = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
        let logprobs: Vec<&Value> = chunks
            .filter(|choice| choice["index"] == index)
            .flat_map(|choice| choice["logprobs"]["content"].as_array().into_iter().flatten())
            .collect();
        assert_eq!(json!(logprobs), choice["logprobs"]["content"]);
        let chunks = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
        let ids: Vec<&Value> = chunks
            .filter(|choice| choice["index"] == index)
            .flat_map(|choice| choice["token_ids"].as_array().into_iter().flatten())
            .collect();
        assert_eq!(json!(ids), choice["token_ids"]);
        tokens += ids.len();
        let text: Vec<u8> = logprobs
            .iter()
            .flat_map(|token| token["bytes"].as_array().unwrap())
            .map(|byte| u8::try_from(byte.as_u64().unwrap()).unwrap())
            .collect();
        assert_eq!(json!(String::from_utf8_lossy(&text)), message["content"]);
        assert!(logprobs.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
    }
    assert_eq!(usage["completion_tokens"], tokens);

    // A Tinker sample has the same tokens.
    let prompt: Vec<u32> =
        prompt.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
    let params = SamplingParams::new().max_tokens(30).seed(7);
    let sampler = server.client().create_sampling_client(BUILT_IN).await.unwrap();
    let samples = sampler.sample(prompt, SampleOptions::new(params).num_samples(3)).await.unwrap();
    for (sample, choice) in samples.sequences.iter().zip(body["choices"].as_array().unwrap()) {
        assert_eq!(json!(sample.tokens[..]), choice["token_ids"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_parameter() {
    let server = TestServer::new().await;
    let messages = json!([{"role": "user", "content": "a"}]);
    for (fields, status, param, part) in [
        (json!({"model": MODEL}), 400, "model", "completions"),
        (json!({"model": "nothing"}), 404, "model", "does not exist"),
        (json!({"messages": []}), 400, "messages", "at least one"),
        (json!({"response_format": {"type": "json_object"}}), 400, "response_format", "support"),
        (json!({"logit_bias": {"5": 1}}), 400, "logit_bias", "support"),
        (json!({"reasoning_effort": "low"}), 400, "reasoning_effort", "template"),
        (json!({"tools": tools(), "tool_choice": "required"}), 400, "tool_choice", "template"),
        (json!({"continue_final_message": true}), 400, "messages", "assistant"),
        (json!({"unknown": 1}), 400, "unknown", "support"),
        (json!({"n": 0}), 400, "n", "at least 1"),
        (json!({"temperature": -1}), 400, "temperature", "-1"),
        (json!({"max_tokens": 0}), 400, "max_tokens", "at least 1"),
    ] {
        let mut request = json!({"model": BUILT_IN, "messages": messages});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (got, body) = post(&server, &request).await;
        assert_eq!((got, &body["error"]["param"]), (status, &json!(param)), "{fields}: {body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(part), "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_rejects_a_conversation_is_a_client_error() {
    let folder = tempfile::tempdir().unwrap();
    tinkex_server::write_built_in_model(folder.path()).unwrap();
    let template = "{{ raise_exception('roles must alternate') }}";
    let config = json!({"eos_token": "<|im_end|>", "chat_template": template});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let path = folder.path().to_owned();
    let server = TestServer::with(|options| *options = options.clone().model(BASE, path)).await;
    let request = json!({"model": BASE, "messages": [{"role": "user", "content": "a"}]});
    let (status, body) = post(&server, &request).await;
    assert_eq!((status, &body["error"]["param"]), (400, &json!("messages")), "{body}");
    assert!(body["error"]["message"].as_str().unwrap().ends_with("roles must alternate"), "{body}");
}
