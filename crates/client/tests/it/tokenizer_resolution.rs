//! Which tokenizer the training and sampling clients of a model load.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::json;
use tempfile::TempDir;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{Env, HttpFailure, HttpService, Lane, LoraOptions, ServiceClient};

use crate::tiny;
use crate::tokenizer::FakeHub;

/// HTTP service that sends requests for files to a hub, and all others to a server.
struct ServerAndHub {
    server: FakeServer,
    hub: FakeHub,
}

impl HttpService for ServerAndHub {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        match lane {
            Lane::Hub => self.hub.send(lane, request, timeout),
            _ => self.server.send(lane, request, timeout),
        }
    }
}

/// Creates a client of `server` with a hub that has the files of every repository.
fn service(server: &FakeServer, cache: &TempDir) -> ServiceClient {
    let hub = FakeHub::default().file("tokenizer.json", tiny::json(&["<end>"]));
    let cache = cache.path().to_str().unwrap();
    let env = [("HF_ENDPOINT", "https://resolution.test"), ("HF_HUB_CACHE", cache)];
    let http = ServerAndHub { server: server.clone(), hub };
    server.builder().env(Env::from_pairs(env)).http(http).build().unwrap()
}

/// Asserts that both kinds of clients load the tokenizer `expected` if the server reports this
/// model and this tokenizer.
async fn assert_resolved(model_name: &str, tokenizer_id: Option<&str>, expected: &str) {
    let data = json!({"model_name": model_name, "tokenizer_id": tokenizer_id});
    let info = json!({"type": "get_info", "model_id": "m", "model_data": data});
    let sampler =
        json!({"sampler_id": "s", "base_model": model_name, "tokenizer_id": tokenizer_id});
    let server = FakeServer::new()
        .on(Route::GetInfo, Reply::json(info).always())
        .on(Route::GetSampler, Reply::json(sampler).always());
    let cache = tempfile::tempdir().unwrap();
    let service = service(&server, &cache);

    // The name that the caller gave is not used.
    let model = service.create_lora_training_client("alias").await.unwrap();
    assert_eq!(model.tokenizer().await.unwrap().name(), expected);
    let folder = format!("models--{}", expected.replace('/', "--"));
    assert!(cache.path().join(folder).is_dir(), "{expected} was not downloaded");
    let sampler = service.create_sampling_client("alias").await.unwrap();
    assert_eq!(sampler.tokenizer().await.unwrap().name(), expected);
}

/// Covers T5.2.1.
#[tokio::test]
async fn clients_load_the_tokenizer_that_the_server_names() {
    assert_resolved("org/one", Some("vendor/named"), "vendor/named").await;
    // The name of the server takes precedence over the rule for Llama 3.
    let llama = "meta-llama/Llama-3.2-1B";
    assert_resolved(llama, Some("vendor/llama:main"), "vendor/llama").await;
}

/// Covers T5.2.2.
#[tokio::test]
async fn llama_3_models_have_a_substitute_tokenizer() {
    let substitute = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer";
    assert_resolved("meta-llama/Llama-3.1-8B-Instruct:peft:1024", None, substitute).await;
}

/// Covers T5.2.3.
#[tokio::test]
async fn other_models_have_the_tokenizer_of_their_repository() {
    assert_resolved("org/brand-new:peft:131072", None, "org/brand-new").await;
    assert_resolved("org/model/variant", None, "org/model").await;
    // Only the gated repositories of the original models have a substitute.
    assert_resolved("other/Llama-3-8B", None, "other/Llama-3-8B").await;
}

/// Covers T6.1.4.
#[tokio::test]
async fn the_tokenizer_follows_from_the_model_information() {
    let server = FakeServer::new();
    let cache = tempfile::tempdir().unwrap();
    let service = service(&server, &cache);
    let model =
        service.create_lora_training_client(LoraOptions::new("org/info").rank(8)).await.unwrap();
    let info = model.get_info().await.unwrap();
    assert_eq!((info.model_name.as_deref(), info.lora_rank), (Some("org/info"), Some(8)));
    let tokenizer = model.tokenizer().await.unwrap();
    assert_eq!(tokenizer.name(), "org/info");
    let tokens = tokenizer.encode("hello all<end>").unwrap();
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "hello all<end>");
    for call in server.calls_to(Route::GetInfo) {
        assert_eq!(call.json()["model_id"], model.model_id().as_str());
    }
}
