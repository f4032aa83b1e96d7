//! GGUF files as base models, and quantization of folders.

use std::path::Path;

use tinkex_server::{Quantization, Server};
use tinkex_weights::{DType, GgufFile, GgufWriter, ModelFolder, gguf_tensor_name};

use crate::harness::{MODEL, TestServer, golden, options};

/// Writes the recorded Qwen3 model as a GGUF file.
fn write_gguf(path: &Path) {
    let source = ModelFolder::open(golden("qwen3")).unwrap();
    let config = source.config();
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "qwen3");
    for (key, value) in [
        ("block_count", config.layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
    ] {
        writer.metadata(format!("qwen3.{key}"), u32::try_from(value).unwrap());
    }
    let tokens: Vec<String> = (0..config.vocab_size).map(|i| format!("t{i}")).collect();
    writer
        .metadata("qwen3.attention.layer_norm_rms_epsilon", config.norm_eps)
        .metadata("qwen3.rope.freq_base", 1e6_f32)
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", "qwen2")
        .metadata("tokenizer.ggml.eos_token_id", config.eos[0])
        .metadata("tokenizer.ggml.token_type", vec![1_i32; tokens.len()])
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.merges", vec!["t 1".to_owned()])
        .metadata("tokenizer.chat_template", "{{ messages }}");
    let names: Vec<String> = config.tensors().map(|(name, _)| name).collect();
    for (name, shape) in config.tensors() {
        writer.tensor(&gguf_tensor_name(&name).unwrap(), DType::F32, &shape).unwrap();
    }
    let fill = |i: usize, out: &mut dyn std::io::Write| {
        for value in source.tensor(&names[i])?.to_f32()? {
            out.write_all(&value.to_le_bytes())?;
        }
        Ok(())
    };
    writer.write(path, fill).unwrap();
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
