//! GGUF files as base models, and quantization of folders.

use std::path::Path;

use tinkex_server::{Quantization, Server};
use tinkex_weights::GgufFile;

use crate::golden_gguf;
use crate::harness::{MODEL, TestServer, golden, options};

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
    let trainer = service.create_lora_training_client("org/file").rank(2).create().await.unwrap();
    let tokenizer = trainer.get_info().await.unwrap().model_data.tokenizer_id.unwrap();
    let config = std::fs::read_to_string(Path::new(&tokenizer).join("tokenizer_config.json"));
    assert!(config.unwrap().contains("{{ messages }}"));
    assert!(Path::new(&tokenizer).join("tokenizer.json").is_file());
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
    let model = service.create_lora_training_client(MODEL).rank(4).seed(3).create().await.unwrap();
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let datum = tinkex::Datum::completion([9], [8, 7, 6, 5]).unwrap();
    let trained = model.forward(vec![datum], tinkex::LossFn::CrossEntropy).await.unwrap();
    let trained = trained.outputs.get(0).unwrap().f32("logprobs").unwrap().to_vec();
    let scored = sampler.compute_logprobs([9, 8, 7, 6, 5]).await.unwrap();
    assert_eq!(&scored.as_slice()[1..], &trained[..]);
}
