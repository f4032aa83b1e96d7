//! Upstreams that respond with errors, or with something that cannot be decoded.

use tempfile::TempDir;
use tinkex::{AdamParams, ErrorCategory, LossFn, SamplingParams, ServiceClient};
use tinkex_server::Server;

use super::proxy::{Change, Proxy, Target};
use super::{batch, client, gateway_options, model, train};
use crate::harness::{MODEL, TestServer};

const PASS: &str = "forward_backward";
const STEP: &str = "optim_step";

/// A gateway whose requests to the upstream pass through a proxy.
struct ProxiedGateway {
    server: Server,
    proxy: Proxy,
    data: TempDir,
    upstream: TestServer,
}

impl ProxiedGateway {
    async fn new() -> Self {
        let data = tempfile::tempdir().unwrap();
        let upstream = TestServer::new().await;
        let proxy = Proxy::new(&upstream.server.base_url()).await;
        let server = Self::start(&data, &proxy).await;
        Self { server, proxy, data, upstream }
    }

    async fn start(data: &TempDir, proxy: &Proxy) -> Server {
        let mut options = gateway_options(data, &[("up", proxy.url.clone())]);
        // No recovery checkpoint: a restore repeats all requests.
        options.checkpoint_every = 100;
        Server::start(options).await.unwrap()
    }

    fn client(&self) -> ServiceClient {
        client(&self.server.base_url())
    }
}

/// Returns the bits of the losses of an undisturbed run.
async fn undisturbed(steps: u32) -> Vec<u64> {
    let direct = TestServer::new().await;
    train(&model(&direct.client()).await, 0..steps).await
}

#[tokio::test(flavor = "multi_thread")]
async fn temporary_statuses_of_a_proxy_do_not_fail_requests() {
    let expected = undisturbed(6).await;
    let gateway = ProxiedGateway::new().await;
    let model = model(&gateway.client()).await;
    for (status, endpoint) in
        [(408, PASS), (425, STEP), (429, PASS), (502, STEP), (503, PASS), (504, STEP)]
    {
        gateway.proxy.change(Target::Submission(endpoint), 1, 1, Change::Refuse(status, "busy"));
    }
    assert_eq!(train(&model, 0..6).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_the_upstream_rejects_fails_with_its_reason() {
    let expected = undisturbed(3).await;
    let gateway = ProxiedGateway::new().await;
    let model = model(&gateway.client()).await;
    let mut losses = train(&model, 0..2).await;
    let reason = r#"{"detail": "batch size must be even"}"#;
    gateway.proxy.change(Target::Submission(PASS), 0, 1, Change::Refuse(422, reason));
    let failed = model.forward_backward(batch(9), LossFn::CrossEntropy).await.unwrap_err();
    assert!(failed.to_string().contains("batch size must be even"), "{failed}");
    assert_eq!(failed.category(), Some(ErrorCategory::User));
    // The rejected pass has left no gradients.
    losses.extend(train(&model, 2..3).await);
    assert_eq!(losses, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_which_the_upstream_always_fails_does_not_block_its_run() {
    let expected = undisturbed(4).await;
    let gateway = ProxiedGateway::new().await;
    let model = model(&gateway.client()).await;
    let mut losses = train(&model, 0..2).await;
    for target in [Target::Submission(PASS), Target::Result(PASS)] {
        // A restore repeats passes, which succeed, before the request is sent again.
        let repeated = losses.len();
        gateway.proxy.change(target, 0, 1, Change::Refuse(500, "Internal Server Error"));
        for _ in 0..2 {
            gateway.proxy.change(target, repeated, 1, Change::Refuse(500, "Internal Server Error"));
        }
        let pass = model.forward_backward(batch(9), LossFn::CrossEntropy);
        let failed = pass.await.unwrap_err();
        let text = failed.to_string();
        assert!(text.contains("3 attempts") && text.contains("status 500"), "{text}");
        assert_eq!(failed.category(), Some(ErrorCategory::Server));
        // The requests after it are executed, without its gradients.
        let next = u32::try_from(losses.len()).unwrap();
        losses.extend(train(&model, next..next + 1).await);
    }
    assert_eq!(losses, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_whose_result_cannot_be_decoded_is_not_applied() {
    let expected = undisturbed(4).await;
    let gateway = ProxiedGateway::new().await;
    let model = model(&gateway.client()).await;
    let mut losses = train(&model, 0..2).await;
    // Once: the model is restored and the step repeated.
    gateway.proxy.change(Target::Result(STEP), 0, 1, Change::Replace("{"));
    losses.extend(train(&model, 2..3).await);
    // Always: the step fails and is not applied.
    gateway.proxy.change(Target::Result(STEP), 0, 1, Change::Replace("{"));
    for _ in 0..2 {
        gateway.proxy.change(Target::Result(STEP), losses.len(), 1, Change::Replace("{"));
    }
    let pass = model.forward_backward(batch(3), LossFn::CrossEntropy);
    let step = model.optim_step(AdamParams::with_learning_rate(1e-2));
    losses.push(pass.await.unwrap().loss().unwrap().to_bits());
    let failed = step.await.unwrap_err();
    assert!(failed.to_string().contains("cannot decode"), "{failed}");
    assert_eq!(losses, expected);
    // The gradients of the pass are still accumulated: the step can be repeated.
    model.optim_step(AdamParams::with_learning_rate(1e-2)).await.unwrap();
    let direct = TestServer::new().await;
    let reference = super::model(&direct.client()).await;
    train(&reference, 0..4).await;
    assert_eq!(train(&model, 4..6).await, train(&reference, 4..6).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sample_that_cannot_be_decoded_fails_after_three_attempts() {
    let gateway = ProxiedGateway::new().await;
    let sampler = gateway.client().create_sampling_client(MODEL).await.unwrap();
    gateway.proxy.change(Target::Result("asample"), 0, 1_000, Change::Replace("{"));
    let params = SamplingParams::new().max_tokens(2).seed(3);
    let failed = sampler.sample([5, 6], params).await.unwrap_err();
    assert!(failed.to_string().contains("did not sample in 3 attempts"), "{failed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_requests_fail_if_a_model_cannot_be_restored() {
    let gateway = ProxiedGateway::new().await;
    let model = model(&gateway.client()).await;
    train(&model, 0..2).await;
    super::finish_sessions(&gateway.upstream.server).await;
    let reason = r#"{"detail": "this base model was removed"}"#;
    gateway.proxy.change(Target::Submission("create_model"), 0, 1_000, Change::Refuse(400, reason));
    let requests = [
        model.forward_backward(batch(2), LossFn::CrossEntropy),
        model.forward_backward(batch(3), LossFn::CrossEntropy),
        model.forward_backward(batch(4), LossFn::CrossEntropy),
    ];
    for request in requests {
        let text = request.await.unwrap_err().to_string();
        let is_explained = text.contains("cannot create the model again");
        assert!(is_explained && text.contains("this base model was removed"), "{text}");
    }
    assert_eq!(gateway.proxy.accepted(PASS), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_gateway_saves_idle_models_and_repeats_nothing() {
    let expected = undisturbed(4).await;
    let ProxiedGateway { server, proxy, data, upstream } = ProxiedGateway::new().await;
    let service = client(&server.base_url());
    let model = model(&service).await;
    let mut losses = train(&model, 0..2).await;
    let port = server.address().port();
    assert_eq!(server.stop().await.models_saved, 1);
    assert_eq!((proxy.accepted(PASS), proxy.accepted("save_weights")), (2, 1));
    let mut options = gateway_options(&data, &[("up", proxy.url.clone())]);
    options.address.set_port(port);
    let server = Server::start(options).await.unwrap();
    losses.extend(train(&model, 2..4).await);
    assert_eq!(losses, expected);
    assert_eq!((proxy.accepted(PASS), proxy.accepted("load_weights")), (4, 1));
    drop((server, upstream));
}
