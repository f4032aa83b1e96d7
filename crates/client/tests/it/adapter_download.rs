//! Downloads of adapters as the hosted service writes them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{ErrorKind, RestClient};
use tinkex_weights::{AdapterFile, NamedTensor, TensorFile, TensorSlice, write_tensors};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj";
const SERVICE_HEAD: &str = "base_model.model.model.unembed_tokens";

/// A server with one checkpoint of external weights, `tinker://run/external_weights/hf`, and one of
/// sampler weights.
pub(crate) struct HostedServer {
    pub(crate) server: FakeServer,
    files: Arc<Mutex<BTreeMap<String, Bytes>>>,
    /// Status and path of the requests for files.
    requests: Arc<Mutex<Vec<String>>>,
    /// Whether the server offers sampler weights for download.
    offers_sampler: Arc<AtomicBool>,
}

impl HostedServer {
    pub(crate) fn new(config: &Value, tensors: Vec<u8>) -> Self {
        let files: BTreeMap<String, Bytes> = [
            (CONFIG.to_owned(), config.to_string().into()),
            (TENSORS.to_owned(), tensors.into()),
            ("checkpoint_complete".to_owned(), Bytes::from_static(b"1")),
        ]
        .into();
        let names: Vec<String> = files.keys().cloned().collect();
        let urls: BTreeMap<&String, String> =
            names.iter().map(|name| (name, format!("http://files.test/blob/{name}"))).collect();
        let urls = json!({ "urls": urls, "expires": "2099-01-01T00:00:00Z" });
        let info = json!({ "base_model": "org/base", "is_lora": true });
        let offers_sampler = Arc::new(AtomicBool::new(false));
        let offers = Arc::clone(&offers_sampler);
        let mut hosted = Self {
            server: FakeServer::new()
                .on_call(Route::WeightsInfo, move |_| Reply::json(&info))
                .on_call(Route::ExternalWeightsUrls, move |call| {
                    let is_sampler = call.path.contains("/sampler_weights/");
                    if is_sampler && !offers.load(Ordering::Relaxed) {
                        Reply::status(400).with_json(json!({"detail": "not external"}))
                    } else {
                        Reply::json(&urls)
                    }
                }),
            files: Arc::new(Mutex::new(files)),
            requests: Arc::default(),
            offers_sampler,
        };
        for name in names {
            hosted.serve(name);
        }
        hosted
    }

    /// Serves a file, unless the client has the same one.
    fn serve(&mut self, name: String) {
        let files = Arc::clone(&self.files);
        let requests = Arc::clone(&self.requests);
        let path = format!("GET /blob/{name}");
        self.server = self.server.clone().on_path_call(&path, move |call| {
            let content = files.lock().unwrap()[&name].clone();
            let etag = format!("\"{}\"", content.len());
            let is_cached = call.header("if-none-match") == Some(etag.as_str());
            let (status, content) = if is_cached { (304, Bytes::new()) } else { (200, content) };
            requests.lock().unwrap().push(format!("{status} {}", call.path));
            let length = content.len().to_string();
            Reply::status(status)
                .header("etag", &etag)
                .header("content-length", &length)
                .text(content)
        });
    }

    pub(crate) fn rest(&self) -> RestClient {
        self.server.builder().build().unwrap().rest()
    }

    /// Returns status and path of the requests for files since the last call.
    pub(crate) fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

/// Returns a safetensors file with pairs of rank 2 of these modules, whose values differ.
fn pairs(modules: &[&str]) -> Vec<u8> {
    let values: Vec<f32> = (0..6).map(|n| n as f32).collect();
    let names: Vec<[String; 2]> = modules
        .iter()
        .map(|module| ["A", "B"].map(|matrix| format!("{module}.lora_{matrix}.weight")))
        .collect();
    let tensors: Vec<NamedTensor<'_>> = names
        .iter()
        .flat_map(|[a, b]| {
            let tensor = |name, shape, at: usize| NamedTensor {
                name,
                shape,
                values: TensorSlice::F32(&values[at..at + 4]),
            };
            [tensor(a, &[2, 2], 0), tensor(b, &[2, 2], 2)]
        })
        .collect();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("x");
    write_tensors(&file, &tensors, &[("format", "pt")]).unwrap();
    fs::read(file).unwrap()
}

/// Returns a configuration as the hosted service writes it.
fn service_config() -> Value {
    json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 32, "target_modules": "all-linear",
        "use_rslora": false })
}

fn read_config(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join(CONFIG)).unwrap()).unwrap()
}

const PATH: &str = "tinker://run/external_weights/hf";

#[tokio::test(start_paused = true)]
async fn an_adapter_of_the_hosted_service_gets_the_names_that_peft_reads() {
    let server = HostedServer::new(&service_config(), pairs(&[Q, SERVICE_HEAD]));
    let home = TempDir::new().unwrap();
    let target = home.path().join("adapter");
    let done = server.rest().download(PATH, &target).peft(true).await.unwrap();

    let file = TensorFile::open(target.join(TENSORS)).unwrap();
    let head = "base_model.model.lm_head";
    let expected = [head, Q].map(|module| ["A", "B"].map(|m| format!("{module}.lora_{m}.weight")));
    assert_eq!(file.names().collect::<Vec<_>>(), expected.as_flattened());
    for module in [head, Q] {
        let values = |matrix| {
            file.tensor(&format!("{module}.lora_{matrix}.weight")).unwrap().to_f32().unwrap()
        };
        assert_eq!(
            (&values("A")[..], &values("B")[..]),
            (&[0., 1., 2., 3.][..], &[2., 3., 4., 5.][..])
        );
    }
    assert_eq!(file.metadata()["format"], "pt");
    assert_eq!(
        read_config(&target),
        json!({
            "peft_type": "LORA", "r": 2, "lora_alpha": 32, "use_rslora": false, "bias": "none",
            "task_type": "CAUSAL_LM", "target_modules": ["lm_head", "q_proj"],
            "base_model_name_or_path": "org/base",
        })
    );
    let size = |name: &String| fs::metadata(target.join(name)).unwrap().len();
    assert_eq!(done.bytes, done.files.iter().map(size).sum::<u64>());
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1, "nothing else is left");
    let adapter = AdapterFile::load(&target).unwrap();
    assert_eq!(
        adapter.pairs.iter().map(|pair| &*pair.module).collect::<Vec<_>>(),
        ["lm_head", "model.layers.0.self_attn.q_proj"]
    );

    // The raw files are the server's.
    let raw = home.path().join("raw");
    server.rest().download(PATH, &raw).await.unwrap();
    for (name, content) in &*server.files.lock().unwrap() {
        assert_eq!(fs::read(raw.join(name)).unwrap(), content[..], "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_adapter_that_peft_reads_already_is_not_changed() {
    let config = json!({
        "base_model_name_or_path": "mine", "peft_type": "LORA", "task_type": "CAUSAL_LM",
        "bias": "none", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "lm_head"],
    });
    let server = HostedServer::new(&config, pairs(&[Q, "base_model.model.lm_head"]));
    let home = TempDir::new().unwrap();
    let target = home.path().join("adapter");
    server.rest().download(PATH, &target).peft(true).await.unwrap();
    for (name, content) in &*server.files.lock().unwrap() {
        assert_eq!(fs::read(target.join(name)).unwrap(), content[..], "{name}");
    }
    assert!(server.server.calls_to(Route::WeightsInfo).is_empty());
}

/// A process killed between the conversion and the publication leaves converted files, which a
/// later download must not take for files of the server.
#[tokio::test(start_paused = true)]
async fn converted_files_of_an_interrupted_download_are_requested_again() {
    let server = HostedServer::new(&service_config(), pairs(&[Q, SERVICE_HEAD]));
    let home = TempDir::new().unwrap();
    let target = home.path().join("adapter");
    // The folder appears during the download, so that it cannot be published.
    let blocker = target.clone();
    let download = server.rest().download(PATH, &target).peft(true).on_progress(move |now| {
        if now.files == now.files_total {
            fs::create_dir_all(&blocker).unwrap();
        }
    });
    assert_eq!(download.await.unwrap_err().kind(), ErrorKind::Conflict);
    fs::remove_dir(&target).unwrap();
    server.take_requests();

    server.rest().download(PATH, &target).await.unwrap();
    for (name, content) in &*server.files.lock().unwrap() {
        assert_eq!(fs::read(target.join(name)).unwrap(), content[..], "{name}");
    }
    let requests = server.take_requests();
    assert!(requests.contains(&"304 /blob/checkpoint_complete".to_owned()), "{requests:?}");
    assert!(requests.contains(&format!("200 /blob/{TENSORS}")), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn a_damaged_adapter_is_refused_and_downloaded_again() {
    let good = pairs(&[Q]);
    let mut truncated = good.clone();
    truncated.pop();
    let named = |module: &str, shape: &[usize]| {
        let folder = TempDir::new().unwrap();
        let values = vec![0.0; shape.iter().product()];
        let tensor = NamedTensor { name: module, shape, values: TensorSlice::F32(&values) };
        write_tensors(folder.path().join("x"), &[tensor], &[]).unwrap();
        fs::read(folder.path().join("x")).unwrap()
    };
    let q_a = format!("{Q}.lora_A.weight");
    let q_b = format!("{Q}.lora_B.weight");
    let without_alpha = json!({ "r": 2 });
    for (config, tensors, message) in [
        (service_config(), truncated, "the file has"),
        (service_config(), b"<html>".to_vec(), "truncated"),
        (service_config(), named(&q_a, &[3, 2]), "q_proj.lora_A.weight has shape [3, 2], but r"),
        (service_config(), named(&q_b, &[4, 2]), "q_proj.lora_A.weight is missing"),
        (service_config(), pairs(&[SERVICE_HEAD, "base_model.model.lm_head"]), "lm_head has two"),
        (without_alpha, good.clone(), "lora_alpha is missing"),
    ] {
        let server = HostedServer::new(&config, tensors);
        let home = TempDir::new().unwrap();
        let target = home.path().join("adapter");
        let error = server.rest().download(PATH, &target).peft(true).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Decode, "{error}");
        assert!(error.to_string().contains(message), "{error}");
        assert!(!target.exists());

        // The next download does not reuse the refused files.
        server.take_requests();
        let content =
            [(CONFIG, service_config().to_string().into()), (TENSORS, good.clone().into())];
        for (name, content) in content {
            server.files.lock().unwrap().insert(name.to_owned(), content);
        }
        server.rest().download(PATH, &target).peft(true).await.unwrap();
        let requests = server.take_requests();
        assert!(requests.contains(&format!("200 /blob/{TENSORS}")), "{requests:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn sampler_weights_are_downloaded_if_the_server_offers_them() {
    let server = HostedServer::new(&service_config(), pairs(&[Q]));
    let home = TempDir::new().unwrap();
    let target = home.path().join("adapter");
    let path = "tinker://run/sampler_weights/final";
    let error = server.rest().download(path, &target).peft(true).await.unwrap_err();
    assert_eq!(error.status(), Some(400));
    assert!(error.hint().unwrap().as_str().contains("training checkpoint"), "{error:#}");
    server.offers_sampler.store(true, Ordering::Relaxed);
    server.rest().download(path, &target).peft(true).await.unwrap();
    assert_eq!(read_config(&target)["target_modules"], json!(["q_proj"]));
}

/// Returns the size of the files in a folder, or 0 if it does not exist.
fn size_of_files(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).into_iter().flatten();
    files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_is_found_before_the_files_are_written() {
    let tensors = pairs(&[Q]);
    let server = HostedServer::new(&service_config(), tensors.clone());
    let home = TempDir::new().unwrap();
    let target = home.path().join("adapter");
    let part = home.path().join("adapter.part");
    let sizes: Vec<u64> =
        server.files.lock().unwrap().values().map(|file| file.len() as u64).collect();
    let used = {
        let part = part.clone();
        move || {
            ["parts", "files"].map(|folder| size_of_files(&part.join(folder))).iter().sum::<u64>()
        }
    };
    let download = |capacity: u64| {
        let used = used.clone();
        let free = move |_: &Path| Some(capacity.saturating_sub(used()));
        server.rest().download(PATH, &target).peft(true).parallel(1).free_space(free)
    };
    // The first file fits, the second does not.
    let error = download(sizes[0] + sizes[1] - 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    let message = error.to_string();
    let expected =
        format!("needs {} bytes, but only {} bytes are free on ", sizes[1], sizes[1] - 1);
    let (_, folder) = message.split_once(&expected).unwrap_or_else(|| panic!("{message}"));
    assert!(Path::new(folder).is_dir(), "{message}");
    assert!(error.hint().unwrap().as_str().starts_with("Free disk space"), "{error:?}");
    assert!(!target.exists());
    assert_eq!(used(), sizes[0], "nothing of the second file was written");
    download(sizes.iter().sum()).await.unwrap();
    assert_eq!(fs::read(target.join(CONFIG)).unwrap().first(), Some(&b'{'));

    let file = home.path().join("file");
    let url = format!("http://files.test/blob/{TENSORS}");
    server.rest().download_file(url, &file).await.unwrap();
    assert_eq!(fs::read(file).unwrap(), tensors);
}

/// The conversion replaces the file with the tensors by a copy.
#[tokio::test(start_paused = true)]
async fn the_conversion_of_an_adapter_needs_space_for_a_copy() {
    let tensors = pairs(&[Q, SERVICE_HEAD]);
    let size = tensors.len() as u64;
    let server = HostedServer::new(&service_config(), tensors.clone());
    let home = TempDir::new().unwrap();
    let target = home.path().join("adapter");
    let files = home.path().join("adapter.part/files");
    let complete = files.join(TENSORS);
    // Everything fits until the tensors are complete.
    let download = |free: u64| {
        let complete = complete.clone();
        let free = move |_: &Path| Some(if complete.exists() { free } else { u64::MAX });
        server.rest().download(PATH, &target).peft(true).free_space(free)
    };
    let error = download(size - 1).await.unwrap_err();
    assert!(error.to_string().contains("bytes are free on"), "{error}");
    assert!(error.hint().unwrap().as_str().starts_with("Free disk space"), "{error:?}");
    assert!(!target.exists());
    assert_eq!(fs::read(&complete).unwrap(), tensors, "the file is kept for the next download");
    server.take_requests();
    download(size).await.unwrap();
    assert!(server.take_requests().contains(&format!("304 /blob/{TENSORS}")));
    let file = TensorFile::open(target.join(TENSORS)).unwrap();
    assert!(file.names().any(|name| name.contains("lm_head")));
}
