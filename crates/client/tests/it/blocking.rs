//! The blocking interface, end to end on the fake server.

use std::thread;
use std::time::Duration;

use serde_json::json;
use tinkex::blocking::ServiceClient;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{
    AdamParams, Datum, ErrorKind, Hint, LoraOptions, LossFn, RestoreMode, SampleOptions,
    SampleStreamOptions, SamplingParams,
};
use tokio::runtime::Builder;
use tokio::task::{block_in_place, spawn_blocking};

fn service(server: &FakeServer) -> ServiceClient {
    ServiceClient::from_builder(server.builder()).unwrap()
}

fn data() -> Vec<Datum> {
    vec![Datum::completion([1, 2], [3]).unwrap()]
}

fn params() -> SamplingParams {
    SamplingParams::new().max_tokens(3)
}

#[test]
fn a_program_without_a_runtime_trains_saves_and_samples() {
    let server = FakeServer::new();
    let service = service(&server);
    assert_eq!(service.server_capabilities().unwrap().supported_models.len(), 1);
    let options = LoraOptions::new("tiny").rank(8);
    let model = service.create_lora_training_client(options).wait().unwrap();
    assert_eq!(model.get_info().unwrap().lora_rank, Some(8));

    // Queued before the first result is awaited, and executed in call order.
    let pass = model.forward_backward(data(), LossFn::CrossEntropy);
    let step = model.optim_step(AdamParams::with_learning_rate(1e-3));
    let saved = model.save_state("one");
    assert_eq!(pass.wait().unwrap().loss(), Some(1.0));
    step.wait().unwrap();
    let step = model.step(data(), LossFn::CrossEntropy, AdamParams::with_learning_rate(1e-3));
    assert_eq!(step.wait().unwrap().loss(), Some(1.0));
    let path = saved.wait().unwrap();
    let resumed = service.create_training_client_from(&path, RestoreMode::WithOptimizer).wait();
    assert_ne!(resumed.unwrap().model_id(), model.model_id());

    let sampler = model.save_weights_and_get_sampling_client().wait().unwrap();
    let prompts = [[1, 2], [3, 4]];
    let two = SampleOptions::new(params()).num_samples(2);
    let pending = prompts.map(|prompt| sampler.sample(prompt, &two));
    for response in pending {
        let response = response.wait().unwrap();
        assert_eq!(response.sequences.len(), 2);
        assert_eq!(response.sequences[0].tokens, [1, 2, 3]);
    }
    assert_eq!(sampler.compute_logprobs([1, 2]).wait().unwrap().sum(), -0.5);
    let queued = model.save_state("two");
    service.finish();
    queued.wait().unwrap();
    assert_eq!(server.calls_to(Route::FinishSession).len(), 1);
    assert_eq!(server.calls_to(Route::Sample).len(), 3);
}

#[test]
fn lists_are_iterators_and_errors_are_those_of_the_async_clients() {
    let runs = json!({
        "training_runs": [{
            "training_run_id": "r", "base_model": "tiny", "model_owner": "me", "is_lora": true,
            "last_request_time": "2026-01-01T00:00:00Z",
        }],
        "cursor": {"offset": 0, "limit": 20, "total_count": 1},
    });
    let server = FakeServer::new()
        .on(Route::ListTrainingRuns, Reply::json(runs))
        .on(Route::ListTrainingRuns, Reply::status(403));
    let rest = service(&server).rest();
    let runs: Vec<_> = rest.training_runs(Default::default()).map(Result::unwrap).collect();
    assert_eq!(runs[0].training_run_id, "r");
    let mut denied = rest.training_runs(Default::default());
    assert_eq!(denied.next().unwrap().unwrap_err().kind(), ErrorKind::Permission);
    assert!(denied.next().is_none());
    let error = rest.delete_checkpoint("tinker:/x").unwrap_err();
    assert_eq!(error.operation(), Some("delete_checkpoint"));
}

#[test]
fn clients_are_shared_between_threads() {
    let server = FakeServer::new();
    let sampler = service(&server).create_sampling_client("tiny").wait().unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let sampler = sampler.clone();
            thread::spawn(move || sampler.sample([1], params()).wait().unwrap())
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap().sequences.len(), 1);
    }
    assert_eq!(server.calls_to(Route::CreateSession).len(), 1);
}

#[tokio::test]
async fn a_blocking_call_in_an_async_task_is_an_error() {
    let server = FakeServer::new();
    let service = service(&server);
    let error = service.server_capabilities().unwrap_err();
    assert_eq!((error.kind(), error.hint()), (ErrorKind::Config, Some(Hint::UseAsyncClient)));
    let error = service.create_lora_training_client("tiny").wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let rest = service.rest();
    let mut runs = rest.training_runs(Default::default());
    assert_eq!(runs.next().unwrap().unwrap_err().kind(), ErrorKind::Config);
    assert!(runs.next().is_none(), "an iterator ends after its first error");
    drop(runs);
    drop(rest);
    // Dropping the clients in a runtime does not panic.
    drop(service);
    assert!(server.calls().is_empty());
}

/// Threads that have a current runtime but execute no async task.
#[test]
fn blocking_calls_work_where_a_runtime_lets_its_threads_block() {
    let server = FakeServer::new();
    let service = service(&server);
    let sampler = service.create_sampling_client("tiny").wait().unwrap();
    let call = move || {
        service.server_capabilities().unwrap();
        let stream = sampler.sample_stream([1], params());
        assert_eq!(stream.map(Result::unwrap).count(), 3);
        sampler.sample([1], params()).wait().unwrap().sequences[0].tokens.len()
    };
    let threads = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let single = Builder::new_current_thread().enable_all().build().unwrap();
    for runtime in [&threads, &single] {
        let blocking = runtime.block_on(async { spawn_blocking(call.clone()).await });
        assert_eq!(blocking.unwrap(), 3);
        let _entered = runtime.enter();
        assert_eq!(call(), 3);
    }
    let in_task = call.clone();
    let spawned = threads.spawn(async move { block_in_place(in_task) });
    assert_eq!(threads.block_on(spawned).unwrap(), 3);
    assert_eq!(threads.block_on(async { block_in_place(call) }), 3);
}

/// The check of a blocking call must not use up the budget of the task, which would yield early.
#[tokio::test]
async fn a_refused_blocking_call_leaves_the_budget_of_the_task() {
    let service = service(&FakeServer::new());
    service.server_capabilities().unwrap_err();
    assert!(tokio::task::coop::has_budget_remaining());
}

#[test]
fn a_pending_request_is_polled_and_waited_for_with_a_limit() {
    let slow = Reply::sampled([5]).delay(Duration::from_secs(3600));
    let server = FakeServer::new().on(Route::Sample, slow);
    let sampler = service(&server).create_sampling_client("tiny").wait().unwrap();
    let pending = sampler.sample([1], params());
    assert!(!pending.is_ready());
    let pending = pending.wait_timeout(Duration::from_millis(1)).unwrap_err();
    assert!(!pending.is_ready(), "the request continues");
    drop(pending);

    let pending = sampler.sample([1], params());
    while !pending.is_ready() {
        thread::yield_now();
    }
    assert!(pending.is_ready(), "the result is kept");
    let response = pending.wait_timeout(Duration::ZERO).unwrap().unwrap();
    assert_eq!(response.sequences[0].tokens, [1, 2, 3]);
    let response = sampler.sample([1], params()).wait_timeout(Duration::MAX).unwrap();
    assert_eq!(response.unwrap().sequences.len(), 1);
    let invalid = sampler.sample([1], SamplingParams::new().temperature(f64::NAN));
    assert!(invalid.is_ready());
    assert_eq!(invalid.wait().unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_dropped_pass_is_executed_before_later_calls() {
    let server = FakeServer::new();
    let service = service(&server);
    let model = service.create_lora_training_client("tiny").wait().unwrap();
    drop(model.forward_backward(data(), LossFn::CrossEntropy));
    model.optim_step(AdamParams::with_learning_rate(1e-3)).wait().unwrap();
    let routes: Vec<_> = server.calls().into_iter().filter_map(|call| call.route).collect();
    let position = |route| routes.iter().position(|called| *called == route);
    assert!(position(Route::ForwardBackward).unwrap() < position(Route::OptimStep).unwrap());
}

#[test]
fn the_tokens_of_a_stream_are_iterated() {
    let server = FakeServer::new().on(Route::Completions, Reply::streamed([5, 6]));
    let sampler = service(&server).create_sampling_client("tiny").wait().unwrap();
    let options = SampleStreamOptions::new(params()).idle_timeout(Duration::from_secs(9));
    let stream = sampler.sample_stream([1, 2], options);
    let text: String = stream.map(|token| token.unwrap().text).collect();
    assert_eq!(text, " 5 6");
    assert_eq!(server.calls_to(Route::Completions)[0].timeout.as_secs(), 9);
    let mut dropped = sampler.sample_stream([1, 2], params());
    assert_eq!(dropped.next().unwrap().unwrap().token, 1);
    drop(dropped);
    assert_eq!(server.open_streams(), 0);
}
