//! Downloaded adapters: names of their tensors, and damaged files.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tinkex_weights::{AdapterFile, TensorFile};

use crate::harness::{MODEL, TestServer, train, training_client};

const TENSORS: &str = "adapter_model.safetensors";
const HEAD: &str = "base_model.model.lm_head.";

fn names(folder: &Path) -> Vec<String> {
    let file = TensorFile::open(folder.join(TENSORS)).unwrap();
    file.names().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_checkpoint_is_downloaded_with_the_names_that_peft_reads() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model = training_client(&service).await;
    train(&model, 1).await;
    let paths = [
        model.save_state("a").await.unwrap(),
        model.save_weights_for_sampler("a").await.unwrap(),
        model.save_weights_external("a").await.unwrap().path,
    ];
    let home = tempfile::tempdir().unwrap();
    let mut adapters = Vec::new();
    for (n, path) in paths.into_iter().enumerate() {
        let folder = home.path().join(n.to_string());
        let done = service.rest().download(path, &folder).await.unwrap();
        assert_eq!(done.files, ["adapter_config.json", TENSORS]);
        let names = names(&folder);
        assert_eq!(names.iter().filter(|name| name.starts_with(HEAD)).count(), 2, "{names:?}");
        let config: Value =
            serde_json::from_slice(&fs::read(folder.join("adapter_config.json")).unwrap()).unwrap();
        let modules = [
            "down_proj",
            "gate_proj",
            "k_proj",
            "lm_head",
            "o_proj",
            "q_proj",
            "up_proj",
            "v_proj",
        ];
        assert_eq!(config["target_modules"], json!(modules));
        assert_eq!(config["base_model_name_or_path"], MODEL);
        let suffix = |name: &String| {
            let module = name.rsplit('.').nth(2).unwrap().to_owned();
            modules.contains(&&*module)
        };
        assert!(names.iter().all(suffix), "{names:?}");
        adapters.push(AdapterFile::load(&folder).unwrap());
    }
    assert!(adapters.iter().all(|adapter| *adapter == adapters[0]), "the weights are the same");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_adapter_is_reported_and_not_sent() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model = training_client(&service).await;
    train(&model, 1).await;
    let saved = model.save_weights_external("damaged").await.unwrap();
    let weights = test_server.data.path().join("weights");
    let mut folders = fs::read_dir(weights).unwrap().map(|entry| entry.unwrap().path());
    let is_external = |path: &PathBuf| path.to_string_lossy().contains("external_weights-damaged");
    let folder = folders.find(is_external).unwrap();
    fs::write(folder.join(TENSORS), "damaged").unwrap();
    let error = service
        .rest()
        .with_options(tinkex::CallOptions::without_retries())
        .get_external_weights_urls(&saved.path)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("the stored files are damaged"), "{error}");
}
