//! Inference endpoints: names of models, cancellation, limits, shutdown, access and errors.

use serde_json::{Value, json};
use tinkex_server::BUILT_IN;

use crate::harness::{Http, MODEL, TestServer, http_client, options, train, training_client};
use crate::sse::{EventStream, completions_url};

/// Returns a request for more tokens than a test waits for.
fn long(model: &str) -> Value {
    json!({
        "model": model, "prompt": [5, 6, 7], "max_tokens": 240, "n": 8_000, "stream": true,
        "ignore_eos": true, "return_token_ids": true,
    })
}

/// Waits until the server has no sample and no page of the KV cache in use.
pub(crate) async fn wait_until_idle(http: &Http) {
    loop {
        let metrics = http.metrics().await;
        if metrics["queued"] == 0 && metrics["queued_bytes"] == 0 && metrics["cache_pages"] == 0 {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Waits until a sample uses pages of the KV cache. The server counts them after each step, and the
/// first token is sent within one.
async fn wait_until_sampling(http: &Http) {
    while http.metrics().await["cache_pages"] == 0 {
        tokio::task::yield_now().await;
    }
}

async fn complete(http: &Http, request: &Value) -> (u16, Value) {
    http.send("POST", "/v1/completions", &[], request.to_string().into_bytes()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_client_cancels_its_request() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let url = completions_url(&test_server.server.base_url());
    let mut events = EventStream::post(&url, &long(MODEL)).await;
    events.next().await.unwrap();
    wait_until_sampling(&http).await;
    assert_eq!(http.metrics().await["queued"], 1);
    drop(events);
    wait_until_idle(&http).await;
    let metrics = http.metrics().await;
    assert_eq!(metrics["failed_requests_total"], 1);
    assert!(metrics["sampled_tokens_total"] >= 8_000, "tokens of a cancelled request count");

    // A client that disconnects before an unstreamed response cancels too.
    let mut unstreamed = long(MODEL);
    unstreamed["stream"] = json!(false);
    let request = http_client().post(&url).body(unstreamed.to_string()).send();
    tokio::select! {
        response = request => panic!("{response:?}"),
        () = wait_until_sampling(&http) => {}
    }
    wait_until_idle(&http).await;
    assert_eq!(http.metrics().await["failed_requests_total"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_server_ends_streams_with_an_error() {
    let test_server = TestServer::new().await;
    let url = completions_url(&test_server.server.base_url());
    let mut events = EventStream::post(&url, &long(MODEL)).await;
    events.next().await.unwrap();
    let read = async {
        let mut last = Value::Null;
        while let Some(event) = events.next().await {
            last = event;
        }
        last
    };
    let (last, _) = tokio::join!(read, test_server.server.stop());
    let message = last["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("shutting down"), "{last}");
    assert!(!events.is_done());
}

/// Returns the usage of all sessions in this hour and the hours next to it.
async fn usage(http: &Http) -> Vec<Value> {
    let hour = 3_600;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let from = now / hour * hour - hour;
    let to = now / hour * hour + 2 * hour;
    let path = format!("/api/v1/billing/usage/events?starting_on={from}&ending_before={to}");
    http.get(&path).await.1["data"].as_array().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_a_stream_that_the_server_ends_are_counted() {
    let test_server = TestServer::new().await;
    let url = completions_url(&test_server.server.base_url());
    let mut events = EventStream::post(&url, &long(MODEL)).await;
    events.next().await.unwrap();
    let TestServer { server, data } = test_server;
    server.stop().await;
    let server = tinkex_server::Server::start(options(data.path())).await.unwrap();
    let usage = usage(&Http::new(&server.base_url())).await;
    let sampled = usage.iter().filter(|event| event["event_info"]["type"] == "sampling_sample");
    assert!(sampled.count() > 0, "{usage:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_checkpoint_is_not_an_internal_error() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let service = test_server.client();
    let model = training_client(&service).await;
    let path = model.save_state("gone").await.unwrap().to_string();
    // A request finds the checkpoint, and the worker no longer finds its files.
    for folder in std::fs::read_dir(test_server.data.path().join("weights")).unwrap() {
        std::fs::remove_dir_all(folder.unwrap().path()).unwrap();
    }
    let (status, body) = complete(&http, &json!({"model": path, "prompt": [5]})).await;
    assert_eq!((status, &body["error"]["code"]), (404, &json!("model_not_found")), "{body}");
    assert_eq!(body["error"]["param"], "model");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_rejects_inference_requests() {
    let test_server = TestServer::with(|options| options.limits.queued_requests = 2).await;
    let http = test_server.http();
    let url = completions_url(&test_server.server.base_url());
    let first = EventStream::post(&url, &long(MODEL)).await;
    // Two prompts: the second one exceeds the limit, and the first one is cancelled.
    let mut two = long(MODEL);
    two["prompt"] = json!([[5], [6]]);
    let (status, body) = complete(&http, &two).await;
    assert_eq!((status, &body["error"]["type"]), (429, &json!("rate_limit_error")), "{body}");
    assert_eq!(body["error"]["code"], "rate_limit_exceeded");
    drop(first);
    wait_until_idle(&http).await;
    let short = json!({"model": MODEL, "prompt": [[5], [6]], "max_tokens": 2});
    assert_eq!(complete(&http, &short).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_have_many_names() {
    let test_server =
        TestServer::with(|options| *options = options.clone().alias("my/model", MODEL)).await;
    let http = test_server.http();
    let service = test_server.client();
    let model = training_client(&service).await;
    train(&model, 2).await;
    let run = model.model_id().to_string();
    let (status, body) = complete(&http, &json!({"model": run, "prompt": [5]})).await;
    assert_eq!(status, 404, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("no checkpoint yet"), "{body}");
    let sampler_path = model.save_weights_for_sampler("first").await.unwrap().to_string();
    train(&model, 2).await;
    let path = model.save_state("second").await.unwrap().to_string();
    let session = service.create_sampling_client_from(sampler_path.as_str()).await.unwrap();

    let tokens = async |name: &str| {
        let request = json!({
            "model": name, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        });
        let (status, body) = complete(&http, &request).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["model"], name);
        body["choices"][0]["token_ids"].clone()
    };
    let base = tokens(MODEL).await;
    let first = tokens(&sampler_path).await;
    let second = tokens(&path).await;
    assert!(base != first && first != second, "{base} {first} {second}");
    assert_eq!(tokens("my/model").await, base);
    assert_eq!(tokens(&run).await, second, "the latest checkpoint");
    assert_eq!(tokens(session.sampler_id().as_str()).await, first);

    let (status, list) = http.get("/oai/api/v1/models").await;
    assert_eq!(status, 200);
    let names: Vec<&str> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert_eq!(names, [BUILT_IN, MODEL, "my/model", &path, &sampler_path]);
    let (status, one) = http.get("/v1/models/my%2Fmodel").await;
    assert_eq!((status, &one["id"], &one["root"]), (200, &json!("my/model"), &json!(MODEL)));
    assert_eq!(http.get(&format!("/v1/models/{sampler_path}")).await.1["id"], sampler_path);

    for (name, hint) in [
        ("my-model", "nearest: my/model"),
        (&*sampler_path.replace("first", "frist"), &sampler_path),
        ("tinker://x", "tinker://"),
        ("gpt-4", "expected a base model"),
    ] {
        let (status, body) = complete(&http, &json!({"model": name, "prompt": [5]})).await;
        let error = &body["error"];
        assert_eq!((status, &error["code"]), (404, &json!("model_not_found")), "{name} {body}");
        assert_eq!(
            (&error["param"], &error["type"]),
            (&json!("model"), &json!("invalid_request_error"))
        );
        assert!(error["message"].as_str().unwrap().contains(hint), "{body}");
        assert_eq!(http.get(&format!("/v1/models/{}", name.replace('/', "%2F"))).await.0, 404);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_the_shape_of_the_api() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let stops = vec!["x"; 257];
    for (request, param, part) in [
        (json!({"prompt": [5]}), json!("model"), "required"),
        (json!({"model": MODEL}), json!("prompt"), "required"),
        (json!({"model": MODEL, "prompt": "text"}), json!("prompt"), "no tokenizer"),
        (json!({"model": MODEL, "prompt": []}), json!("prompt"), "at least one token"),
        (json!({"model": MODEL, "prompt": [5], "logit_bias": {"5": 1}}), json!("logit_bias"), ""),
        (json!({"model": MODEL, "prompt": [5], "best_of": 3}), json!("best_of"), ""),
        (json!({"model": MODEL, "prompt": [5], "max_tokens": 999}), Value::Null, "context window"),
        (json!({"model": MODEL, "prompt": [99999]}), json!("prompt"), "vocabulary"),
        (json!({"model": MODEL, "prompt": [5], "temperature": -1}), json!("temperature"), "-1"),
        (json!({"model": MODEL, "prompt": [5], "n": 0}), json!("n"), "at least 1"),
        (json!({"model": MODEL, "prompt": [5], "stop": stops}), json!("stop"), "limit is 256"),
    ] {
        let (status, body) = complete(&http, &request).await;
        let error = &body["error"];
        assert_eq!((status, &error["param"]), (400, &param), "{request} {body}");
        assert_eq!(error["type"], "invalid_request_error");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(part), "{body}");
        let exceeds = message.contains("context window");
        assert_eq!(error["code"] == "context_length_exceeded", exceeds, "{body}");
    }
    for body in ["", "[]", "{", "\u{1}"] {
        let (status, response) =
            http.send("POST", "/v1/completions", &[], body.as_bytes().to_vec()).await;
        assert_eq!((status, &response["error"]["type"]), (400, &json!("invalid_request_error")));
    }
    for (method, path, status) in [
        ("GET", "/v1/embeddings", 404),
        ("POST", "/oai/api/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
    ] {
        let (got, body) = http.send(method, path, &[], vec![]).await;
        assert_eq!(got, status, "{method} {path}");
        assert!(body["error"]["message"].is_string(), "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn both_headers_carry_the_api_key() {
    let test_server =
        TestServer::with(|options| *options = options.clone().api_key("tml-secret")).await;
    let http = test_server.http();
    for (name, value, status) in [
        ("authorization", "Bearer tml-secret", 200),
        ("authorization", "bearer tml-secret", 200),
        ("authorization", "Basic tml-secret", 401),
        ("authorization", "Bearer tml-secre", 401),
        ("x-api-key", "tml-secret", 200),
        ("x-api-key", "other", 401),
        ("accept", "*/*", 401),
    ] {
        let (got, body) = http.send("GET", "/v1/models", &[(name, value)], vec![]).await;
        assert_eq!(got, status, "{name}: {value}");
        if status == 401 {
            assert_eq!(body["error"]["code"], "invalid_api_key");
        }
    }
    let bearer = [("authorization", "Bearer tml-secret")];
    assert_eq!(http.send("GET", "/api/v1/sessions", &bearer, vec![]).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_allowed_origins_use_inference_endpoints_only() {
    let page = "http://localhost:3000";
    let test_server =
        TestServer::with(|options| *options = options.clone().allow_origin(page)).await;
    let base = test_server.server.base_url();
    let send = async |method: &str, path: &str, origin: &str| {
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        let request =
            http_client().request(method, format!("{base}{path}")).header("origin", origin);
        let request = request.header("access-control-request-headers", "authorization");
        let response = request.send().await.unwrap();
        let header = |name: &str| {
            let value = response.headers().get(name);
            value.map_or(String::new(), |value| value.to_str().unwrap().to_owned())
        };
        let allowed = header("access-control-allow-origin");
        (response.status().as_u16(), allowed, header("access-control-allow-headers"))
    };
    let yes = page.to_owned();
    assert_eq!(
        send("OPTIONS", "/v1/completions", page).await,
        (204, yes.clone(), "authorization".to_owned())
    );
    assert_eq!(send("GET", "/v1/models", page).await, (200, yes.clone(), String::new()));
    assert_eq!(send("GET", "/v1/nothing", page).await.0, 404);
    assert_eq!(send("GET", "/v1/nothing", page).await.1, yes, "errors are readable too");
    for (method, path, origin) in [
        ("GET", "/v1/models", "http://localhost:3001"),
        ("OPTIONS", "/v1/models", "http://localhost:3001"),
        ("GET", "/api/v1/sessions", page),
    ] {
        let (status, allowed, _) = send(method, path, origin).await;
        assert_eq!((status, allowed.as_str()), (403, ""), "{method} {path} {origin}");
    }
    for origin in ["*", "localhost:3000", "http://a/b", "http://"] {
        let data = tempfile::tempdir().unwrap();
        let options = crate::harness::options(data.path()).allow_origin(origin);
        let error = tinkex_server::Server::start(options).await.unwrap_err();
        assert!(error.to_string().starts_with("invalid origin"), "{error}");
    }
}
