//! Properties of the public API: sizes, behaviour outside a runtime, panics, dropping of futures.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::json;
use tinkex::rest::AccessScope;
use tinkex::testing::{FakeServer, Route};
use tinkex::{
    AdamParams, BaseUrl, CopyCheckpoint, Error, ErrorKind, Hint, LoraOptions, LossFn, RestoreMode,
    SampleOptions, SampleStreamOptions, SamplingParams, ServiceClient, TinkerPath,
};
use tokio::time::sleep;

use crate::numbered_server::NumberedServer;

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
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    without_runtime(service.server_capabilities());
    without_runtime(service.rest().list_sessions(&Default::default()));
    without_runtime(service.create_sampling_client("base"));
    without_runtime(service.create_lora_training_client("base"));
    // Never fails, but has nothing to run on.
    service.finish().now_or_never().expect("it returns at once");
    service.abort().now_or_never().expect("it returns at once");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (model, sampler) = runtime.block_on(async {
        let model = service.create_lora_training_client("base").await.unwrap();
        (model, service.create_sampling_client("base").await.unwrap())
    });
    without_runtime(model.optim_step(AdamParams::default()));
    without_runtime(sampler.sample([1], SamplingParams::new().max_tokens(1)));
}

/// A program with another version of these crates gets neither metrics nor trace context.
#[test]
fn the_guide_states_the_versions_that_a_program_must_match() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let guide = read("docs/client.md");
    let manifest = read("Cargo.toml");
    for name in
        ["metrics", "tracing", "opentelemetry", "opentelemetry_sdk", "tracing-opentelemetry"]
    {
        let entry = manifest.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")));
        let version = entry.unwrap().split('"').nth(1).unwrap();
        let row = guide
            .lines()
            .find(|line| line.starts_with("| `") && line.contains(&format!("`{name}`")));
        let row = row.unwrap_or_else(|| panic!("the guide has no row for {name}"));
        assert_eq!(row.split('|').nth(2).unwrap().trim(), version, "{name}");
    }
}

/// Runs a future without tokio, as another async runtime would.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        std::thread::park();
    }
}

/// All kinds of calls: requests, streams, training, transfers of files and the end.
#[test]
fn calls_outside_a_runtime_run_in_the_runtime_of_the_builder() {
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(1).enable_all().build().unwrap();
    let server = FakeServer::new();
    let service = server.builder().runtime(runtime.handle().clone()).build().unwrap();
    block_on(async {
        let sampler = service.create_sampling_client("base").await.unwrap();
        let hour = Duration::from_secs(3600);
        let params = SamplingParams::new().max_tokens(3);
        // The limits need a timer.
        let response = sampler.sample([1], &params).timeout(hour).await.unwrap();
        assert_eq!(response.sequences[0].tokens, [1, 2, 3]);
        let limited = sampler.with_options(tinkex::CallOptions::new().timeout(hour));
        let mut stream = limited.sample_stream([1], &params);
        let mut tokens = 0;
        while let Some(token) = stream.next().await {
            token.unwrap();
            tokens += 1;
        }
        assert_eq!(tokens, 3);
        let model = service.create_lora_training_client("base").await.unwrap();
        let data = vec![tinkex::Datum::completion([1], [2]).unwrap()];
        let step = model.step(data, LossFn::CrossEntropy, AdamParams::default());
        assert_eq!(step.timeout(hour).await.unwrap().mean_loss(), Some(0.5));
        let path = model.save_state("one").await.unwrap();
        model.get_info().await.unwrap();
        model.flush().await;
        let rest = service.rest();
        let runs: Vec<_> = rest.training_runs(Default::default()).collect().await;
        assert!(runs.is_empty());
        // The fake has no files: the error is that of the server, not one about the runtime.
        let folder = tempfile::tempdir().unwrap();
        let error = rest.download(&path, folder.path().join("unused")).await.unwrap_err();
        assert!(error.status().is_some(), "{error}");
        let handle = sampler.handle();
        service.restore_sampling_client(&handle).unwrap();
        sampler.close().await.unwrap();
        service.finish().await;
        service.abort().await;
    });
    // The download has a session of its own.
    assert_eq!(server.calls_to(Route::FinishSession).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn parameters_and_options_are_passed_by_value_or_by_reference() {
    let server = FakeServer::new();
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let params = SamplingParams::new().max_tokens(2);
    let two = SampleOptions::new(params.clone()).num_samples(2);
    let prompt = tinkex::ModelInput::from_tokens([1, 2]);
    for sample in [
        sampler.sample(&prompt, &params),
        sampler.sample(prompt.clone(), params.clone()),
        sampler.sample(&prompt, &two),
        sampler.sample(&prompt, two.clone()),
    ] {
        sample.await.unwrap();
    }
    let sent = server.calls_to(Route::Sample).into_iter().map(|call| call.json());
    let sent: Vec<_> =
        sent.map(|json| (json["num_samples"].clone(), json["prompt"].clone())).collect();
    assert_eq!(sent.iter().map(|(count, _)| count).collect::<Vec<_>>(), [1, 1, 2, 2]);
    assert!(sent.iter().all(|(_, prompt)| *prompt == sent[0].1));
    let options = SampleStreamOptions::new(params.clone());
    for mut stream in [
        sampler.sample_stream(&prompt, &params),
        sampler.sample_stream(&prompt, params),
        sampler.sample_stream(&prompt, &options),
    ] {
        stream.next().await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_detached_sample_continues_and_a_dropped_one_does_not() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let sample = || sampler.sample([1], SamplingParams::new().max_tokens(1));
    sample().detach();
    sleep(Duration::from_secs(10)).await;
    assert!(!server.requests("/asample").is_empty(), "the detached sample was sent");
    let sent = server.requests("/asample").len();
    let polls = server.requests("/retrieve_future").len();
    assert!(polls > 0, "the detached sample was polled for");
    drop(sample());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(server.requests("/asample").len(), sent, "the dropped sample was not sent");
}

#[tokio::test(start_paused = true)]
async fn paths_and_urls_are_accepted_as_text_and_as_types() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let path: TinkerPath = "tinker://r/weights/a".parse().unwrap();
    let rest = service.rest();
    rest.get_weights_info("tinker://r/weights/a").await.unwrap();
    rest.get_weights_info(path.to_string()).await.unwrap();
    let text = path.to_string();
    rest.get_weights_info(&text).await.unwrap();
    rest.get_weights_info(&path).await.unwrap();
    rest.get_weights_info(path.clone()).await.unwrap();
    let sent = server.requests("/weights_info");
    assert!(sent.iter().all(|request| request.json()["tinker_path"] == path.to_string()));

    let url: BaseUrl = "http://other.test".parse().unwrap();
    for builder in [
        server.builder().base_url("http://other.test"),
        server.builder().base_url("http://other.test".to_owned()),
        server.builder().base_url(&url),
        server.builder().base_url(url.clone()),
    ] {
        assert_eq!(*builder.clone().build().unwrap().base_url(), url);
    }
    let error = server.builder().base_url("other.test").build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().starts_with("invalid base URL \"other.test\": "), "{error}");
}

#[tokio::test(start_paused = true)]
async fn invalid_input_is_a_user_error_that_names_the_call() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let rest = service.rest();
    let params = SamplingParams::new().temperature(f64::NAN);
    let adam = AdamParams::with_learning_rate(f64::NAN);
    let wrong = "tinker:/r/weights/a";
    let only = RestoreMode::WeightsOnly;
    let empty = tinkex::SaveOptions::new("");
    let pass = LossFn::CrossEntropy;
    let errors = [
        ("sample", sampler.sample([1], params).await.unwrap_err()),
        ("forward_backward", model.forward_backward(vec![], pass.clone()).await.unwrap_err()),
        ("forward", model.forward(vec![], pass.clone()).await.unwrap_err()),
        ("optim_step", model.optim_step(adam).await.unwrap_err()),
        ("save_state", model.save_state(empty.clone()).await.unwrap_err()),
        ("save_weights_external", model.save_weights_external(empty).await.unwrap_err()),
        ("load_state", model.load_state(wrong, only).await.unwrap_err()),
        ("load_state_with_key", model.load_state_with_key(wrong, only, "k").await.unwrap_err()),
        ("create_lora_training_client", {
            let options = LoraOptions::new("base").rank(0);
            service.create_lora_training_client(options).await.unwrap_err()
        }),
        ("create_sampling_client_from", {
            service.create_sampling_client_from(wrong).await.unwrap_err()
        }),
        ("create_training_client_from", {
            service.create_training_client_from(wrong, only).await.unwrap_err()
        }),
        ("get_weights_info", rest.get_weights_info(wrong).await.unwrap_err()),
        ("delete_checkpoint", rest.delete_checkpoint(wrong).await.unwrap_err()),
        ("publish_checkpoint", rest.publish_checkpoint(wrong).await.unwrap_err()),
        ("unpublish_checkpoint", rest.unpublish_checkpoint(wrong).await.unwrap_err()),
        ("set_checkpoint_ttl", rest.set_checkpoint_ttl(wrong, None).await.unwrap_err()),
        ("get_external_weights_urls", rest.get_external_weights_urls(wrong).await.unwrap_err()),
        ("get_training_run_by_path", {
            rest.get_training_run_by_path(wrong, AccessScope::Owned).await.unwrap_err()
        }),
        ("copy_weights", rest.copy_weights(CopyCheckpoint::new(wrong)).await.unwrap_err()),
        ("download", rest.download(wrong, "folder").await.unwrap_err()),
    ];
    for (call, error) in errors {
        assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidInput, Some(call)));
        assert!(error.is_user_error() && !error.is_retryable(), "{call}");
        assert!(error.to_string().starts_with(&format!("{call} failed: ")), "{error}");
        assert_eq!(error.attempts(), 0, "{call}");
    }
}
