//! GGUF files as base models, and quantization of folders.

use std::path::{Path, PathBuf};

use tinkex_server::{Quantization, Server, StartError};
use tinkex_text::Tokenizer;
use tinkex_weights::GgufFile;

use crate::golden_gguf;
use crate::harness::{MODEL, TestServer, client, golden, options};

fn write_gguf(path: &Path) {
    let names = (0..).map(|i| format!("t{i}"));
    golden_gguf::write(&golden("qwen3"), path, names, Some("{{ messages }}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gguf_file_gives_the_results_of_its_folder() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("model.gguf");
    write_gguf(&path);
    let test_server =
        TestServer::with(|options| options.models.push(("org/file".to_owned(), path.clone())))
            .await;
    let service = test_server.client();
    let mut results = Vec::new();
    for name in [MODEL, "org/file"] {
        let sampler = service.create_sampling_client(name).await.unwrap();
        results.push(sampler.compute_logprobs([9, 8, 7, 6, 5]).await.unwrap());
    }
    assert_eq!(results[0].as_slice()[1..], results[1].as_slice()[1..]);
    let trainer = service
        .create_lora_training_client(tinkex::LoraOptions::new("org/file").rank(2))
        .await
        .unwrap();
    let tokenizer = trainer.get_info().await.unwrap().model_data.tokenizer_id.unwrap();
    let config = std::fs::read_to_string(Path::new(&tokenizer).join("tokenizer_config.json"));
    assert!(config.unwrap().contains("{{ messages }}"));
    assert!(Path::new(&tokenizer).join("tokenizer.json").is_file());
}

/// Returns the folder of the tokenizer that the server names to clients of the GGUF file `path`.
async fn tokenizer_folder(data: &Path, path: &Path, given: Option<&Path>) -> PathBuf {
    let mut options = options(data).model("org/file", path);
    if let Some(given) = given {
        options = options.tokenizer("org/file", given);
    }
    let server = Server::start(options).await.unwrap();
    let service = client(&server.base_url());
    let trainer = service
        .create_lora_training_client(tinkex::LoraOptions::new("org/file").rank(2))
        .await
        .unwrap();
    let id = trainer.get_info().await.unwrap().model_data.tokenizer_id.unwrap();
    server.stop().await;
    id.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_has_the_tokenizer_and_the_file_the_chat_template() {
    let files = tempfile::tempdir().unwrap();
    let data = tempfile::tempdir().unwrap();
    let path = files.path().join("model.gguf");
    write_gguf(&path);
    let other = tempfile::tempdir().unwrap();
    tinkex_server::write_tokenizer(other.path()).unwrap();
    let given = Some(other.path());
    let read = |folder: &Path, name: &str| std::fs::read_to_string(folder.join(name)).ok();

    // The folder has a chat template of its own.
    let found = tokenizer_folder(data.path(), &path, given).await;
    assert_eq!(found, other.path());

    // It has none, so the file's is added.
    std::fs::write(other.path().join("tokenizer_config.json"), r#"{"eos_token": "x"}"#).unwrap();
    let found = tokenizer_folder(data.path(), &path, given).await;
    assert!(found.starts_with(data.path()), "{}", found.display());
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(read(&found, name), read(other.path(), name), "{name}");
    }
    assert_eq!(read(&found, "chat_template.jinja").as_deref(), Some("{{ messages }}"));
    let tokenizer = Tokenizer::from_folder(&found).unwrap();
    assert!(tokenizer.has_chat_template());

    // The same beside the file.
    let beside = files.path().join("tokenizer.json");
    std::fs::copy(other.path().join("tokenizer.json"), &beside).unwrap();
    let again = tokenizer_folder(data.path(), &path, None).await;
    assert_eq!(again, found);
    assert_eq!(read(&found, "tokenizer_config.json"), None, "no such file is beside the file");
    assert_eq!(read(&found, "chat_template.jinja").as_deref(), Some("{{ messages }}"));

    // The tokenizer of the file replaces both, also if another tokenizer than `tokenizer.json` is
    // beside it.
    std::fs::remove_file(beside).unwrap();
    std::fs::write(files.path().join("tiktoken.model"), "IQ== 0\n").unwrap();
    assert_eq!(tokenizer_folder(data.path(), &path, None).await, found);
    assert_eq!(read(&found, "chat_template.jinja"), None);
    assert!(read(&found, "tokenizer_config.json").unwrap().contains("{{ messages }}"));

    let empty = tempfile::tempdir().unwrap();
    let options = options(data.path()).model("file", &path).tokenizer("file", empty.path());
    let error = Server::start(options).await.err().unwrap();
    assert!(matches!(error, StartError::InvalidTokenizer { .. }), "{error}");
}

#[tokio::test]
async fn an_unusable_gguf_file_is_named_at_the_start() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("model.gguf");
    write_gguf(&path);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(GgufFile::open(&path).is_err());
    let data = tempfile::tempdir().unwrap();
    let error = Server::start(options(data.path()).model("file", &path)).await.err().unwrap();
    let text = format!("{error:?}");
    assert!(text.contains("model.gguf") && text.contains("truncated"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn quantized_folders_train_and_score_with_the_same_bits() {
    let test_server = TestServer::with(|options| options.quantize = Some(Quantization::Q8)).await;
    let service = test_server.client();
    let model = service
        .create_lora_training_client(tinkex::LoraOptions::new(MODEL).rank(4).seed(3))
        .await
        .unwrap();
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let datum = tinkex::Datum::completion([9], [8, 7, 6, 5]).unwrap();
    let trained = model.forward(vec![datum], tinkex::LossFn::CrossEntropy).await.unwrap();
    let trained = trained.outputs.get(0).unwrap().f32("logprobs").unwrap().to_vec();
    let scored = sampler.compute_logprobs([9, 8, 7, 6, 5]).await.unwrap();
    assert_eq!(&scored.as_slice()[1..], &trained[..]);
}
