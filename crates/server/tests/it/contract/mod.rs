//! What a program may expect of any server: plain functions over a client and a base model.
//!
//! Here they run against this server; `cargo xtask contract --base-url URL` runs them against
//! another. So they ask for nothing that only this one promises: numbers are compared as numbers,
//! not bit by bit, and whatever is saved is deleted again.

mod lookup;
mod sampling;
mod training;

use std::pin::Pin;

use tinkex::{BaseUrl, Env, ServiceClient};

use crate::house::{House, MODEL, setting};

/// What the functions get.
#[derive(Clone)]
pub(crate) struct Any {
    pub(crate) service: ServiceClient,
    pub(crate) model: String,
}

type Promise = fn(Any) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// A name, and the function of that name.
macro_rules! promises {
    ($($module:ident::$name:ident),* $(,)?) => {
        const PROMISES: &[(&str, Promise)] =
            &[$((stringify!($name), |any| Box::pin($module::$name(any)))),*];
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
    sampling::a_handle_is_the_same_sampler,
    sampling::bad_samples_are_refused,
    lookup::models_and_runs_are_found,
    lookup::checkpoints_are_listed_and_changed,
    lookup::weights_are_downloaded,
    lookup::what_is_not_there_is_not_found,
    lookup::a_closed_client_says_so,
];

async fn hold(any: Any) {
    let mut broken = Vec::new();
    for (name, promise) in PROMISES {
        // Each in a task of its own: one that fails is told, and the others still run.
        let own = tokio::task::LocalSet::new();
        let run = async { tokio::task::spawn_local(promise(any.clone())).await };
        match own.run_until(run).await {
            Ok(()) => eprintln!("holds   {name}"),
            Err(_) => {
                eprintln!("BROKEN  {name}");
                broken.push(*name);
            }
        }
    }
    assert!(broken.is_empty(), "{} of {}: {broken:?}", broken.len(), PROMISES.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn this_server_keeps_every_promise() {
    let house = House::new().await;
    hold(Any { service: house.client(), model: MODEL.to_owned() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn this_server_keeps_every_promise_to_clients_that_ask_nothing_special() {
    let house = House::with(|options| options.efficient = false).await;
    hold(Any { service: house.client(), model: MODEL.to_owned() }).await;
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
