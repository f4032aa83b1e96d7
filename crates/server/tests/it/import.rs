//! Import of PEFT adapters.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex::rest::ListTrainingRuns;
use tinkex::{ErrorKind, RestoreMode};
use tinkex_server::Server;
use tinkex_weights::{ModelFolder, NamedTensor, TensorFile, TensorSlice, write_tensors};
use tinkex_wire::rest::AdapterFiles;

use crate::harness::{MODEL, TestServer, client, golden, options, train};
use crate::raw::Raw;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";

/// Returns the folder of an adapter that `peft` saved, of the model `qwen3` or another one.
fn adapter(model: &str) -> PathBuf {
    golden(model).join("adapter")
}

/// Returns the body of a request.
fn body(config: &[u8], tensors: &[u8]) -> Vec<u8> {
    [AdapterFiles::start(config), tensors.to_vec()].concat()
}

/// Returns the body of a request for the adapter in `folder`.
fn body_of(folder: &Path) -> Vec<u8> {
    body(&fs::read(folder.join(CONFIG)).unwrap(), &fs::read(folder.join(TENSORS)).unwrap())
}

/// Returns the configuration of the adapter of `qwen3` with one setting changed.
fn config_with(name: &str, value: Value) -> Vec<u8> {
    let mut config: Value =
        serde_json::from_slice(&fs::read(adapter("qwen3").join(CONFIG)).unwrap()).unwrap();
    config[name] = value;
    config.to_string().into_bytes()
}

/// Returns the tensors of the adapter of `qwen3` after a change of their names or values.
fn tensors_with(change: impl Fn(&mut String, &mut Vec<usize>, &mut Vec<f32>)) -> Vec<u8> {
    let file = TensorFile::open(adapter("qwen3").join(TENSORS)).unwrap();
    let all: Vec<(String, Vec<usize>, Vec<f32>)> = file
        .tensors()
        .map(|tensor| {
            let mut name = tensor.name().to_owned();
            let mut shape = tensor.shape().to_vec();
            let mut values = tensor.to_f32().unwrap();
            change(&mut name, &mut shape, &mut values);
            (name, shape, values)
        })
        .collect();
    written(&all)
}

/// Returns the tensors of the adapter of `qwen3` with the frozen weights that `peft` adds for an
/// adapted `lm_head`, each changed by `change`.
fn tensors_with_frozen_head(change: f32) -> Vec<u8> {
    let file = TensorFile::open(adapter("qwen3").join(TENSORS)).unwrap();
    let base = ModelFolder::open(golden("qwen3")).unwrap();
    let head = base.tensor("lm_head.weight").or_else(|_| base.tensor("model.embed_tokens.weight"));
    let head = head.unwrap();
    let frozen = head.to_f32().unwrap().into_iter().map(|weight| weight + change).collect();
    let mut all: Vec<(String, Vec<usize>, Vec<f32>)> = file
        .tensors()
        .map(|tensor| (tensor.name().to_owned(), tensor.shape().to_vec(), tensor.to_f32().unwrap()))
        .collect();
    let name = "base_model.model.lm_head.base_layer.weight";
    all.insert(1, (name.to_owned(), head.shape().to_vec(), frozen));
    written(&all)
}

/// Returns the contents of a safetensors file with these tensors.
fn written(all: &[(String, Vec<usize>, Vec<f32>)]) -> Vec<u8> {
    let tensors: Vec<NamedTensor<'_>> = all
        .iter()
        .map(|(name, shape, values)| NamedTensor { name, shape, values: TensorSlice::F32(values) })
        .collect();
    let folder = TempDir::new().unwrap();
    write_tensors(folder.path().join("x"), &tensors, &[]).unwrap();
    fs::read(folder.path().join("x")).unwrap()
}

/// Returns the names in the folder of all adapters.
fn stored(data: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(data.path().join("weights")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Bug: `save_pretrained` of `peft` adds the frozen `lm_head` of the base model by default, and the
/// adapter was refused.
#[tokio::test(flavor = "multi_thread")]
async fn frozen_weights_are_dropped_if_they_equal_the_base_model() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let folder = TempDir::new().unwrap();
    fs::copy(adapter("qwen3").join(CONFIG), folder.path().join(CONFIG)).unwrap();
    let import = async |tensors: Vec<u8>| {
        fs::write(folder.path().join(TENSORS), tensors).unwrap();
        service.rest().import_adapter(folder.path()).base_model(MODEL).await
    };
    let error = import(tensors_with_frozen_head(0.5)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
    assert!(error.to_string().contains("differs from lm_head of the base model"), "{error}");

    let imported = import(tensors_with_frozen_head(0.0)).await.unwrap();
    let target = folder.path().join("exported");
    let rest = service.rest();
    rest.download(&imported.sampler_weights_path, &target).peft(true).await.unwrap();
    let exported = TensorFile::open(target.join(TENSORS)).unwrap();
    let original = TensorFile::open(adapter("qwen3").join(TENSORS)).unwrap();
    assert!(exported.names().eq(original.names()));
    for tensor in original.tensors() {
        let same = exported.tensor(tensor.name()).unwrap().has_values_of(&tensor).unwrap();
        assert!(same, "{}", tensor.name());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_imported_adapter_is_sampled_trained_and_exported_again() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let import = service.rest().import_adapter(adapter("qwen3")).base_model(MODEL).name("mine");
    let imported = import.await.unwrap();
    assert_eq!((imported.base_model.as_str(), imported.lora_rank), (MODEL, 4));
    assert!(imported.weights_path.to_string().ends_with("/weights/mine"), "{imported:?}");
    let info = service.rest().get_weights_info(&imported.weights_path).await.unwrap();
    assert_eq!((info.lora_rank, info.train_unembed), (Some(4), Some(true)));

    // Sampling and training use the same weights.
    let tokens = [5, 6, 7, 8];
    let sampler = service.create_sampling_client_from(&imported.sampler_weights_path).await;
    let sampled = sampler.unwrap().compute_logprobs(tokens).await.unwrap().to_vec();
    let base = service.create_sampling_client(MODEL).await.unwrap();
    assert_ne!(sampled, base.compute_logprobs(tokens).await.unwrap().to_vec());
    let model = service
        .create_training_client_from(&imported.weights_path, RestoreMode::WeightsOnly)
        .await
        .unwrap();
    let trained = model.save_weights_and_get_sampling_client().await.unwrap();
    assert_eq!(trained.compute_logprobs(tokens).await.unwrap().to_vec(), sampled);
    let losses = train(&model, 3).await;
    assert!(f64::from_bits(losses[2]) < f64::from_bits(losses[0]), "{losses:?}");
    let error = service
        .create_training_client_from(&imported.weights_path, RestoreMode::WithOptimizer)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
    assert!(error.to_string().contains("has no optimizer state"), "{error}");

    // The files are those that were imported, also after a restart.
    test_server.server.stop().await;
    let server = Server::start(options(test_server.data.path())).await.unwrap();
    let home = TempDir::new().unwrap();
    let target = home.path().join("adapter");
    let rest = client(&server.base_url()).rest();
    rest.download(&imported.sampler_weights_path, &target).peft(true).await.unwrap();
    for name in [CONFIG, TENSORS] {
        let original = fs::read(adapter("qwen3").join(name)).unwrap();
        assert!(fs::read(target.join(name)).unwrap() == original, "{name} differs");
    }
    // Both checkpoints share the files.
    rest.delete_checkpoint(&imported.weights_path).await.unwrap();
    rest.download(&imported.sampler_weights_path, home.path().join("again"))
        .peft(true)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_import_creates_one_run() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let path = format!("/api/v1/imports/some-id?base_model={MODEL}");
    let body = body_of(&adapter("qwen3"));
    let (status, first) = http.send("PUT", &path, &[], body.clone()).await;
    assert_eq!(status, 200, "{first}");
    assert_eq!(first["weights_path"], "tinker://import-some-id:train:0/weights/imported");
    assert_eq!(http.send("PUT", &path, &[], body).await, (200, first));
    let runs = test_server.client().rest().list_training_runs(&ListTrainingRuns::default()).await;
    assert_eq!(runs.unwrap().cursor.total_count, 1);
    assert_eq!(stored(&test_server.data).len(), 1);
    let (status, rejected) =
        http.post("/optim_step", crate::harness::step("import-some-id:train:0", 1, 0.1)).await;
    assert_eq!(status, 400, "{rejected}");
    assert!(rejected["detail"].as_str().unwrap().contains("it was imported"), "{rejected}");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_attempts_of_an_import_get_the_same_response() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let path = format!("/api/v1/imports/some-id?base_model={MODEL}");
    let body = body_of(&adapter("qwen3"));
    let (first, second) = tokio::join!(
        http.send("PUT", &path, &[], body.clone()),
        http.send("PUT", &path, &[], body.clone())
    );
    assert_eq!(first.0, 200, "{}", first.1);
    assert_eq!(first, second);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_with_the_names_of_the_hosted_service_is_converted() {
    let test_server = TestServer::new().await;
    let tensors =
        tensors_with(|name, _, _| *name = name.replace(".lm_head.", ".model.unembed_tokens."));
    let body = body(&config_with("target_modules", json!("all-linear")), &tensors);
    let path = format!("/api/v1/imports/a?base_model={MODEL}");
    let (status, imported) = test_server.http().send("PUT", &path, &[], body).await;
    assert_eq!(status, 200, "{imported}");
    let folder = test_server.data.path().join("weights").join(&stored(&test_server.data)[0]);
    let names = TensorFile::open(folder.join(TENSORS)).unwrap();
    assert!(names.names().any(|name| name == "base_model.model.lm_head.lora_A.weight"));
}

/// The upload fits, but not the copy that the conversion writes.
#[tokio::test(flavor = "multi_thread")]
async fn a_conversion_that_does_not_fit_on_the_disk_is_refused() {
    let checks = AtomicU64::new(0);
    let test_server = TestServer::with(|options| {
        let free_space = move |_: &Path| {
            Some(if checks.fetch_add(1, Ordering::Relaxed) == 0 { 1 << 30 } else { 1 })
        };
        *options = options.clone().free_space(free_space);
    })
    .await;
    let tensors =
        tensors_with(|name, _, _| *name = name.replace(".lm_head.", ".model.unembed_tokens."));
    let body = body(&config_with("target_modules", json!("all-linear")), &tensors);
    let path = format!("/api/v1/imports/a?base_model={MODEL}");
    let (status, rejected) = test_server.http().send("PUT", &path, &[], body).await;
    assert_eq!(status, 413, "{rejected}");
    assert_eq!(stored(&test_server.data), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_parts_are_named_and_nothing_is_stored() {
    let test_server = TestServer::with(|options| options.limits.import_bytes = 1 << 20).await;
    let http = test_server.http();
    let good = adapter("qwen3");
    let config = fs::read(good.join(CONFIG)).unwrap();
    let tensors = fs::read(good.join(TENSORS)).unwrap();
    let renamed = |from: &'static str, to: &'static str| {
        tensors_with(move |name, _, _| *name = name.replace(from, to))
    };
    let not_finite = tensors_with(|name, _, values| {
        if name == Q {
            values[3] = f32::INFINITY;
        }
    });
    let wide = tensors_with(|name, shape, values| {
        if name == Q {
            shape[1] += 1;
            values.extend([0.0; 4]);
        }
    });
    let base = format!("?base_model={MODEL}");
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        (&base, body(&config_with("use_dora", json!(true)), &tensors), "use_dora"),
        (&base, body(&config_with("use_rslora", json!(true)), &tensors), "use_rslora"),
        (&base, body(&config_with("bias", json!("all")), &tensors), "bias"),
        (
            &base,
            body(&config_with("modules_to_save", json!(["embed_tokens"])), &tensors),
            "modules_to_save",
        ),
        (&base, body(&config_with("rank_pattern", json!({"q_proj": 8})), &tensors), "rank_pattern"),
        (
            &base,
            body(&config_with("alpha_pattern", json!({"q_proj": 8})), &tensors),
            "alpha_pattern",
        ),
        (&base, body(&config_with("r", json!(8)), &tensors), "lora_A.weight has shape [4, "),
        (
            &base,
            body(&config_with("target_modules", json!(["q_proj"])), &tensors),
            "does not select tensor",
        ),
        (
            &base,
            body(&config_with("target_modules", json!("x")), &renamed("q_proj", "x_proj")),
            "no module model.layers.0.self_attn.x_proj",
        ),
        (
            &base,
            body(&config, &renamed("lm_head.lora_A.weight", "model.embed_tokens.lora_embedding_A")),
            "adapter of an embedding",
        ),
        (&base, body(&config, &not_finite), "q_proj.lora_A.weight is inf at index 3"),
        (&base, body(&config, &wide), "q_proj"),
        (&base, body_of(&adapter("llama")), "adapter of lm_head has shape"),
        (&base, body(&config, &tensors[..tensors.len() - 1]), "adapter_model.safetensors"),
        (&base, body(b"{", &tensors), "adapter_config.json: not an adapter configuration"),
        (&base, body(b"{}", b""), "adapter_config.json"),
        (&base, body(b"", b"")[..4].to_vec(), "the body ends"),
        (&base, Vec::new(), "the body ends"),
        (&base, [&u64::MAX.to_le_bytes()[..], b"{}"].concat(), "exceeds the limit"),
        (&base, vec![0; (1 << 20) + 1], "exceeds the limit"),
        ("?base_model=missing", body_of(&good), "base model \"missing\" is not available"),
        ("", body_of(&good), "base model \"qwen3\" is not available"),
        (
            "",
            body(&config_with("base_model_name_or_path", json!(null)), &tensors),
            "does not name the base model",
        ),
        ("?base_model=tiny&name=a/b", body_of(&good), "invalid name"),
    ];
    for (query, body, message) in cases {
        let path = format!("/api/v1/imports/an-id{query}");
        let (status, rejected) = http.send("PUT", &path, &[], body).await;
        let detail = rejected["detail"].as_str().unwrap_or_default();
        assert!(status == 400 || status == 413, "{message}: {status} {rejected}");
        assert!(detail.contains(message), "{message}: {detail}");
        assert!(!detail.contains("/weights/"), "the message has a path of the server: {detail}");
        assert_eq!(stored(&test_server.data), Vec::<String>::new(), "{message}");
    }
    let path = format!("/api/v1/imports/a%2Fb{base}");
    assert_eq!(http.send("PUT", &path, &[], body_of(&good)).await.0, 400);
    let runs = test_server.client().rest().list_training_runs(&ListTrainingRuns::default()).await;
    assert_eq!(runs.unwrap().cursor.total_count, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_upload_leaves_nothing() {
    let test_server = TestServer::new().await;
    let body = body_of(&adapter("qwen3"));
    let mut raw = Raw::new(&test_server.server.base_url());
    let head = format!(
        "PUT /api/v1/imports/a?base_model={MODEL} HTTP/1.1\r\nhost: localhost\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    raw.write(head.as_bytes()).await;
    raw.write(&body[..body.len() / 2]).await;
    let http = test_server.http();
    while stored(&test_server.data).is_empty() {
        http.metrics().await;
    }
    drop(raw);
    while !stored(&test_server.data).is_empty() {
        http.metrics().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_without_a_usable_adapter_is_not_uploaded() {
    let test_server = TestServer::new().await;
    let rest = test_server.client().rest();
    let folder = TempDir::new().unwrap();
    let error = rest.import_adapter(folder.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("adapter_config.json: not found"), "{error}");
    fs::write(folder.path().join(CONFIG), config_with("use_dora", json!(true))).unwrap();
    fs::copy(adapter("qwen3").join(TENSORS), folder.path().join(TENSORS)).unwrap();
    let error = rest.import_adapter(folder.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("use_dora is set"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_that_does_not_fit_on_the_disk_is_refused_before_it_is_stored() {
    let body = body_of(&adapter("qwen3"));
    let size = u64::try_from(body.len()).unwrap();
    let free = Arc::new(AtomicU64::new(size - 1));
    let reported = Arc::clone(&free);
    let test_server = TestServer::with(|options| {
        let free_space = move |_: &Path| Some(reported.load(Ordering::Relaxed));
        *options = options.clone().free_space(free_space);
    })
    .await;
    let path = format!("/api/v1/imports/a?base_model={MODEL}");
    let (status, rejected) = test_server.http().send("PUT", &path, &[], body.clone()).await;
    let detail = rejected["detail"].as_str().unwrap_or_default();
    assert_eq!(status, 413, "clients do not retry: {rejected}");
    assert!(detail.contains("on the server's disk: it needs "), "{detail}");
    assert!(detail.contains("free space in the data folder"), "{detail}");
    assert_eq!(stored(&test_server.data), Vec::<String>::new());

    let import = || test_server.client().rest().import_adapter(adapter("qwen3")).base_model(MODEL);
    let error = import().await.unwrap_err();
    assert_eq!((error.status(), error.attempts()), (Some(413), 1), "{error}");
    assert_eq!(stored(&test_server.data), Vec::<String>::new());
    free.store(size, Ordering::Relaxed);
    import().await.unwrap();
    // A retry of a completed import needs no space.
    assert_eq!(test_server.http().send("PUT", &path, &[], body.clone()).await.0, 200);
    free.store(0, Ordering::Relaxed);
    assert_eq!(test_server.http().send("PUT", &path, &[], body).await.0, 200);
}

/// The folder of the base model has no tokenizer, so the identifier of the tokenizer is the name of
/// the model.
#[tokio::test(flavor = "multi_thread")]
async fn an_export_finds_a_served_folder_without_a_tokenizer() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let imported = service.rest().import_adapter(adapter("qwen3")).base_model(MODEL).await.unwrap();
    let home = TempDir::new().unwrap();
    let to = home.path().join("merged");
    let exported = service.rest().export(&imported.weights_path, &to).await.unwrap();
    assert!(exported.is_untied && !exported.has_tokenizer);
    let sampler = service.create_sampling_client(MODEL).await.unwrap().get_sampler().await.unwrap();
    let folder = fs::canonicalize(sampler.base_model_path.unwrap()).unwrap();
    assert_eq!(folder, fs::canonicalize(golden("qwen3")).unwrap());
    assert_eq!(sampler.tokenizer_id.as_deref(), Some(MODEL));
}
