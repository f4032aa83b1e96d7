//! The `messages` endpoint of the Anthropic API.

use serde_json::{Value, json};
use tinkex_server::BUILT_IN;

use crate::harness::{MODEL, TestServer};
use crate::sse::EventStream;
use crate::taught::{CONTENT, REASONING, RIVER, RIVERS, TaughtModel, WEATHER, tools};

const PATH: &str = "/anthropic/api/v1/messages";

async fn post(server: &TestServer, path: &str, request: &Value) -> (u16, Value) {
    let headers = [("anthropic-version", "2023-06-01")];
    server.http().send("POST", path, &headers, request.to_string().into_bytes()).await
}

/// Sends a request and returns the message.
async fn message(server: &TestServer, request: &Value) -> Value {
    let (status, body) = post(server, PATH, request).await;
    assert_eq!(status, 200, "{body}");
    body
}

async fn events(server: &TestServer, mut request: Value) -> Vec<Value> {
    request["stream"] = json!(true);
    let url = format!("{}/v1/messages", server.server.base_url());
    let mut stream = EventStream::post(&url, &request).await;
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        events.push(event);
    }
    events
}

/// Returns the content blocks of a streamed message, with their deltas joined.
fn blocks(events: &[Value]) -> Vec<Value> {
    let mut blocks: Vec<Value> = Vec::new();
    let mut json_text = String::new();
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                json_text.clear();
            }
            "content_block_delta" => {
                let delta = &event["delta"];
                let block = blocks.last_mut().unwrap();
                for name in ["text", "thinking"] {
                    if let Some(text) = delta[name].as_str() {
                        block[name] = json!(format!("{}{text}", block[name].as_str().unwrap()));
                    }
                }
                json_text.push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            "content_block_stop" if !json_text.is_empty() => {
                blocks.last_mut().unwrap()["input"] = serde_json::from_str(&json_text).unwrap();
            }
            _ => {}
        }
    }
    blocks
}

/// Removes the ids of tool calls, which are random.
fn without_ids(blocks: &Value) -> Value {
    let mut blocks = blocks.clone();
    for block in blocks.as_array_mut().unwrap() {
        if let Some(id) = block.as_object_mut().unwrap().remove("id") {
            assert!(id.as_str().unwrap().starts_with("toolu_"));
        }
    }
    blocks
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_have_text_thinking_and_tool_blocks() {
    let taught = TaughtModel::new().await;
    let server = &taught.server;
    let model = taught.name.as_str();
    let tools: Vec<Value> = tools()
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| json!({"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}))
        .collect();
    let mut request = json!({
        "model": model, "temperature": 0, "max_tokens": 250, "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": [{"role": "user", "content": [{"type": "text", "text": WEATHER}]}],
    });
    let expected = json!([
        {"type": "thinking", "thinking": REASONING, "signature": ""},
        {"type": "text", "text": CONTENT},
        {"type": "tool_use", "name": "weather", "input": {"city": "Ulm"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]);
    let answer = message(server, &request).await;
    assert_eq!(without_ids(&answer["content"]), expected, "{answer}");
    assert_eq!(
        (&answer["stop_reason"], &answer["role"]),
        (&json!("tool_use"), &json!("assistant"))
    );
    let streamed = events(server, request.clone()).await;
    assert_eq!(without_ids(&json!(blocks(&streamed))), expected);
    let kinds: Vec<&str> = streamed.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["message_start", "content_block_start", "ping"]);
    assert_eq!(kinds[kinds.len() - 2..], ["message_delta", "message_stop"]);
    let end = &streamed[streamed.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert_eq!(end["usage"]["output_tokens"], answer["usage"]["output_tokens"]);

    request["thinking"] = json!({"type": "disabled"});
    let answer = message(server, &request).await;
    assert_eq!(answer["content"][0]["text"], CONTENT, "{answer}");
    request["tool_choice"] = json!({"type": "tool", "name": "weather"});
    let answer = message(server, &request).await;
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    assert_eq!(answer["content"][0]["name"], "weather", "{answer}");

    // The result of a tool call, a stop sequence, and a message that is continued.
    let mut rivers = json!({"model": model, "temperature": 0, "max_tokens": 40,
        "stop_sequences": [" and"], "messages": [{"role": "user", "content": RIVER}]});
    let answer = message(server, &rivers).await;
    assert_eq!(answer["content"], json!([{"type": "text", "text": "Rhine, Danube"}]), "{answer}");
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!(" and"))
    );
    rivers["stop_sequences"] = json!([]);
    let answer = message(server, &rivers).await;
    assert_eq!(
        (&answer["content"][0]["text"], &answer["stop_reason"]),
        (&json!(RIVERS), &json!("end_turn"))
    );
    rivers["max_tokens"] = json!(1);
    assert_eq!(message(server, &rivers).await["stop_reason"], "max_tokens");
    rivers["max_tokens"] = json!(40);
    rivers["messages"] =
        json!([{"role": "user", "content": RIVER}, {"role": "assistant", "content": "Rhine,"}]);
    let answer = message(server, &rivers).await;
    assert_eq!(answer["content"][0]["text"], " Danube and Elbe", "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_counted_as_the_usage_counts_them() {
    let server = TestServer::new().await;
    let mut request = json!({
        "model": BUILT_IN, "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hello there, how are you?"}],
    });
    let path = "/v1/messages/count_tokens";
    let (status, counted) = post(&server, path, &request).await;
    assert_eq!(status, 200, "{counted}");
    request["max_tokens"] = json!(1);
    let usage = message(&server, &request).await["usage"].clone();
    let input = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(counted, json!({"input_tokens": input}));
    let (status, body) = post(&server, path, &request).await;
    assert_eq!(status, 400, "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_the_shape_of_the_api() {
    let server = TestServer::new().await;
    let messages = json!([{"role": "user", "content": "a"}]);
    let stops = vec!["x"; 257];
    for (fields, status, kind, part) in [
        (json!({"model": MODEL}), 400, "invalid_request_error", "completions"),
        (json!({"model": "nothing"}), 404, "not_found_error", "does not exist"),
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens: required"),
        (json!({"max_tokens": 0}), 400, "invalid_request_error", "max_tokens"),
        (json!({"top_k": -1}), 400, "invalid_request_error", "top_k"),
        (
            json!({"messages": [{"role": "user", "content": 1}]}),
            400,
            "invalid_request_error",
            "messages[0].content",
        ),
        (json!({"mcp_servers": [1]}), 400, "invalid_request_error", "mcp_servers"),
        (json!({"stop_sequences": stops}), 400, "invalid_request_error", "stop_sequences: 257"),
        (json!({"max_tokens": 999_999}), 400, "invalid_request_error", "context window"),
    ] {
        let mut request = json!({"model": BUILT_IN, "messages": messages, "max_tokens": 1});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (got, body) = post(&server, PATH, &request).await;
        assert_eq!((got, &body["error"]["type"]), (status, &json!(kind)), "{fields}: {body}");
        assert_eq!(body["type"], "error");
        assert!(body["error"]["message"].as_str().unwrap().contains(part), "{body}");
    }
    let (status, body) = post(&server, "/anthropic/api/v1/files", &json!({})).await;
    assert_eq!((status, &body["error"]["type"]), (404, &json!("not_found_error")), "{body}");
}
