//! Training passes run one micro-batch at a time: samples finish in between, and a pass is aborted
//! or continued between two micro-batches.

use std::time::Duration;

use serde_json::{Value, json};
use tinkex_server::{Server, ServerOptions};
use tinkex_wire::{Datum, ForwardBackward, ForwardBackwardOutput, LossFn, Seq};

use crate::child_server::ChildOptions;
use crate::harness::{Http, TestServer, create_model, options, step};
use crate::process::Process;

/// Number of micro-batches of [`send_pass`] on a server with [`one_datum_at_a_time`]. Executing all
/// of them takes much longer than a test needs to observe the pass half-way.
const DATA: u32 = 30_000;

/// Makes every datum a micro-batch of its own.
fn one_datum_at_a_time(options: &mut ServerOptions) {
    options.limits.training_bytes = 1;
}

/// Sends a pass of `count` data.
async fn send_pass(http: &Http, model: &str, seq: u64, count: u32) -> Value {
    let datum = |n: u32| Datum::completion([n % 90 + 3, n / 90 % 90 + 3, 5], [n % 7 + 3]).unwrap();
    let request =
        ForwardBackward::new(model, (0..count).map(datum).collect(), LossFn::CrossEntropy);
    let body = request.seq_id(Seq::new(seq)).to_proto().unwrap();
    let (status, future) = http.send("POST", "/api/v1/forward_backward", &[], body.to_vec()).await;
    assert_eq!(status, 200, "{future}");
    future
}

/// Waits until the server has executed at least `count` micro-batches, and returns their number.
async fn micro_batches(http: &Http, count: u64) -> u64 {
    loop {
        let executed = http.metrics().await["micro_batches_total"];
        if executed >= count {
            return executed;
        }
        tokio::task::yield_now().await;
    }
}

/// Waits for a pass and returns the bits of its loss.
async fn loss(http: &Http, future: &Value) -> u64 {
    let output = ForwardBackwardOutput::from_proto(&http.proto_result(future).await).unwrap();
    output.metrics["loss:sum"].to_bits()
}

/// Executes a pass of `count` data and a step, and returns the bits of the loss and the norm of the
/// gradients.
async fn undisturbed(count: u32) -> (u64, Value) {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let pass = send_pass(&http, &model, 1, count).await;
    let (_, stepped) = http.post("/optim_step", step(&model, 2, 1e-3)).await;
    (loss(&http, &pass).await, http.result(&stepped).await["metrics"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_and_other_models_finish_while_a_pass_is_half_way() {
    let test_server = TestServer::with(one_datum_at_a_time).await;
    let http = test_server.http();
    let session = http.session().await;
    let sampler = http.sampler(&session).await;
    let model = http.model(&session).await;
    let (_, other) = http.post("/create_model", create_model(&session, 1)).await;
    let other = http.result(&other).await["model_id"].as_str().unwrap().to_owned();
    send_pass(&http, &model, 1, DATA).await;
    let (_, waiting) = http.post("/optim_step", step(&model, 2, 1e-3)).await;
    micro_batches(&http, 3).await;

    let sample = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "seq_id": 0,
        "sampling_params": {"max_tokens": 4, "stop": []}, "sampling_session_id": sampler,
    });
    let (_, sample) = http.post("/asample", sample).await;
    assert_eq!(http.sampled(&sample).await.len(), 4);
    let short = send_pass(&http, &other, 1, 2).await;
    let (_, stepped) = http.post("/optim_step", step(&other, 2, 1e-3)).await;
    loss(&http, &short).await;
    assert!(http.result(&stepped).await["metrics"].is_object());
    assert!(micro_batches(&http, 0).await < u64::from(DATA), "the long pass still runs");
    // The later request of the model waits for the pass.
    let metrics = http.metrics().await;
    assert_eq!(metrics["queued"], 2, "the running pass and the step behind it");
    test_server.server.stop().await;
    drop(waiting);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_server_continues_its_pass_after_the_restart() {
    const COUNT: u32 = 3_000;
    let expected = undisturbed(COUNT).await;
    let test_server = TestServer::with(one_datum_at_a_time).await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let pass = send_pass(&http, &model, 1, COUNT).await;
    let (_, stepped) = http.post("/optim_step", step(&model, 2, 1e-3)).await;
    micro_batches(&http, 3).await;
    test_server.server.stop().await;

    let server = Server::start(options(test_server.data.path())).await.unwrap();
    let http = Http::new(&server.base_url());
    let loss = loss(&http, &pass).await;
    assert_eq!((loss, http.result(&stepped).await["metrics"].clone()), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_session_aborts_its_pass() {
    let test_server = TestServer::with(one_datum_at_a_time).await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let pass = send_pass(&http, &model, 1, DATA).await;
    micro_batches(&http, 3).await;
    let finish = json!({"reason": {"type": "success"}, "detail": null});
    assert_eq!(http.post(&format!("/sessions/{session}/finish"), finish).await.0, 200);
    while http.metrics().await["queued"] > 0 {
        tokio::task::yield_now().await;
    }
    assert!(micro_batches(&http, 3).await < u64::from(DATA));
    drop(pass);
    // The worker executes other requests.
    let session = http.session().await;
    http.model(&session).await;
}

/// Gradients of passes without a step are part of a snapshot, which eviction and the end of the
/// process use.
#[tokio::test(flavor = "multi_thread")]
async fn accumulated_gradients_survive_eviction_and_restart_bit_for_bit() {
    /// Runs three passes on each of two models with `between` after every pass, then a step.
    /// Returns the losses and the norms of the gradients.
    async fn run(evict: bool) -> Vec<(Vec<u64>, Value)> {
        let change = |options: &mut ServerOptions| {
            if evict {
                options.limits.model_bytes = 1;
            }
            options.timeouts.snapshot_after = Duration::from_secs(3_600);
        };
        let data = tempfile::tempdir().unwrap();
        let start = async || {
            let mut options = options(data.path());
            change(&mut options);
            Server::start(options).await.unwrap()
        };
        let mut server = start().await;
        let http = Http::new(&server.base_url());
        let session = http.session().await;
        let mut models = Vec::new();
        for n in 0..2 {
            let (_, created) = http.post("/create_model", create_model(&session, n)).await;
            models.push(http.result(&created).await["model_id"].as_str().unwrap().to_owned());
        }
        let mut results = vec![(Vec::new(), Value::Null); 2];
        for seq in 1..4 {
            let http = Http::new(&server.base_url());
            for (model, (losses, _)) in models.iter().zip(&mut results) {
                let pass = send_pass(&http, model, seq, 5).await;
                losses.push(loss(&http, &pass).await);
            }
            if evict && seq == 2 {
                server.stop().await;
                server = start().await;
            }
        }
        let http = Http::new(&server.base_url());
        for (model, (_, norm)) in models.iter().zip(&mut results) {
            let (_, stepped) = http.post("/optim_step", step(model, 4, 1e-3)).await;
            *norm = http.result(&stepped).await["metrics"].clone();
        }
        results
    }
    assert_eq!(run(true).await, run(false).await);
}

/// A pass that takes longer than the time between two kills finishes, because its progress is
/// durable.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_pass_continues_from_its_progress() {
    let expected = undisturbed(DATA).await;
    let data = tempfile::tempdir().unwrap();
    let child = ChildOptions { training_bytes: Some(1), ..ChildOptions::default() };
    let mut process = Process::with(data.path(), 0, child.clone());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let model = http.model(&session).await;
    let pass = send_pass(&http, &model, 1, DATA).await;
    let (_, stepped) = http.post("/optim_step", step(&model, 2, 1e-3)).await;
    // More deaths during the pass than a request that kills the process is allowed.
    let mut deaths = 0;
    let file = data.path().join("passes").join(pass["request_id"].as_str().unwrap());
    while deaths < 7 {
        let http = Http::new(&process.url);
        let before = std::fs::read(&file).ok();
        // Wait until the process has persisted more progress, or has finished the pass.
        let is_unfinished = loop {
            // The first process has created the model, too.
            if http.metrics().await["requests_total"] > u64::from(deaths == 0) {
                break false;
            }
            if std::fs::read(&file).is_ok_and(|now| Some(now) != before) {
                break true;
            }
        };
        if !is_unfinished {
            break;
        }
        process.kill();
        process = Process::with(data.path(), 0, child.clone());
        deaths += 1;
    }
    assert!(deaths >= 3, "the pass survived {deaths} deaths");
    let http = Http::new(&process.url);
    let loss = loss(&http, &pass).await;
    let stepped = http.result(&stepped).await;
    assert_eq!((loss, stepped["metrics"].clone()), expected, "{stepped}");
    // The progress of a finished pass is removed.
    while std::fs::read_dir(data.path().join("passes")).unwrap().count() > 0 {
        tokio::task::yield_now().await;
    }
}
