//! Reinforcement learning with a scripted server: which requests a run sends, and when.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{ErrorKind, SamplingParams, ServiceClient};
use tinkex_recipes::rl::{Completion, Environment, Rl, RlPrompt, RlReport, RlRun, Turn};

use crate::tiny;

/// Returns a run of two steps with two groups of two completions. The reward alternates.
fn rl() -> Rl {
    let count = AtomicUsize::new(0);
    Rl::new("base")
        .tokenizer(tiny::tokenizer(&["<eos>"], json!({ "eos_token": "<eos>" })))
        .prompts(["hello", "world"])
        .group_size(2)
        .groups_per_batch(2)
        .max_tokens(4)
        .steps(2)
        .reward(move |_| {
            f64::from(u8::from(count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2)))
        })
}

fn service(server: &FakeServer) -> ServiceClient {
    server.builder().build().unwrap()
}

async fn reports(run: &mut RlRun) -> Vec<RlReport> {
    let mut reports = Vec::new();
    while let Some(report) = run.next().await {
        reports.push(report.unwrap());
    }
    reports
}

#[tokio::test(start_paused = true)]
async fn a_step_samples_groups_and_trains_on_their_advantages() {
    let server = FakeServer::new();
    let mut run = rl().start(&service(&server)).await.unwrap();
    let reports = reports(&mut run).await;
    assert_eq!(reports.iter().map(|report| report.step).collect::<Vec<_>>(), [1, 2]);
    let report = &reports[0];
    assert_eq!((report.reward, report.reward_std), (0.5, 0.5));
    assert_eq!((report.groups, report.skipped_groups, report.policy_age), (2, 0, 0));
    // Four completions of four tokens with a log-probability of -0.5 each, in sampling and
    // training.
    assert_eq!((report.tokens, report.entropy, report.kl), (16, 0.5, Some(0.0)));
    assert_eq!(report.rollouts.len(), 4);
    assert_eq!(report.rollouts[0].advantage, Some(0.5));

    let samples = server.calls_to(Route::Sample);
    assert_eq!(samples.len(), 4);
    assert_eq!(samples[0].json()["num_samples"], 2);
    let seeds: Vec<_> =
        samples.iter().map(|call| call.json()["sampling_params"]["seed"].clone()).collect();
    assert!(seeds.windows(2).all(|pair| pair[0] != pair[1]), "{seeds:?}");
    let passes = server.calls_to(Route::ForwardBackward);
    assert_eq!((passes.len(), server.calls_to(Route::OptimStep).len()), (2, 2));
    let pass = passes[0].forward_backward().unwrap();
    let advantages: Vec<f32> = pass
        .data
        .iter()
        .map(|datum| *datum.loss_input("advantages").unwrap().as_f32().unwrap().last().unwrap())
        .collect();
    assert_eq!(advantages, [0.5, -0.5, 0.5, -0.5]);
    let outcome = run.outcome().unwrap();
    assert!(outcome.finished && outcome.sampler.is_some() && outcome.checkpoint.is_some());
}

/// Bug: log-probabilities at the sampling temperature were compared with log-probabilities at
/// temperature 1, so `kl` was not 0 for equal weights.
#[tokio::test(start_paused = true)]
async fn divergences_are_not_computed_across_temperatures() {
    let server = FakeServer::new();
    let warm = || rl().sampling(SamplingParams::default().max_tokens(4).temperature(0.7));
    let mut run = warm().start(&service(&server)).await.unwrap();
    assert!(
        reports(&mut run).await.iter().all(|report| report.loss.is_some() && report.kl.is_none())
    );
    let calls = server.calls().len();
    let error = warm().kl_coef(0.1).start(&service(&server)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.message().contains("a KL penalty needs samples at temperature 1"), "{error}");
    assert_eq!(server.calls().len(), calls);
}

#[tokio::test(start_paused = true)]
async fn constant_rewards_change_nothing() {
    let server = FakeServer::new();
    let mut run = rl().reward(|_| 0.0).start(&service(&server)).await.unwrap();
    let reports = reports(&mut run).await;
    assert_eq!(reports.len(), 2);
    assert!(reports.iter().all(|report| report.loss.is_none() && report.skipped_groups == 2));
    assert!(reports[0].to_string().contains("skipped"), "{}", reports[0]);
    assert!(server.calls_to(Route::ForwardBackward).is_empty());
    assert!(server.calls_to(Route::OptimStep).is_empty());
}

/// With `off_policy(1)`, the second batch is sampled from the weights that the first one was
/// sampled from, while the first one is trained on. Without it, the second batch waits for the new
/// weights.
#[tokio::test(start_paused = true)]
async fn sampling_overlaps_training_within_the_bound() {
    for (off_policy, ages) in [(0, [0, 0, 0]), (1, [0, 1, 1])] {
        let server = FakeServer::new()
            .on(Route::OptimStep, Reply::ok().delay(Duration::from_secs(30)).always());
        let run = rl().steps(3).off_policy(off_policy).start(&service(&server)).await;
        let reports = reports(&mut run.unwrap()).await;
        assert_eq!(reports.iter().map(|report| report.policy_age).collect::<Vec<_>>(), ages);
        let samples = server.calls_to(Route::Sample);
        let step = server.calls_to(Route::OptimStep)[0].at;
        let overlaps = samples[2].at < step + Duration::from_secs(30);
        assert_eq!(overlaps, off_policy > 0);
    }
}

/// Bug: a run kept the weights of all its steps on the server.
#[tokio::test(start_paused = true)]
async fn weights_that_no_batch_uses_any_more_are_released() {
    for off_policy in [0, 1] {
        let server = FakeServer::new();
        let run = rl().steps(5).off_policy(off_policy).start(&service(&server)).await;
        reports(&mut run.unwrap()).await;
        let mut closed = Vec::new();
        let mut closed_while_sampling = 0;
        for call in server.calls() {
            match call.route {
                Some(Route::CloseSampler) => {
                    closed.push(call.path.rsplit('/').next().unwrap().to_owned());
                }
                Some(Route::Sample) => {
                    let sampler = call.json()["sampling_session_id"].as_str().unwrap().to_owned();
                    assert!(!closed.contains(&sampler), "{sampler} was closed");
                    closed_while_sampling = closed.len();
                }
                _ => {}
            }
        }
        assert!(closed_while_sampling > 0, "weights are released during the run");
        assert_eq!(
            closed.len(),
            6,
            "the starting weights and the weights of five steps: {closed:?}"
        );
    }
    // Without a step, all batches are sampled from the same weights.
    let server = FakeServer::new();
    let mut run = rl().reward(|_| 0.0).steps(3).start(&service(&server)).await.unwrap();
    reports(&mut run).await;
    let last_sample = server.calls_to(Route::Sample).last().unwrap().at;
    let closed = server.calls_to(Route::CloseSampler);
    assert_eq!(closed.len(), 1, "at the end of the run");
    assert!(closed[0].at >= last_sample);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_run_resumes_after_its_last_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rl-run");
    let server = FakeServer::new();
    let steps = 4;
    let mut run = rl().steps(steps).run_folder(&path).start(&service(&server)).await.unwrap();
    let first = run.next().await.unwrap().unwrap();
    assert!(first.checkpoint.is_some(), "with a run folder every step is saved");
    run.stop_handle().stop();
    let rest = reports(&mut run).await;
    let stopped = run.outcome().unwrap();
    assert!(!stopped.finished && stopped.step == 1 + rest.len() as u64, "{stopped:?}");

    let mut run = rl().steps(steps).run_folder(&path).start(&service(&server)).await.unwrap();
    assert_eq!(run.resumed_from(), stopped.step);
    let reports = reports(&mut run).await;
    let resumed: Vec<u64> = reports.iter().map(|report| report.step).collect();
    assert_eq!(resumed, (stopped.step + 1..=steps).collect::<Vec<_>>());
    assert!(run.outcome().unwrap().finished);

    // A finished run has nothing left to do.
    let mut run = rl().steps(steps).run_folder(&path).start(&service(&server)).await.unwrap();
    assert!(run.next().await.is_none());
    assert!(run.outcome().unwrap().finished);
    let changed = rl().group_size(3).run_folder(&path).start(&service(&server)).await.unwrap_err();
    assert_eq!(changed.kind(), ErrorKind::InvalidInput);
    assert!(changed.to_string().contains("other settings: group_size"), "{changed}");
}

#[tokio::test(start_paused = true)]
async fn failed_rewards_end_the_run_with_the_cause() {
    let server = FakeServer::new();
    let run =
        rl().reward_async(|_| async { Err("no judge".into()) }).start(&service(&server)).await;
    let error = run.unwrap().next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("reward of a completion: no judge"), "{error}");
    let run = rl().reward(|_| f64::NAN).start(&service(&server)).await;
    let error = run.unwrap().next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("the reward is NaN"), "{error}");
    let incomplete = Rl::new("base").prompts(["x"]).start(&service(&server)).await.unwrap_err();
    assert!(incomplete.to_string().contains("no reward"), "{incomplete}");
}

/// Replies once, then rewards the second completion.
struct TwoTurns(Arc<AtomicUsize>);

impl Environment for TwoTurns {
    fn step<'a>(
        &'a mut self,
        completion: &'a Completion,
    ) -> futures_util::future::BoxFuture<'a, Result<Turn, tinkex_recipes::rl::RewardError>> {
        let turn = match completion.turn {
            0 => Turn::Reply { text: "!?".to_owned(), reward: 0.25 },
            _ => {
                let number = self.0.fetch_add(1, Ordering::Relaxed);
                Turn::End(number.is_multiple_of(2).into())
            }
        };
        Box::pin(std::future::ready(Ok(turn)))
    }
}

#[tokio::test(start_paused = true)]
async fn an_environment_replies_and_its_text_is_not_learned() {
    let server = FakeServer::new();
    let count = Arc::new(AtomicUsize::new(0));
    let environment = rl().environment(move |_: &RlPrompt| TwoTurns(Arc::clone(&count)));
    let mut run = environment.groups_per_batch(1).steps(1).start(&service(&server)).await.unwrap();
    let report = reports(&mut run).await.remove(0);
    assert_eq!((report.reward, report.tokens), (0.75, 16));
    assert!(report.rollouts[0].completion.contains("!?"), "{:?}", report.rollouts[0]);
    let pass = server.calls_to(Route::ForwardBackward)[0].forward_backward().unwrap();
    let advantages = pass.data[0].loss_input("advantages").unwrap().as_f32().unwrap().to_vec();
    // Four tokens of the model, two of the environment, four of the model.
    let tail = &advantages[advantages.len() - 10..];
    assert_eq!(tail, [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5]);
}

#[tokio::test(start_paused = true)]
async fn a_kl_penalty_compares_with_the_starting_weights() {
    let server = FakeServer::new();
    let mut run = rl().kl_coef(0.1).steps(1).start(&service(&server)).await.unwrap();
    let report = reports(&mut run).await.remove(0);
    assert_eq!(report.kl_reference, Some(0.0));
    let scored = server.calls_to(Route::Sample);
    let scored = scored.iter().filter(|call| call.json()["prompt_logprobs"] == true).count();
    assert_eq!(scored, 4);
}

#[tokio::test(start_paused = true)]
async fn evaluation_prompts_decide_which_checkpoint_is_the_best() {
    let server = FakeServer::new();
    let evals = AtomicUsize::new(0);
    let trained = AtomicUsize::new(0);
    let reward = move |completion: &Completion| {
        if completion.prompt.metadata.contains_key("eval") {
            // Step 0, 1, 2, 3: 0.1, 0.7, 0.2, 0.3.
            return [0.1, 0.7, 0.2, 0.3][evals.fetch_add(1, Ordering::Relaxed)];
        }
        f64::from(u8::from(trained.fetch_add(1, Ordering::Relaxed).is_multiple_of(2)))
    };
    let service = service(&server);
    let run = rl()
        .reward(reward)
        .eval_prompts([RlPrompt::text("check").with("eval", true)], 1)
        .save_every(1)
        .keep(1)
        .steps(3)
        .start(&service);
    let mut run = run.await.unwrap();
    let reports = reports(&mut run).await;
    let evals: Vec<_> = reports.iter().map(|report| report.eval_reward.unwrap()).collect();
    assert_eq!(evals, [0.1, 0.7, 0.2, 0.3]);
    assert_eq!(reports[0].step, 0);
    let best = run.outcome().unwrap().best.unwrap();
    assert_eq!((best.step, best.reward), (1, 0.7));
    // The best checkpoint and the last one are kept.
    let deleted = server.calls_to(Route::DeleteCheckpoint).len();
    assert_eq!(deleted, 1);
}
