//! Base models from folders: checks at the start, and requests that depend on their files.

use std::path::Path;
use std::process::Child;

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex::{ErrorCategory, LoraOptions, SamplingParams, StopReason};
use tinkex_server::{Server, StartError};

use crate::child_server::{ChildOptions, start};
use crate::golden_gguf;
use crate::harness::{Http, MODEL, TestServer, golden, options};
use crate::process::SERVE;

/// Copies the files of a golden model to a temporary folder.
fn copy_of(model: &str) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden(model).join(file), copy.path().join(file)).unwrap();
    }
    copy
}

fn edit_config(folder: &Path, from: &str, to: &str) {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "config.json contains {from}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

async fn serve(folder: &Path) -> TestServer {
    TestServer::with(|options| options.models = vec![(MODEL.to_owned(), folder.to_owned())]).await
}

/// The end-of-sequence tokens of both files end a sample.
#[tokio::test(flavor = "multi_thread")]
async fn the_generation_configuration_ends_samples() {
    let copy = copy_of("llama");
    let expected = std::fs::read(golden("llama").join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let numbers = |name: &str| -> Vec<u32> {
        serde_json::from_value(expected["greedy_base"][name].clone()).unwrap()
    };
    let prompt = numbers("prompt");
    let tokens = numbers("tokens");
    let at = (1..tokens.len()).find(|at| !tokens[..*at].contains(&tokens[*at])).unwrap();
    let greedy = SamplingParams::new().max_tokens(12).temperature(0.0);
    for with_file in [false, true] {
        if with_file {
            let generation = json!({"eos_token_id": [tokens[at], -1]});
            let path = copy.path().join("generation_config.json");
            std::fs::write(path, generation.to_string()).unwrap();
        }
        let test_server = serve(copy.path()).await;
        let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
        let result = sampler.sample(prompt.clone(), greedy.clone()).await.unwrap();
        let sequence = &result.sequences[0];
        let (want, reason) = if with_file {
            (&tokens[..=at], StopReason::Stop)
        } else {
            (&tokens[..], StopReason::Length)
        };
        assert_eq!((&sequence.tokens[..], sequence.stop_reason), (want, reason));
    }
}

/// A prompt may fill the whole context if it is only scored.
#[tokio::test(flavor = "multi_thread")]
async fn logprobs_of_a_prompt_of_exactly_the_context_length() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let sampler = service.create_sampling_client(MODEL).await.unwrap();
    let row: Vec<u32> = (0..257_u32).map(|i| (i * i + 31 * i) % 113).collect();
    let full = sampler.compute_logprobs(&row[..256]).await.unwrap();
    assert_eq!(full.len(), 256);
    let shorter = sampler.compute_logprobs(&row[..255]).await.unwrap();
    assert_eq!(full.as_slice()[1..255], shorter.as_slice()[1..], "bit-identical");
    assert!(full.as_slice()[255].is_finite());
    let model = service.create_lora_training_client(LoraOptions::new(MODEL).rank(4)).await.unwrap();
    let datum = tinkex::Datum::completion([row[0]], row[1..257].to_vec()).unwrap();
    let trained = model.forward(vec![datum], tinkex::LossFn::CrossEntropy).await.unwrap();
    let trained = trained.outputs.get(0).unwrap().f32("logprobs").unwrap().to_vec();
    assert_eq!(full.as_slice()[1..], trained[..255], "bit-identical with training");

    let error = sampler.compute_logprobs(&row).await.unwrap_err();
    assert!(error.to_string().contains("257 + 1 > 256"), "{error}");
    let params = SamplingParams::new().max_tokens(1);
    let error = sampler.sample(&row[..256], params).await.unwrap_err();
    assert!(error.to_string().contains("256 + 1 > 256"), "{error}");
}

/// Ids are reported as they were sent, in prompts and in stop conditions.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_outside_the_vocabulary_are_named() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let sampler = http.sampler(&session).await;
    for (tokens, stop, want) in [
        (
            json!([5, -1]),
            json!(null),
            "prompt[1]: token -1 is outside of the model's vocabulary of 113",
        ),
        (json!([113]), json!(null), "prompt[0]: token 113 is outside"),
        (json!([5]), json!([3, 113]), "sampling_params.stop[1]: token 113 is outside"),
        (json!([5]), json!([-1]), "sampling_params.stop[0]: token -1 is outside"),
    ] {
        let request = json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}, "seq_id": 0,
            "sampling_params": {"max_tokens": 2, "stop": stop}, "sampling_session_id": sampler,
        });
        let (status, body) = http.post("/asample", request).await;
        let detail = body["detail"].as_str().unwrap_or_default();
        assert!(status == 400 && detail.contains(want), "{status}: {body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_folder_prevents_the_start() {
    let copy = copy_of("qwen3");
    edit_config(copy.path(), "\"head_dim\": 16", "\"head_dim\": 14");
    let data = tempfile::tempdir().unwrap();
    let mut options = options(data.path());
    options.models = vec![("mine".to_owned(), copy.path().to_owned())];
    let error = Server::start(options).await.unwrap_err();
    assert!(matches!(error, StartError::InvalidModel { .. }), "{error}");
    let message = error.to_string();
    assert!(message.starts_with("cannot use base model \"mine\": "), "{message}");
    assert!(message.contains("q_proj.weight has shape [64, 36], expected [56, 36]"), "{message}");
    assert!(error.model_hint().unwrap().starts_with("Download the files in "));
}

/// Only the values are wrong, which the headers do not tell.
#[tokio::test(flavor = "multi_thread")]
async fn weights_that_are_not_finite_fail_the_request_with_the_name_of_the_tensor() {
    let copy = copy_of("qwen3");
    let path = copy.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let file = tinkex_weights::TensorFile::open(&path).unwrap();
    let norm = file.tensor("model.norm.weight").unwrap().bytes().unwrap();
    let at = bytes.windows(norm.len()).position(|window| window == norm).unwrap();
    bytes[at + 8..at + 12].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let test_server = serve(copy.path()).await;
    let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
    let params = SamplingParams::new().max_tokens(1);
    let error = sampler.sample([5], params).await.unwrap_err();
    // Not a fault that another attempt could avoid: the client does not submit the sample again.
    assert_eq!(error.category(), Some(ErrorCategory::User), "{error}");
    let message = error.to_string();
    let reason = "model.safetensors: tensor model.norm.weight is -inf at index 2";
    assert!(message.contains(&format!("cannot load base model {MODEL:?}: ")), "{message}");
    assert!(message.contains(reason) && !message.contains("checkpoint"), "{message}");
}

/// Missing and truncated files are reported once, with the file and the reason.
#[tokio::test(flavor = "multi_thread")]
async fn files_that_disappear_after_the_start_fail_requests_permanently() {
    let copy = copy_of("qwen3");
    let test_server = serve(copy.path()).await;
    let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
    let path = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for (damage, want) in [
        (Some(&bytes[..bytes.len() / 2]), "model.safetensors"),
        (None, "it has no model.safetensors and no model.safetensors.index.json"),
    ] {
        match damage {
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        let params = SamplingParams::new().max_tokens(1);
        let error = sampler.sample([5], params).await.unwrap_err();
        assert_eq!(error.category(), Some(ErrorCategory::User), "{error}");
        assert!(error.to_string().contains(want), "{error}");
    }
    // Repaired files are loaded without a restart.
    std::fs::write(&path, bytes).unwrap();
    let params = SamplingParams::new().max_tokens(1);
    sampler.sample([5], params).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_changed_since_the_start_is_not_loaded() {
    let copy = copy_of("qwen3");
    let test_server = serve(copy.path()).await;
    let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
    edit_config(copy.path(), "\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-05");
    let params = SamplingParams::new().max_tokens(1);
    let error = sampler.sample([5], params).await.unwrap_err().to_string();
    assert!(
        error.contains("config.json: the model has changed since the server started"),
        "{error}"
    );
}

/// A server in its own process that logs to a file.
struct LoggingServer {
    child: Child,
    url: String,
    data: TempDir,
}

impl LoggingServer {
    fn start(options: ChildOptions) -> Self {
        let data = tempfile::tempdir().unwrap();
        let options = ChildOptions {
            data_dir: data.path().join("data"),
            threads: 1,
            log: Some("info".to_owned()),
            ..options
        };
        let mut command = options.command(&SERVE);
        command.stderr(std::fs::File::create(data.path().join("log")).unwrap());
        let (child, url) = start(command);
        Self { child, url, data }
    }

    /// Returns the warnings about a model so far.
    fn warnings(&self, model: &str) -> Vec<String> {
        let log = std::fs::read_to_string(self.data.path().join("log")).unwrap();
        // The last line may be incomplete.
        let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let warnings =
            events.filter(|event| event["level"] == "WARN" && event["base_model"] == model);
        warnings.map(|event| event["message"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until there are `count` warnings about a model, and returns them.
    async fn first_warnings(&self, model: &str, count: usize) -> Vec<String> {
        loop {
            let warnings = self.warnings(model);
            if warnings.len() >= count {
                return warnings;
            }
            Http::new(&self.url).get("/api/v1/healthz").await;
        }
    }

    fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for LoggingServer {
    /// Ends the process of a test that failed.
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// A missing tokenizer is logged at the start, and a tied unembedding with values of its own when
/// the weights are loaded.
#[tokio::test(flavor = "multi_thread")]
async fn unusual_files_are_logged() {
    let copy = copy_of("llama");
    edit_config(copy.path(), "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    let mut server = LoggingServer::start(ChildOptions {
        models: vec![(MODEL.to_owned(), copy.path().to_owned())],
        ..ChildOptions::default()
    });
    let at_start = server.first_warnings(MODEL, 1).await;
    assert_eq!(at_start.len(), 1, "{at_start:?}");
    assert!(at_start[0].contains("tokenizer.json"), "{at_start:?}");
    let want = "chat requests are rejected, and other inference requests must send token ids and \
                receive no text; requests with stop strings are rejected";
    assert!(at_start[0].ends_with(want), "{at_start:?}");
    let http = Http::new(&server.url);
    let session = http.session().await;
    let sampler = http.sampler(&session).await;
    let request = json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "seq_id": 0,
        "sampling_params": {"max_tokens": 1}, "sampling_session_id": sampler,
    });
    let (_, future) = http.post("/asample", request).await;
    http.sampled(&future).await;
    // The first use of the tokenizer does not repeat the warning.
    let request = json!({"model": MODEL, "prompt": [5], "max_tokens": 1}).to_string();
    let (status, body) = http.send("POST", "/v1/completions", &[], request.into_bytes()).await;
    assert_eq!(status, 200, "{body}");
    server.stop();
    let warnings = server.warnings(MODEL);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[1].contains("lm_head.weight differs from"), "{warnings:?}");
}

/// Tokenizers and chat templates of all models are read when the server starts, not at first use.
#[tokio::test(flavor = "multi_thread")]
async fn malformed_tokenizers_and_chat_templates_are_logged_at_the_start() {
    let files = tempfile::tempdir().unwrap();
    let folder = |name: &str| {
        let folder = files.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden("qwen3").join(file), folder.join(file)).unwrap();
        }
        folder
    };
    // A vocabulary that the `tokenizers` library cannot load.
    let unknown_split = json!({
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [],
        "pre_tokenizer": {"type": "Unknown"},
    });
    let split = folder("split");
    std::fs::write(split.join("tokenizer.json"), unknown_split.to_string()).unwrap();
    // A model of the hub cache.
    let cached = folder("hub/models--org--cached/snapshots/aaa");
    tinkex_server::write_tokenizer(&cached).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("qwen3").join(file), cached.join(file)).unwrap();
    }
    std::fs::write(cached.join("chat_template.jinja"), "{% for %}").unwrap();
    let gguf = files.path().join("gguf");
    std::fs::create_dir(&gguf).unwrap();
    let gguf = gguf.join("model.gguf");
    golden_gguf::write(&golden("qwen3"), &gguf, (0..).map(|i| format!("t{i}")), None);
    let bytes = std::fs::read(&gguf).unwrap();
    let at = bytes.windows(4).position(|part| part == b"gpt2").unwrap();
    std::fs::write(&gguf, [&bytes[..at], b"bert", &bytes[at + 4..]].concat()).unwrap();

    let mut server = LoggingServer::start(ChildOptions {
        models: vec![("split".to_owned(), split), ("file".to_owned(), gguf)],
        hub_cache: Some(files.path().join("hub")),
        ..ChildOptions::default()
    });
    let split = server.first_warnings("split", 1).await.join("\n");
    assert!(split.contains("split/tokenizer.json") && split.contains("PreTokenizer"), "{split}");
    assert!(split.ends_with("must send token ids and receive no text"), "{split}");
    let cached = server.first_warnings("org/cached", 2).await;
    let last = cached.last().unwrap();
    assert!(cached.iter().any(|line| line.contains("has 1024 tokens, but the")), "{cached:?}");
    assert!(last.contains("template") && last.ends_with("; chat requests are rejected"), "{last}");
    let file = server.first_warnings("file", 1).await;
    assert!(
        file[0].starts_with("clients cannot use the tokenizer of file: ")
            && file[0].contains("tokenizer \"bert\" is not supported")
            && file[0].ends_with("--tokenizer file=FOLDER"),
        "{file:?}"
    );
    server.stop();
}
