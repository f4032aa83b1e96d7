//! The dashboard: its documents, access to them, and the stream of changes.

use serde_json::{Value, json};
use tinkex::{AdamParams, Datum, LossFn, ModelInput, SampleOptions, SamplingParams, TensorData};
use tinkex_server::{BUILT_IN, HistoryOptions, Server};
use tinkex_wire::TensorValues;

use crate::harness::{Http, MODEL, TestServer, http_client, options, train, training_client};
use crate::inference::wait_until_idle;
use crate::sse::{EventStream, completions_url};

/// Reads a document of the dashboard.
async fn document(http: &Http, name: &str) -> Value {
    let (status, body) = http.get(&format!("/ui/api/{name}")).await;
    assert_eq!(status, 200, "{name}: {body}");
    body
}

/// Returns the only run of a server.
async fn only_run(http: &Http) -> Value {
    let runs = document(http, "runs").await["runs"].clone();
    assert_eq!(runs.as_array().unwrap().len(), 1, "{runs}");
    runs[0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_every_step_survive_a_crash() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    assert_eq!(document(&http, "runs").await, json!({"runs": []}));
    let service = test_server.client();
    let model = training_client(&service).await;
    let losses = train(&model, 3).await;
    let run = only_run(&http).await;
    assert_eq!((&run["steps"], &run["status"]), (&json!(3), &json!("training")), "{run}");
    assert_eq!(run["losses"].as_array().unwrap().len(), 3);
    let id = run["id"].as_str().unwrap().to_owned();
    let path = format!("metrics?id={id}");
    let before = document(&http, &path).await;
    let curves = &before["metrics"];
    let sums: Vec<f64> = losses.iter().map(|bits| f64::from_bits(*bits)).collect();
    for (n, sum) in sums.iter().enumerate() {
        let shown = curves["loss:sum"]["value"][n].as_f64().unwrap();
        assert!((shown - sum).abs() < 1e-4 * sum.abs(), "{shown} {sum}");
    }
    assert_eq!(curves["loss per token"]["step"], json!([1, 2, 3]));
    assert_eq!(curves["learning_rate"]["value"], json!([0.01, 0.01, 0.01]));
    for name in ["unclipped_grad_l2:mean", "tokens/s", "tokens", "compute seconds"] {
        assert_eq!(curves[name]["value"].as_array().unwrap().len(), 3, "{name}: {curves}");
    }
    // Dropping a server is a crash.
    let TestServer { server, data } = test_server;
    drop((server, model, service));
    let server = Server::start(options(data.path())).await.unwrap();
    assert_eq!(document(&Http::new(&server.base_url()), &path).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_timeline_and_the_figures_are_those_of_the_server() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let model = training_client(&test_server.client()).await;
    train(&model, 2).await;
    let id = only_run(&http).await["id"].as_str().unwrap().to_owned();
    let requests = document(&http, &format!("requests?id={id}")).await;
    let kinds: Vec<&str> = requests["training"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row[0].as_str().unwrap())
        .collect();
    let step = ["forward_backward", "optim_step"];
    assert_eq!(kinds, ["create_model", step[0], step[1], step[0], step[1]]);
    let figures = document(&http, "server").await["figures"].clone();
    let metrics = http.metrics().await;
    // The others may change between the two requests.
    for name in
        ["requests_total", "failed_requests_total", "trained_tokens_total", "sampled_tokens_total"]
    {
        assert_eq!(figures["counters"][name]["value"], metrics[name], "{name}");
    }
    assert_eq!(figures["gauges"]["sessions"]["value"], metrics["sessions"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_have_tokens_alternatives_and_advantages() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let service = test_server.client();
    let model = training_client(&service).await;
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let prompt = [5_u32, 6, 7];
    let params = SamplingParams::default().max_tokens(4).seed(3);
    let sampled = sampler
        .sample(
            ModelInput::from_tokens(prompt),
            SampleOptions::new(params).num_samples(2).topk_sample_logprobs(2),
        )
        .await
        .unwrap();
    let samples = document(&http, "samples").await;
    let [sample] = &samples["samples"].as_array().unwrap()[..] else { panic!("{samples}") };
    assert_eq!(sample["prompt"]["ids"], json!(prompt));
    assert_eq!(sample["source"], "tinker");
    let completions = sample["completions"].as_array().unwrap();
    assert_eq!(completions.len(), 2);
    for (completion, sequence) in completions.iter().zip(&sampled.sequences) {
        assert_eq!(completion["ids"], json!(sequence.tokens.to_vec()));
        let count = sequence.tokens.len();
        assert_eq!(completion["logprobs"].as_array().unwrap().len(), count);
        assert_eq!(completion["top"].as_array().unwrap().len(), count, "{completion}");
        assert_eq!(completion["advantage"], Value::Null);
    }
    let run = sample["run"].as_str().unwrap().to_owned();
    let of_run = document(&http, &format!("samples?run={run}")).await;
    assert_eq!(of_run["samples"].as_array().unwrap().len(), 1);
    let none = document(&http, "samples?run=other:train:0").await;
    assert_eq!(none["samples"], json!([]));

    let tokens = sampled.sequences[1].tokens.to_vec();
    let (input, target): (Vec<u32>, Vec<i64>) = {
        let all: Vec<u32> = prompt.iter().chain(&tokens).copied().collect();
        let target = all[1..].iter().map(|token| i64::from(*token)).collect();
        (all[..all.len() - 1].to_vec(), target)
    };
    let count = target.len();
    let floats =
        |values: Vec<f32>| TensorData::new(TensorValues::Float32(values.into()), [count]).unwrap();
    let mut advantages = vec![0.0_f32; count];
    advantages[count - tokens.len()..].fill(-0.75);
    let datum = Datum::builder(ModelInput::from_tokens(input))
        .loss_input(
            "target_tokens",
            TensorData::new(TensorValues::Int64(target.into()), [count]).unwrap(),
        )
        .loss_input("logprobs", floats(vec![-1.0; count]))
        .loss_input("advantages", floats(advantages))
        .build()
        .unwrap();
    let adam = AdamParams::with_learning_rate(1e-3);
    model.step(vec![datum], LossFn::ImportanceSampling, adam).await.unwrap();
    let samples = document(&http, "samples").await;
    let completions = &samples["samples"][0]["completions"];
    assert_eq!(completions[0]["advantage"], Value::Null);
    assert_eq!(completions[1]["advantage"], -0.75);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_can_be_switched_off() {
    let test_server = TestServer::with(|options| options.history = HistoryOptions::off()).await;
    let http = test_server.http();
    train(&training_client(&test_server.client()).await, 1).await;
    let run = only_run(&http).await;
    assert_eq!((&run["steps"], &run["loss"]), (&json!(0), &Value::Null));
    assert_eq!(document(&http, "info").await["history"], false);

    let test_server = TestServer::with(|options| options.history.samples = 0).await;
    let http = test_server.http();
    let service = test_server.client();
    let sampler = service.create_sampling_client(MODEL).await.unwrap();
    let params = SamplingParams::default().max_tokens(2);
    sampler.sample(ModelInput::from_tokens([5, 6]), params).await.unwrap();
    let samples = document(&http, "samples").await;
    assert_eq!(samples["samples"][0]["prompt"], Value::Null, "{samples}");
    assert_eq!(samples["samples"][0]["completions"], json!([]));
    assert_eq!(samples["samples"][0]["prompt_tokens"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_needs_the_key_or_a_session() {
    let test_server =
        TestServer::with(|options| *options = options.clone().api_key("tml-secret")).await;
    let url = test_server.server.base_url();
    let http = test_server.http();
    let runs = "/ui/api/runs";
    assert_eq!(http.get(runs).await.0, 401);
    let key = [("x-api-key", "tml-secret")];
    assert_eq!(http.send("GET", runs, &key, vec![]).await.0, 200);
    let own = ("origin", url.as_str());
    let login = |key: &str| json!({"key": key}).to_string().into_bytes();
    for (key, headers, status) in [
        ("tml-secret", vec![], 403),
        ("tml-secret", vec![("origin", "http://example.com")], 403),
        ("tml-wrong", vec![own], 401),
        ("", vec![own], 401),
        ("tml-secret", vec![own], 200),
    ] {
        let sent = http.send("POST", "/ui/api/login", &headers, login(key)).await;
        assert_eq!(sent.0, status, "{key} {headers:?} {}", sent.1);
    }
    let raw = http_client();
    let response = raw
        .post(format!("{url}/ui/api/login"))
        .header("origin", &url)
        .body(login("tml-secret"))
        .send()
        .await
        .unwrap();
    let cookie = response.headers()["set-cookie"].to_str().unwrap().to_owned();
    assert!(cookie.contains("HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap().to_owned();
    let sent = [("cookie", cookie.as_str())];
    assert_eq!(http.send("GET", runs, &sent, vec![]).await.0, 200);
    let foreign = [("cookie", cookie.as_str()), ("sec-fetch-site", "cross-site")];
    assert_eq!(http.send("GET", runs, &foreign, vec![]).await.0, 403);
    // The session is for the page: the API still needs the key, and so do pages of other origins.
    assert_eq!(http.send("GET", "/api/v1/sessions", &sent, vec![]).await.0, 401);
    let models = "/v1/models";
    assert_eq!(http.send("GET", models, &sent, vec![]).await.0, 401);
    let same = [("cookie", cookie.as_str()), ("sec-fetch-site", "same-origin")];
    assert_eq!(http.send("GET", models, &same, vec![]).await.0, 200);
    let other = [("cookie", cookie.as_str()), ("origin", "http://example.com")];
    assert_eq!(http.send("GET", models, &other, vec![]).await.0, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_code_is_exchanged_once_and_the_page_has_a_policy() {
    let test_server =
        TestServer::with(|options| *options = options.clone().api_key("tml-secret")).await;
    // Installs the TLS provider.
    drop(http_client());
    let raw = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .no_gzip()
        .build()
        .unwrap();
    let url = test_server.server.dashboard_url();
    assert!(url.contains("/?code="), "{url}");
    let first = raw.get(&url).send().await.unwrap();
    assert_eq!(
        (first.status().as_u16(), &first.headers()["location"]),
        (303, &"/".parse().unwrap())
    );
    assert!(first.headers().contains_key("set-cookie"));
    let second = raw.get(&url).send().await.unwrap();
    assert_eq!(second.status(), 303);
    assert!(!second.headers().contains_key("set-cookie"));

    let base = test_server.server.base_url();
    let page = raw.get(&base).send().await.unwrap();
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(page.headers()["x-content-type-options"], "nosniff");
    let text = page.text().await.unwrap();
    let files = text.split('"').filter(|part| part.starts_with("/ui/"));
    let mut count = 0;
    for file in files {
        let gzip = raw.get(format!("{base}{file}")).header("accept-encoding", "br, gzip;q=1.0");
        let gzip = gzip.send().await.unwrap();
        assert_eq!(
            (gzip.status().as_u16(), &gzip.headers()["content-encoding"]),
            (200, &"gzip".parse().unwrap())
        );
        count += 1;
    }
    assert!(count > 5, "{text}");
    let missing = raw.get(format!("{base}/ui/../key")).send().await.unwrap();
    assert_ne!(missing.status(), 200);
    assert_eq!(raw.get(format!("{base}/ui/none.js")).send().await.unwrap().status(), 404);
}

/// An open stream of changes.
struct Events {
    response: reqwest::Response,
    pending: String,
}

impl Events {
    async fn open(url: &str, last: Option<&str>) -> Self {
        let mut request = http_client().get(format!("{url}/ui/api/events"));
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        Self { response: request.send().await.unwrap(), pending: String::new() }
    }

    /// Reads events until one has the name, and returns its id and data.
    async fn next(&mut self, name: &str) -> (String, Value) {
        loop {
            while let Some((event, rest)) = self.pending.split_once("\n\n") {
                let event = event.to_owned();
                let rest = rest.to_owned();
                self.pending = rest;
                let field = |name: &str| {
                    let line = event.lines().find_map(|line| line.strip_prefix(name));
                    line.unwrap_or_default().to_owned()
                };
                if field("event: ") == name {
                    return (field("id: "), serde_json::from_str(&field("data: ")).unwrap());
                }
            }
            let chunk = self.response.chunk().await.unwrap().expect("the stream ended");
            self.pending.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_of_changes_continues_after_a_restart() {
    let test_server = TestServer::new().await;
    let url = test_server.server.base_url();
    let mut events = Events::open(&url, None).await;
    events.next("start").await;
    let model = training_client(&test_server.client()).await;
    train(&model, 1).await;
    let last = loop {
        let (id, changes) = events.next("changes").await;
        if changes["runs"][0]["steps"] == 1 {
            break id;
        }
    };
    // Changes while no client is connected are sent after the reconnection.
    train(&model, 1).await;
    drop(events);
    let TestServer { server, data } = test_server;
    server.stop().await;
    let server = Server::start(options(data.path())).await.unwrap();
    let url = server.base_url();
    let (id, changes) = Events::open(&url, Some(&last)).await.next("changes").await;
    assert_eq!(changes["runs"][0]["steps"], 2, "{changes}");
    // A stream that is up to date has figures only.
    let (_, figures) = Events::open(&url, Some(&id)).await.next("server").await;
    assert!(figures["figures"]["gauges"]["queued"]["value"].is_number(), "{figures}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_of_changes_names_deleted_runs() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let mut events = Events::open(&test_server.server.base_url(), None).await;
    events.next("start").await;
    let model = training_client(&test_server.client()).await;
    train(&model, 1).await;
    let id = model.model_id().as_str().to_owned();
    let (_, changes) = events.next("changes").await;
    assert_eq!((&changes["runs"][0]["id"], &changes["deleted"]), (&json!(id), &json!([])));
    let session = id.split(':').next().unwrap();
    let details = json!({"reason": {"type": "success"}, "detail": null}).to_string();
    let finish = format!("/api/v1/sessions/{session}/finish");
    assert_eq!(http.send("POST", &finish, &[], details.into_bytes()).await.0, 200);
    let run = format!("/api/v1/training_runs/{id}");
    assert_eq!(http.send("DELETE", &run, &[], vec![]).await.0, 200);
    loop {
        let (_, changes) = events.next("changes").await;
        if changes["deleted"] == json!([id]) {
            break;
        }
    }
    assert_eq!(http.get(&format!("/ui/api/run?id={id}")).await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn inference_requests_that_end_early_are_in_the_log() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    // A stop string.
    let mut request = json!({"model": BUILT_IN, "temperature": 0, "max_tokens": 30,
        "messages": [{"role": "user", "content": "What does a cow say?"}]});
    let send = |request: &Value| request.to_string().into_bytes();
    let path = "/v1/chat/completions";
    let (_, whole) = http.send("POST", path, &[], send(&request)).await;
    let whole = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let stop: String = whole.chars().skip(whole.chars().count() / 2).take(3).collect();
    request["stop"] = json!([stop]);
    let (_, part) = http.send("POST", path, &[], send(&request)).await;
    let part = part["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(whole.starts_with(&part) && part.len() < whole.len(), "{part:?} {whole:?}");
    wait_until_idle(&http).await;
    let logged = newest_sample(&http, 2).await;
    let completion = &logged["completions"][0];
    let text: String =
        serde_json::from_value::<Vec<String>>(completion["text"].clone()).unwrap().concat();
    assert!(text.starts_with(&part) && text.contains(&stop), "{text:?} {part:?}");
    assert_eq!(completion["stop"], "stop", "{completion}");

    // A client that disconnects.
    let request = json!({"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 240, "n": 64,
        "stream": true, "ignore_eos": true, "return_token_ids": true});
    let url = completions_url(&test_server.server.base_url());
    let mut events = EventStream::post(&url, &request).await;
    events.next().await.unwrap();
    drop(events);
    wait_until_idle(&http).await;
    let logged = newest_sample(&http, 3).await;
    let completions = logged["completions"].as_array().unwrap();
    assert_eq!((completions.len(), &logged["prompt"]["ids"]), (64, &json!([5, 6, 7])));
    for completion in completions {
        let count = completion["ids"].as_array().unwrap().len();
        assert!((1..240).contains(&count), "{count}");
        assert_eq!(completion["logprobs"].as_array().unwrap().len(), count);
        assert_eq!(completion["stop"], "cancelled");
    }
}

/// Waits until the log has `count` samples, and returns the newest.
async fn newest_sample(http: &Http, count: u64) -> Value {
    loop {
        let samples = document(http, "samples").await;
        if samples["total"] == count {
            return samples["samples"][0].clone();
        }
        tokio::task::yield_now().await;
    }
}
