//! What a program may expect of any server: plain functions over a client and a base model.
//!
//! Here they run against this server; `cargo xtask contract --base-url URL` runs them against
//! another. So they ask for nothing that only this one promises: numbers are compared as numbers,
//! not bit by bit, and whatever is saved is deleted again. What a server does not serve at all is
//! told apart from what it does wrong.

mod lookup;
mod sampling;
mod served;
mod training;

use std::pin::Pin;

use tinkex::{BaseUrl, Env, ServiceClient, TinkerPath};
use tinkex_wire::Route;

use crate::harness::{MODEL, TestServer, setting};

/// What the functions get.
#[derive(Clone)]
pub(crate) struct Any {
    pub(crate) service: ServiceClient,
    pub(crate) model: String,
}

impl Any {
    /// Deletes what was saved, where that can be done.
    pub(crate) async fn forget(&self, path: &TinkerPath) {
        if served::find(self.service.base_url(), Route::DeleteCheckpoint).await {
            self.service.rest().delete_checkpoint(path).await.unwrap();
        }
    }
}

/// A function, its name, and the endpoints that it needs beside those of training and sampling.
struct Promise {
    name: &'static str,
    needs: &'static [Route],
    run: fn(Any) -> Pin<Box<dyn Future<Output = ()> + Send>>,
}

macro_rules! promises {
    ($($module:ident::$name:ident $([$($route:ident),*])?),* $(,)?) => {
        const PROMISES: &[Promise] = &[$(Promise {
            name: stringify!($name),
            needs: &[$($(Route::$route),*)?],
            run: |any| Box::pin($module::$name(any)),
        }),*];
    };
}

promises![
    training::the_loss_falls,
    training::calls_run_in_the_order_they_are_made,
    training::a_forward_pass_changes_nothing,
    training::gradients_of_a_batch_are_the_sum_of_its_parts,
    training::every_documented_loss_runs,
    training::losses_of_ones_own_train_like_the_built_in_one,
    training::a_saved_state_is_gone_on_from,
    training::bad_data_fails_and_the_model_goes_on,
    sampling::samples_have_the_asked_length_and_number,
    sampling::seeds_repeat_and_samples_differ,
    sampling::a_stop_ends_a_sample_and_is_part_of_it,
    sampling::prompts_are_scored_as_training_scores_them,
    sampling::the_likeliest_tokens_are_told,
    sampling::saved_weights_are_sampled_from,
    sampling::what_nobody_waits_for_holds_nobody_up,
    sampling::a_handle_is_the_same_sampler[GetSampler],
    sampling::bad_samples_are_refused,
    lookup::models_and_runs_are_found,
    lookup::sessions_are_found[GetSession, ListSessions],
    lookup::checkpoints_are_listed,
    lookup::checkpoints_are_changed[SetCheckpointTtl, PublishCheckpoint, DeleteCheckpoint],
    lookup::weights_are_downloaded[SaveWeightsExternal],
    lookup::what_is_not_there_is_not_found,
    lookup::a_closed_client_says_so,
];

/// Runs all promises, and gives the names of those that could not be tried.
async fn hold(any: Any) -> Vec<&'static str> {
    let (mut broken, mut skipped) = (Vec::new(), Vec::new());
    for Promise { name, needs, run } in PROMISES {
        if let Some(route) = served::first_missing(any.service.base_url(), needs).await {
            let (method, path) = (route.method(), route.template());
            eprintln!("skipped {name}: not served by this server: {method} {path}");
            skipped.push(*name);
            continue;
        }
        // Each in a task of its own: one that fails is told, and the others still run.
        let own = tokio::task::LocalSet::new();
        let run = async { tokio::task::spawn_local(run(any.clone())).await };
        match own.run_until(run).await {
            Ok(()) => eprintln!("holds   {name}"),
            Err(_) => {
                eprintln!("BROKEN  {name}");
                broken.push(*name);
            }
        }
    }
    assert!(broken.is_empty(), "{} of {}: {broken:?}", broken.len(), PROMISES.len());
    skipped
}

#[tokio::test(flavor = "multi_thread")]
async fn this_server_keeps_every_promise() {
    let test_server = TestServer::new().await;
    let skipped = hold(Any { service: test_server.client(), model: MODEL.to_owned() }).await;
    assert!(skipped.is_empty(), "{skipped:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn this_server_keeps_every_promise_to_clients_that_ask_nothing_special() {
    let test_server = TestServer::with(|options| options.efficient_protocol = false).await;
    let skipped = hold(Any { service: test_server.client(), model: MODEL.to_owned() }).await;
    assert!(skipped.is_empty(), "{skipped:?}");
}

/// Another server: `cargo xtask contract`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs another server; cargo xtask contract runs it"]
async fn another_server_keeps_every_promise() {
    let url = setting("TINKEX_CONTRACT_URL").expect("cargo xtask contract says which");
    let key = setting("TINKEX_CONTRACT_KEY_FILE")
        .map_or_else(|| "tml-local".to_owned(), |file| std::fs::read_to_string(file).unwrap());
    let url: BaseUrl = url.parse().unwrap();
    let service = ServiceClient::builder().env(Env::empty()).base_url(url).api_key(key.trim());
    let service = service.build().unwrap();
    let known = service.server_capabilities().await.unwrap().supported_models;
    let first = known.into_iter().find_map(|model| model.model_name);
    let model = setting("TINKEX_CONTRACT_MODEL").or(first).expect("the server has a model");
    eprintln!("{model}");
    hold(Any { service, model }).await;
}
