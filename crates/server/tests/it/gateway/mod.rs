//! A server in front of another one: the same results as without it, also if one of them dies.

mod proxy;
mod start;
mod upstream_faults;

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;
use tinkex::loss::CustomLoss;
use tinkex::{
    AdamParams, Datum, ErrorKind, LoraOptions, LossFn, RestoreMode, SampleOptions, SamplingParams,
    ServiceClient, TrainingClient,
};
use tinkex_gateway::UpstreamServer;
use tinkex_server::{Server, ServerOptions};

use crate::harness::{Http, MODEL, TestServer, client, create_model, http_client, options};

/// A gateway in front of a test server.
struct Gateway {
    server: Server,
    data: TempDir,
    upstream: TestServer,
}

/// Returns the options of a gateway that has no model of its own except the built-in one.
fn gateway_options(data: &TempDir, upstreams: &[(&str, String)]) -> ServerOptions {
    let mut options = ServerOptions::new(data.path());
    options.threads = 1;
    options.checkpoint_every = 3;
    options.timeouts.poll_hold = Duration::from_secs(5);
    for (name, url) in upstreams {
        let upstream = UpstreamServer::new(url.clone(), None);
        options = options.upstream(*name, Arc::new(upstream));
    }
    options
}

impl Gateway {
    async fn new() -> Self {
        let data = tempfile::tempdir().unwrap();
        let upstream = TestServer::new().await;
        let server = Self::start(&data, &upstream, 0).await;
        Self { server, data, upstream }
    }

    async fn start(data: &TempDir, upstream: &TestServer, port: u16) -> Server {
        let mut options = gateway_options(data, &[("up", upstream.server.base_url())]);
        options.address.set_port(port);
        Server::start(options).await.unwrap()
    }

    /// Stops the gateway as a crash would, and starts it again on the same port.
    async fn crash(self) -> Self {
        let Self { server, data, upstream } = self;
        let port = server.address().port();
        drop(server);
        let server = Self::start(&data, &upstream, port).await;
        Self { server, data, upstream }
    }

    fn client(&self) -> ServiceClient {
        client(&self.server.base_url())
    }

    /// Ends all sessions on the upstream, which removes their models.
    async fn lose_models(&self) {
        finish_sessions(&self.upstream.server).await;
    }
}

async fn finish_sessions(server: &Server) {
    let http = Http::new(&server.base_url());
    let (_, sessions) = http.get("/api/v1/sessions?limit=100&offset=0").await;
    for id in sessions["sessions"].as_array().unwrap() {
        let end = json!({"reason": {"type": "success"}, "detail": null});
        let path = format!("/sessions/{}/finish", id.as_str().unwrap());
        let (status, body) = http.post(&path, end).await;
        assert_eq!(status, 200, "{body}");
    }
}

/// Waits until a metric of a server has at least the value `least`.
async fn wait_for_metric(server: &Server, name: &str, least: u64) {
    let url = format!("{}/metrics", server.base_url());
    let client = http_client();
    let is_reached = |text: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.is_some_and(|value| value.parse::<u64>().unwrap() >= least)
    };
    while !is_reached(&client.get(&url).send().await.unwrap().text().await.unwrap()) {
        tokio::task::yield_now().await;
    }
}

async fn model(service: &ServiceClient) -> TrainingClient {
    service.create_lora_training_client(LoraOptions::new(MODEL).rank(4).seed(7)).await.unwrap()
}

fn batch(n: u32) -> Vec<Datum> {
    vec![Datum::completion([n % 50 + 3, 4, 5], [9, 10]).unwrap(); 2]
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_cannot_discard_a_gradient() {
    let gateway = Gateway::new().await;
    let model = model(&gateway.client()).await;
    let direct = model_on_upstream(&gateway).await;
    model.forward_backward(batch(0), LossFn::CrossEntropy).await.unwrap();
    let error = model.discard_gradient().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Rejected);
    assert!(error.to_string().contains("upstream up cannot discard the gradient"), "{error}");
    // The rejected request does not block later ones.
    direct.forward_backward(batch(0), LossFn::CrossEntropy).await.unwrap();
    assert_eq!(train(&model, 1..3).await, train(&direct, 1..3).await);
}

/// Creates the same model without the gateway.
async fn model_on_upstream(gateway: &Gateway) -> TrainingClient {
    model(&gateway.upstream.client()).await
}

/// Runs steps and returns the bits of their losses.
async fn train(model: &TrainingClient, steps: std::ops::Range<u32>) -> Vec<u64> {
    let mut passes = Vec::new();
    for n in steps {
        let pass = model.forward_backward(batch(n), LossFn::CrossEntropy);
        let step = model.optim_step(AdamParams::with_learning_rate(1e-2));
        passes.push((pass, step));
    }
    let mut losses = Vec::new();
    for (pass, step) in passes {
        losses.push(pass.await.unwrap().loss().unwrap().to_bits());
        step.await.unwrap();
    }
    losses
}

async fn sample(service: &ServiceClient, path: &str) -> Vec<u32> {
    let sampler = service.create_sampling_client_from(path).await.unwrap();
    let params = SamplingParams::new().max_tokens(12).seed(3);
    sampler.sample([5, 6, 7], params).await.unwrap().sequences[0].tokens.to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_through_the_gateway_equals_a_direct_one() {
    let gateway = Gateway::new().await;
    let mut results = Vec::new();
    for service in [gateway.upstream.client(), gateway.client()] {
        let trained = model(&service).await;
        let mut losses = train(&trained, 0..7).await;
        let state = trained.save_state("state").await.unwrap();
        let weights = trained.save_weights_for_sampler("weights").await.unwrap();
        let resumed = service.create_training_client_from(state, RestoreMode::WithOptimizer);
        let resumed = resumed.await.unwrap();
        losses.extend(train(&resumed, 7..9).await);
        let tokens = sample(&service, &weights.to_string()).await;
        let base = service.create_sampling_client(MODEL).await.unwrap();
        let logprobs = base.compute_logprobs([3, 4, 5]).await.unwrap();
        results.push((losses, tokens, logprobs));
    }
    assert_eq!(results[1], results[0]);
    let capabilities = gateway.client().server_capabilities().await.unwrap();
    let names = capabilities.supported_models.iter().filter_map(|model| model.model_name.clone());
    assert!(names.clone().any(|name| name == MODEL), "{:?}", names.collect::<Vec<_>>());
    drop(gateway.data);
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_are_downloaded_through_the_gateway() {
    let gateway = Gateway::new().await;
    let mut files = Vec::new();
    for service in [gateway.upstream.client(), gateway.client()] {
        let model = model(&service).await;
        train(&model, 0..2).await;
        let path = model.save_weights_for_sampler("weights").await.unwrap();
        let target = tempfile::tempdir().unwrap();
        let folder = target.path().join("adapter");
        let downloaded =
            service.rest().download(path.to_string(), &folder).peft(true).await.unwrap();
        let weights = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
        files.push((downloaded.files, weights));
        service.rest().delete_checkpoint(path).await.unwrap();
        let saved = model.save_weights_external("external").await.unwrap();
        let urls = service.rest().get_external_weights_urls(&saved.path).await.unwrap().urls;
        let names: Vec<&str> = urls.keys().map(|name| &**name).collect();
        assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    }
    assert_eq!(files[1], files[0]);
    drop(gateway.data);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_gateway_continues_with_the_same_bits() {
    let direct = TestServer::new().await;
    let expected = train(&model(&direct.client()).await, 0..12).await;
    let mut gateway = Gateway::new().await;
    let service = gateway.client();
    let model = model(&service).await;
    let mut losses = Vec::new();
    for start in [0, 1, 5, 8] {
        let end = [1, 5, 8, 12].into_iter().find(|end| *end > start).unwrap();
        losses.extend(train(&model, start..end).await);
        gateway = gateway.crash().await;
    }
    assert_eq!(losses, expected);
    drop(gateway);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_the_upstream_has_lost_is_created_again() {
    let direct = TestServer::new().await;
    let expected = train(&model(&direct.client()).await, 0..9).await;
    let gateway = Gateway::new().await;
    let model = model(&gateway.client()).await;
    let mut losses = train(&model, 0..2).await;
    gateway.lose_models().await;
    losses.extend(train(&model, 2..7).await);
    gateway.lose_models().await;
    losses.extend(train(&model, 7..9).await);
    assert_eq!(losses, expected);
    drop(gateway.data);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_waits_for_an_upstream_that_is_down() {
    let direct = TestServer::new().await;
    let expected = train(&model(&direct.client()).await, 0..4).await;
    let gateway = Gateway::new().await;
    let model = model(&gateway.client()).await;
    let mut losses = train(&model, 0..2).await;
    let Gateway { server, data, upstream } = gateway;
    let port = upstream.server.address().port();
    let TestServer { server: up, data: up_data } = upstream;
    drop(up);
    let mut restarted = options(up_data.path());
    restarted.address.set_port(port);
    let (trained, up) = tokio::join!(train(&model, 2..4), Server::start(restarted));
    losses.extend(trained);
    assert_eq!(losses, expected);
    drop((server, data, up));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sample_waits_after_a_restart_until_its_upstream_responds() {
    let Gateway { server, data, upstream } = Gateway::new().await;
    let sampler = client(&server.base_url()).create_sampling_client(MODEL).await.unwrap();
    let port = server.address().port();
    let url = upstream.server.base_url();
    let up_port = upstream.server.address().port();
    let TestServer { server: up, data: up_data } = upstream;
    drop(up);
    let sample = sampler.sample([5, 6, 7], SamplingParams::new().max_tokens(4).seed(3));
    let restart = async {
        wait_for_metric(&server, "tinkex_queued", 1).await;
        drop(server);
        let mut restarted = gateway_options(&data, &[("up", url)]);
        restarted.address.set_port(port);
        let gateway = Server::start(restarted).await.unwrap();
        let mut restarted = options(up_data.path());
        restarted.address.set_port(up_port);
        (gateway, Server::start(restarted).await.unwrap())
    };
    let (sampled, servers) = tokio::join!(sample, restart);
    assert_eq!(sampled.unwrap().sequences.len(), 1);
    drop((servers, data));
}

#[tokio::test(flavor = "multi_thread")]
async fn models_of_an_upstream_that_has_not_responded_yet_are_unavailable_and_not_unknown() {
    let Gateway { server, data, upstream } = Gateway::new().await;
    let up_port = upstream.server.address().port();
    let upstreams = [("up", upstream.server.base_url())];
    let TestServer { server: up, data: up_data } = upstream;
    drop((server, up));
    let server = Server::start(gateway_options(&data, &upstreams)).await.unwrap();
    let http = Http::new(&server.base_url());
    let session = http.session().await;
    let (status, body) = http.post("/create_model", create_model(&session, 0)).await;
    let detail = body["detail"].as_str().unwrap();
    assert!(status == 503 && detail.contains("upstream up has not responded"), "{status} {detail}");
    let mut restarted = options(up_data.path());
    restarted.address.set_port(up_port);
    let up = Server::start(restarted).await.unwrap();
    // The client repeats its request until the upstream has responded.
    assert_eq!(train(&model(&client(&server.base_url())).await, 0..1).await.len(), 1);
    let mut unknown = create_model(&session, 1);
    unknown["base_model"] = "other".into();
    assert_eq!(http.post("/create_model", unknown).await.0, 404);
    drop(up);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_in_flight_has_an_outcome_if_its_session_ends() {
    let Gateway { server, data, upstream } = Gateway::new().await;
    let model = model(&client(&server.base_url())).await;
    drop(upstream);
    let pass = model.forward_backward(batch(0), LossFn::CrossEntropy);
    wait_for_metric(&server, "tinkex_retries_total", 1).await;
    finish_sessions(&server).await;
    let error = pass.await.unwrap_err().to_string();
    assert!(error.contains("session"), "{error}");
    drop(data);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_custom_loss_is_computed_by_the_gateway() {
    let gateway = Gateway::new().await;
    let loss =
        CustomLoss::trace("squares", |trace| trace.input("logprobs", 1).pow(2.0).sum()).unwrap();
    let mut losses = Vec::new();
    for service in [gateway.upstream.client(), gateway.client()] {
        let loss = service.create_custom_loss(&loss).await.unwrap();
        let model = model(&service).await;
        for _ in 0..2 {
            let pass = model.forward_backward(batch(1), &loss);
            let step = model.optim_step(AdamParams::with_learning_rate(1e-2));
            losses.push(pass.await.unwrap().loss().unwrap());
            step.await.unwrap();
        }
    }
    // The gateway computes the gradient from log-probabilities that are rounded to f32.
    for (direct, relayed) in losses[..2].iter().zip(&losses[2..]) {
        assert!((direct - relayed).abs() <= 1e-5 * direct.abs(), "{losses:?}");
    }
    drop(gateway.data);
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_one_model_are_shared_by_load_and_one_upstream_does_not_delay_another() {
    let first = TestServer::new().await;
    let second = TestServer::new().await;
    let data = tempfile::tempdir().unwrap();
    let upstreams = [("a", first.server.base_url()), ("b", second.server.base_url())];
    let gateway = Server::start(gateway_options(&data, &upstreams)).await.unwrap();
    let service = client(&gateway.base_url());
    let one = model(&service).await;
    let two = model(&service).await;
    for upstream in [&first, &second] {
        let (_, runs) = upstream.http().get("/api/v1/training_runs").await;
        assert_eq!(runs["training_runs"].as_array().unwrap().len(), 1);
    }
    drop(first);
    let blocked = one.forward_backward(batch(0), LossFn::CrossEntropy);
    assert_eq!(train(&two, 0..2).await.len(), 2);
    let (_, health) = Http::new(&gateway.base_url()).get("/api/v1/healthz").await;
    assert_eq!(health["upstreams"]["b"], "up", "{health}");
    blocked.detach();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_shows_runs_and_samples_of_an_upstream() {
    let gateway = Gateway::new().await;
    let service = gateway.client();
    let model = model(&service).await;
    train(&model, 0..2).await;
    let path = model.save_weights_for_sampler("weights").await.unwrap().to_string();
    let named = service.create_sampling_client_from(path.as_str()).await.unwrap();
    let unnamed = model.save_weights_and_get_sampling_client().await.unwrap();
    let mut tokens = Vec::new();
    for sampler in [named, unnamed] {
        let params = SamplingParams::new().max_tokens(3).seed(3);
        let sampled = sampler
            .sample([5, 6, 7], SampleOptions::new(params).topk_sample_logprobs(2))
            .await
            .unwrap();
        tokens.push(json!(sampled.sequences[0].tokens.to_vec()));
    }
    let http = Http::new(&gateway.server.base_url());
    let run = model.model_id();
    let (_, metrics) = http.get(&format!("/ui/api/metrics?id={run}")).await;
    let curves = &metrics["metrics"];
    assert_eq!(curves["learning_rate"]["value"], json!([0.01, 0.01]), "{curves}");
    let compute = curves["compute seconds"]["value"].as_array().unwrap();
    assert!(compute.len() == 2 && compute.iter().all(|time| time.as_f64() > Some(0.0)), "{curves}");
    let (_, requests) = http.get(&format!("/ui/api/requests?id={run}")).await;
    let rows = requests["training"].as_array().unwrap();
    assert!(rows.iter().any(|row| row[0] == "save"), "{requests}");
    // Newest first.
    let (_, samples) = http.get(&format!("/ui/api/samples?run={run}")).await;
    let shown = samples["samples"].as_array().unwrap();
    assert_eq!(shown.len(), 2, "{samples}");
    for (sample, tokens) in shown.iter().rev().zip(&tokens) {
        assert_eq!(sample["completions"][0]["ids"], *tokens);
        assert_eq!(sample["completions"][0]["top"].as_array().unwrap().len(), 3, "{sample}");
        assert_eq!(sample["run"], run.as_str());
    }
    assert_eq!(shown[1]["model"], path.as_str(), "{samples}");
    let (_, of_checkpoint) = http.get(&format!("/ui/api/samples?model={path}")).await;
    assert_eq!(of_checkpoint["samples"].as_array().unwrap().len(), 1, "{of_checkpoint}");
    drop(gateway.data);
}
