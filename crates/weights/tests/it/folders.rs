//! Model folders: what is accepted, with which warnings, and what is refused.

use std::fs;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;
use tinkex_weights::{Error, ModelFolder};

use crate::golden::{OwnedTensor, change_json, change_tensors, copy_of};

/// Returns the error of opening a model that cannot be loaded.
fn open_error(path: &Path) -> Error {
    ModelFolder::open(path).unwrap_err()
}

#[test]
fn a_missing_file_or_tensor_is_named_in_the_error() {
    let copy = copy_of("qwen2");
    fs::remove_file(copy.path().join("model-00002-of-00003.safetensors")).unwrap();
    let error = open_error(copy.path());
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert!(error.to_string().contains("model-00002-of-00003.safetensors"), "{error}");

    let copy = copy_of("llama");
    let text = fs::read_to_string(copy.path().join("config.json")).unwrap();
    let more = text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    fs::write(copy.path().join("config.json"), more).unwrap();
    let error = open_error(copy.path());
    let Error::MissingTensor { name, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "model.layers.2.input_layernorm.weight");
}

#[test]
fn a_tensor_that_does_not_match_the_configuration_is_an_error_of_the_file() {
    let copy = copy_of("llama");
    let text = fs::read_to_string(copy.path().join("config.json")).unwrap();
    let wider = text.replace("\"intermediate_size\": 72", "\"intermediate_size\": 73");
    assert_ne!(wider, text);
    fs::write(copy.path().join("config.json"), wider).unwrap();
    let error = open_error(copy.path());
    assert!(matches!(error, Error::BadFile { .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("model.safetensors: tensor model.layers.0.mlp."), "{message}");
    assert!(message.contains("has shape [72, 40], expected [73, 40]"), "{message}");
}

#[test]
fn an_index_cannot_point_outside_the_folder() {
    for escape in ["../x.safetensors", "/etc/passwd", "..", ""] {
        let copy = copy_of("qwen2");
        let index = serde_json::json!({"weight_map": {"model.norm.weight": escape}});
        let path = copy.path().join("model.safetensors.index.json");
        fs::write(path, index.to_string()).unwrap();
        let error = open_error(copy.path());
        assert!(matches!(error, Error::BadFile { .. }), "{escape:?}: {error}");
    }
}

#[test]
fn an_index_with_a_tensor_that_its_file_lacks_is_refused() {
    let copy = copy_of("qwen2");
    let path = copy.path().join("model.safetensors.index.json");
    let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors".into();
    fs::write(path, index.to_string()).unwrap();
    let error = open_error(copy.path());
    assert!(matches!(error, Error::MissingTensor { .. }), "{error}");
}

#[test]
fn different_tied_tensors_are_both_used_with_a_warning() {
    let copy = copy_of("llama");
    change_json(&copy, "config.json", &json!({"tie_word_embeddings": true}));
    let folder = ModelFolder::open(copy.path()).unwrap();
    assert!(!folder.config().tied);
    let [warning] = folder.warnings() else { panic!("{:?}", folder.warnings()) };
    assert!(warning.contains("config.json has tie_word_embeddings true"), "{warning}");
    assert!(warning.contains("lm_head.weight differs from model.embed_tokens.weight"), "{warning}");
    // Only the headers are read.
    assert!(ModelFolder::inspect(copy.path()).unwrap().config().tied);
}

/// Copies the values of the embedding to the unembedding.
fn copy_embedding(tensors: &mut [OwnedTensor]) {
    let values = find(tensors, "model.embed_tokens.weight").values.clone();
    find(tensors, "lm_head.weight").values = values;
}

fn find<'a>(tensors: &'a mut [OwnedTensor], name: &str) -> &'a mut OwnedTensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn equal_tied_tensors_are_one() {
    let copy = copy_of("llama");
    change_json(&copy, "config.json", &json!({"tie_word_embeddings": true}));
    change_tensors(&copy, |tensors| copy_embedding(tensors));
    let folder = ModelFolder::open(copy.path()).unwrap();
    assert!(folder.config().tied);
    assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
    // A difference in the last element, and NaN, which differs from itself.
    for value in [9.0, f32::NAN] {
        change_tensors(&copy, |tensors| {
            copy_embedding(tensors);
            *find(tensors, "lm_head.weight").values.last_mut().unwrap() = value;
        });
        assert!(!ModelFolder::open(copy.path()).unwrap().config().tied, "{value}");
    }
    change_json(&copy, "config.json", &json!({"tie_word_embeddings": false}));
    change_tensors(&copy, |tensors| copy_embedding(tensors));
    assert!(!ModelFolder::open(copy.path()).unwrap().config().tied);
}

#[test]
fn a_tied_matrix_may_have_either_name() {
    let copy = copy_of("qwen3");
    let embedding = |copy: &TempDir| {
        let folder = ModelFolder::open(copy.path()).unwrap();
        assert!(folder.config().tied && folder.warnings().is_empty());
        folder.tensor("model.embed_tokens.weight").unwrap().to_f32().unwrap()
    };
    let want = embedding(&copy);
    change_tensors(&copy, |tensors| {
        find(tensors, "model.embed_tokens.weight").name = "lm_head.weight".to_owned();
    });
    assert_eq!(embedding(&copy), want);
    change_json(&copy, "config.json", &json!({"tie_word_embeddings": false}));
    let error = open_error(copy.path());
    let Error::MissingTensor { name, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "model.embed_tokens.weight");
}

#[test]
fn an_untied_model_needs_its_unembedding() {
    let copy = copy_of("qwen3");
    change_json(&copy, "config.json", &json!({"tie_word_embeddings": false}));
    let error = open_error(copy.path());
    let Error::MissingTensor { name, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "lm_head.weight");
}

#[test]
fn a_tied_unembedding_of_the_wrong_shape_is_refused() {
    let copy = copy_of("qwen3");
    change_tensors(&copy, |tensors| {
        let name = "lm_head.weight".to_owned();
        let shape = vec![1, 36];
        tensors.push(OwnedTensor { name, shape, values: vec![0.0; 36] });
    });
    let error = open_error(copy.path()).to_string();
    assert!(error.contains("lm_head.weight has shape [1, 36], expected [113, 36]"), "{error}");
}

#[test]
fn names_without_the_prefix_of_a_model_with_a_head_are_accepted() {
    for model in ["qwen3", "llama"] {
        let copy = copy_of(model);
        let norm = |copy: &TempDir| {
            let folder = ModelFolder::open(copy.path()).unwrap();
            assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
            folder.tensor("model.norm.weight").unwrap().to_f32().unwrap()
        };
        let want = norm(&copy);
        change_tensors(&copy, |tensors| {
            for tensor in tensors {
                if let Some(short) = tensor.name.strip_prefix("model.") {
                    tensor.name = short.to_owned();
                }
            }
        });
        assert_eq!(norm(&copy), want);
    }
}

#[test]
fn tensors_of_no_layer_are_ignored_with_a_warning() {
    let copy = copy_of("llama");
    let extra =
        |name: &str| OwnedTensor { name: name.to_owned(), shape: vec![1], values: vec![0.0] };
    change_tensors(&copy, |tensors| {
        tensors.push(extra("model.layers.0.self_attn.rotary_emb.inv_freq"));
    });
    assert!(ModelFolder::open(copy.path()).unwrap().warnings().is_empty());
    change_tensors(&copy, |tensors| tensors.push(extra("model.layers.0.self_attn.q_proj.bias")));
    let warnings = |copy: &TempDir| ModelFolder::open(copy.path()).unwrap().warnings().join("\n");
    let text = warnings(&copy);
    assert!(text.ends_with("ignored: model.layers.0.self_attn.q_proj.bias"), "{text}");
    change_tensors(&copy, |tensors| tensors.push(extra("score.weight")));
    let text = warnings(&copy);
    assert!(text.ends_with("ignored: model.layers.0.self_attn.q_proj.bias and 1 more"), "{text}");
}

#[test]
fn end_of_sequence_tokens_of_both_files_count() {
    let copy = copy_of("llama");
    let eos = |generation: &str| {
        fs::write(copy.path().join("generation_config.json"), generation).unwrap();
        ModelFolder::inspect(copy.path())
            .map(|folder| (folder.config().eos.clone(), folder.warnings().join("\n")))
    };
    for (generation, want) in [
        (r#"{"eos_token_id": [8, 2, 9]}"#, &[2, 8, 9][..]),
        (r#"{"eos_token_id": 7}"#, &[2, 7]),
        (r#"{"eos_token_id": -1}"#, &[2]),
        (r#"{"eos_token_id": null}"#, &[2]),
        ("{}", &[2]),
    ] {
        let (eos, warnings) = eos(generation).unwrap();
        assert_eq!((&eos[..], warnings.as_str()), (want, ""), "{generation}");
    }
    let (ids, warnings) = eos(r#"{"eos_token_id": [5, 131]}"#).unwrap();
    assert_eq!(ids, [2, 5]);
    assert!(
        warnings.contains("has the eos_token_id 131, but the model has 131 tokens"),
        "{warnings}"
    );
    change_json(&copy, "config.json", &json!({ "bos_token_id": 131 }));
    let folder = ModelFolder::inspect(copy.path()).unwrap();
    assert_eq!(folder.config().bos, None);
    let warnings = folder.warnings().join("\n");
    assert!(warnings.contains("has the bos_token_id 131, but the model has 131"), "{warnings}");
    for (generation, want) in [
        ("{", "not a generation configuration"),
        ("[1]", "not a generation configuration"),
        (r#"{"eos_token_id": "x"}"#, "eos_token_id is \"x\", expected a token id"),
    ] {
        let error = eos(generation).unwrap_err().to_string();
        assert!(error.contains("generation_config.json: ") && error.contains(want), "{error}");
    }
}

#[test]
fn a_folder_without_safetensors_is_named() {
    let copy = copy_of("llama");
    fs::rename(copy.path().join("model.safetensors"), copy.path().join("x")).unwrap();
    let error = open_error(copy.path()).to_string();
    assert!(
        error.contains("it has no model.safetensors and no model.safetensors.index"),
        "{error}"
    );
    fs::write(copy.path().join("pytorch_model.bin"), "x").unwrap();
    let error = open_error(copy.path()).to_string();
    assert!(error.contains("only pytorch_model.bin; convert the weights"), "{error}");
}

#[test]
fn integer_weights_and_truncated_files_are_refused_by_their_header() {
    let copy = copy_of("llama");
    let path = copy.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let header_len = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
    let header = String::from_utf8(bytes[8..8 + header_len].to_vec()).unwrap();
    let mut integers = bytes[..8].to_vec();
    integers.extend_from_slice(header.replace("F32", "I32").as_bytes());
    integers.extend_from_slice(&bytes[8 + header_len..]);
    fs::write(&path, integers).unwrap();
    let error = ModelFolder::inspect(copy.path()).unwrap_err().to_string();
    assert!(error.contains("tensor model.embed_tokens.weight is stored as I32"), "{error}");
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = ModelFolder::inspect(copy.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: the header describes"), "{error}");
    fs::write(&path, b"GGUF\x03\0\0\0 another format").unwrap();
    let error = ModelFolder::inspect(copy.path()).unwrap_err().to_string();
    assert!(error.contains("not a safetensors file"), "{error}");
}
