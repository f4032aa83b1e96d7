//! Contract suite: behaviour that clients may expect of every server.
//!
//! The tests here run it against this server; `cargo xtask contract --base-url URL` runs it against
//! another one. It requires nothing that only this server guarantees: numbers are compared with a
//! tolerance, and saved checkpoints are deleted again. A check whose endpoints a server does not
//! implement is skipped, not failed.

mod endpoints;
mod lookup;
mod sampling;
mod training;

use std::pin::Pin;

use tinkex::{BaseUrl, Env, ServiceClient, TinkerPath};
use tinkex_wire::Route;

use crate::harness::{MODEL, TestServer, setting};

/// Server under test: a client for it, its API key, and the base model that the checks use.
#[derive(Clone)]
pub(crate) struct Subject {
    pub(crate) service: ServiceClient,
    pub(crate) api_key: String,
    pub(crate) model: String,
}

impl Subject {
    /// Returns a test server as the server under test. It has no API key and accepts any.
    fn of(test_server: &TestServer) -> Self {
        let api_key = "tml-test".to_owned();
        let model = MODEL.to_owned();
        Self { service: test_server.client(), api_key, model }
    }

    /// Deletes a checkpoint, if the server implements that.
    pub(crate) async fn delete(&self, path: &TinkerPath) {
        if endpoints::is_implemented(self, Route::DeleteCheckpoint).await {
            self.service.rest().delete_checkpoint(path).await.unwrap();
        }
    }
}

/// A check, its name, and the endpoints that it needs besides training and sampling.
struct Check {
    name: &'static str,
    needs: &'static [Route],
    run: fn(Subject) -> Pin<Box<dyn Future<Output = ()> + Send>>,
}

macro_rules! checks {
    ($($module:ident::$name:ident $([$($route:ident),*])?),* $(,)?) => {
        const CHECKS: &[Check] = &[$(Check {
            name: stringify!($name),
            needs: &[$($(Route::$route),*)?],
            run: |subject| Box::pin($module::$name(subject)),
        }),*];
    };
}

checks![
    training::the_loss_decreases,
    training::requests_run_in_call_order,
    training::a_forward_pass_changes_nothing,
    training::batch_gradients_are_the_sum_over_datums,
    training::every_documented_loss_runs,
    training::custom_losses_train_like_the_built_in_one,
    training::training_continues_from_a_saved_state,
    training::invalid_data_fails_and_the_model_stays_usable,
    sampling::samples_have_the_requested_length_and_number,
    sampling::equal_seeds_repeat_and_samples_differ,
    sampling::a_stream_has_the_tokens_of_a_sample,
    sampling::a_stop_token_ends_a_sample_and_is_included,
    sampling::prompt_logprobs_equal_those_of_training,
    sampling::the_most_likely_tokens_are_reported,
    sampling::saved_weights_can_be_sampled,
    sampling::dropped_samples_do_not_block_others,
    sampling::a_handle_restores_the_sampling_client[GetSampler],
    sampling::invalid_samples_are_rejected,
    lookup::models_and_runs_are_found,
    lookup::sessions_are_found[GetSession, ListSessions],
    lookup::checkpoints_are_listed,
    lookup::checkpoints_are_changed[SetCheckpointTtl, PublishCheckpoint, DeleteCheckpoint],
    lookup::weights_are_downloaded[SaveWeightsExternal],
    lookup::missing_objects_are_not_found,
    lookup::a_closed_client_returns_an_error,
];

/// CheckOutcome of one check.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CheckOutcome {
    Passed,
    Failed,
    /// The check failed, as expected of this server.
    Differs,
    /// The check passed, although the server is expected to fail it.
    NoLongerDiffers,
    Skipped,
}

impl CheckOutcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Differs => "differs",
            Self::NoLongerDiffers => "NO LONGER DIFFERS",
            Self::Skipped => "skipped",
        }
    }
}

/// Runs all checks. `differences` names those that the server is expected to fail.
async fn run_checks(subject: Subject, differences: &[&str]) -> Vec<(&'static str, CheckOutcome)> {
    let mut outcomes = Vec::new();
    for Check { name, needs, run } in CHECKS {
        let outcome = if let Some(route) = endpoints::first_missing(&subject, needs).await {
            let method = route.method();
            let path = route.template();
            eprintln!("{name}: the server does not implement {method} {path}");
            CheckOutcome::Skipped
        } else {
            // Run each check in its own task, so that a panic fails only that check.
            let local = tokio::task::LocalSet::new();
            let run = async { tokio::task::spawn_local(run(subject.clone())).await };
            let passed = local.run_until(run).await.is_ok();
            match (passed, differences.contains(name)) {
                (true, false) => CheckOutcome::Passed,
                (true, true) => CheckOutcome::NoLongerDiffers,
                (false, false) => CheckOutcome::Failed,
                (false, true) => CheckOutcome::Differs,
            }
        };
        eprintln!("{:8}{name}", outcome.as_str());
        outcomes.push((*name, outcome));
    }
    outcomes
}

/// Asserts that every check passed.
fn assert_all_passed(outcomes: &[(&str, CheckOutcome)]) {
    let others: Vec<_> = outcomes
        .iter()
        .filter(|(_, outcome)| *outcome != CheckOutcome::Passed)
        .map(|(name, outcome)| format!("{name} {}", outcome.as_str()))
        .collect();
    assert!(others.is_empty(), "{others:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn this_server_passes_the_contract() {
    let test_server = TestServer::new().await;
    assert_all_passed(&run_checks(Subject::of(&test_server), &[]).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn this_server_passes_without_the_efficient_protocol() {
    let test_server = TestServer::with(|options| options.efficient_protocol = false).await;
    assert_all_passed(&run_checks(Subject::of(&test_server), &[]).await);
}

/// Checks another server; run by `cargo xtask contract`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs another server; cargo xtask contract runs it"]
async fn another_server_passes_the_contract() {
    let url =
        setting("TINKEX_CONTRACT_URL").expect("cargo xtask contract sets TINKEX_CONTRACT_URL");
    let key = setting("TINKEX_CONTRACT_KEY_FILE")
        .map_or_else(|| "tml-local".to_owned(), |file| std::fs::read_to_string(file).unwrap());
    let url: BaseUrl = url.parse().unwrap();
    let api_key = key.trim().to_owned();
    let service = ServiceClient::builder().env(Env::empty()).base_url(url).api_key(&*api_key);
    let service = service.build().unwrap();
    let known = service.server_capabilities().await.unwrap().supported_models;
    let first = known.into_iter().find_map(|model| model.model_name);
    let model = setting("TINKEX_CONTRACT_MODEL").or(first).expect("the server has a model");
    eprintln!("base model {model}");
    let differences = setting("TINKEX_CONTRACT_DIFFERENCES").unwrap_or_default();
    let differences: Vec<&str> = differences.split(',').collect();
    let outcomes = run_checks(Subject { service, api_key, model }, &differences).await;
    if let Some(report) = setting("TINKEX_CONTRACT_REPORT") {
        let line =
            |(name, outcome): &(&str, CheckOutcome)| format!("{} {name}\n", outcome.as_str());
        std::fs::write(report, outcomes.iter().map(line).collect::<String>()).unwrap();
    }
    let unexpected = [CheckOutcome::Failed, CheckOutcome::NoLongerDiffers];
    let unexpected: Vec<_> =
        outcomes.iter().filter(|(_, outcome)| unexpected.contains(outcome)).collect();
    let names: Vec<_> = unexpected.iter().map(|(name, _)| name).collect();
    assert!(names.is_empty(), "{} of {} checks failed: {names:?}", names.len(), CHECKS.len());
}
