//! Properties of the public API: sizes, behaviour outside a runtime, panics, dropping of futures.

use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::json;
use tinkex::{
    AdamParams, Env, Error, ErrorKind, FinishReason, Hint, HttpFailure, HttpService, Lane,
    RetryPolicy, SamplingParams, ServiceClient,
};
use tokio::time::sleep;

use crate::fake_server::FakeServer;

#[test]
fn clients_and_errors_have_the_size_of_a_pointer() {
    assert_eq!(size_of::<ServiceClient>(), size_of::<usize>());
    assert_eq!(size_of::<Error>(), size_of::<usize>());
}

#[test]
fn futures_are_send_and_small() {
    fn check<F: Future + Send>(future: &F) {
        assert!(size_of_val(future) < 8 * 1024, "{} bytes", size_of_val(future));
    }
    let rest = crate::scripted_server::ScriptedServer::new().client().rest();
    check(&rest.list_sessions(&Default::default()));
    check(&rest.export_session_trace("s"));
}

/// Polls a future once, without a tokio runtime, and asserts that it fails with the hint about it.
fn without_runtime<T>(future: impl Future<Output = tinkex::Result<T>>) -> Error {
    let error = future.now_or_never().expect("the future fails at once").err().unwrap();
    assert_eq!((error.kind(), error.hint()), (ErrorKind::Config, Some(Hint::EnterRuntime)));
    error
}

#[test]
fn calls_outside_a_runtime_return_an_error() {
    let server = FakeServer::new(json!({}));
    let service = server.builder().build().unwrap();
    without_runtime(service.server_capabilities());
    without_runtime(service.rest().list_sessions(&Default::default()));
    without_runtime(service.create_sampling_client("base"));
    without_runtime(service.create_lora_training_client("base").create());
    without_runtime(service.close(FinishReason::Success, None));

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (model, sampler) = runtime.block_on(async {
        let model = service.create_lora_training_client("base").create().await.unwrap();
        (model, service.create_sampling_client("base").await.unwrap())
    });
    without_runtime(model.optim_step(AdamParams::default()));
    without_runtime(sampler.sample([1], SamplingParams::new().max_tokens(1)).send());
}

/// Panics on every request except those for the configuration and the session.
struct PanickingService(FakeServer);

impl HttpService for PanickingService {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let path = request.uri().path();
        assert!(!path.ends_with("optim_step") && !path.ends_with("asample"), "scripted panic");
        self.0.send(lane, request, timeout)
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_background_task_is_reported() {
    let service = ServiceClient::builder()
        .env(Env::empty())
        .base_url("http://server.test".parse().unwrap())
        .api_key("tml-x")
        .retry(RetryPolicy::disabled())
        .without_telemetry()
        .http(PanickingService(FakeServer::new(json!({}))))
        .build()
        .unwrap();
    let model = service.create_lora_training_client("base").create().await.unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let step = model.optim_step(AdamParams::default()).await.unwrap_err();
    let sample = sampler.sample([1], SamplingParams::new().max_tokens(1)).await.unwrap_err();
    for error in [step, sample] {
        assert_eq!(error.kind(), ErrorKind::Panicked);
        assert_eq!(error.to_string(), "background task panicked: scripted panic");
    }
}

#[tokio::test(start_paused = true)]
async fn a_detached_sample_continues_and_a_dropped_one_does_not() {
    let server = FakeServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let sample = || sampler.sample([1], SamplingParams::new().max_tokens(1)).send();
    sample().detach();
    sleep(Duration::from_secs(10)).await;
    assert!(!server.requests("/asample").is_empty(), "the detached sample was sent");
    let (sent, polls) =
        (server.requests("/asample").len(), server.requests("/retrieve_future").len());
    assert!(polls > 0, "the detached sample was polled for");
    drop(sample());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(server.requests("/asample").len(), sent, "the dropped sample was not sent");
}
