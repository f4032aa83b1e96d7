//! Reading and writing of tensor files and adapters: valid, damaged and malicious files.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tinkex_weights::{
    AdapterFile, DType, Error, LoraPairRef, NamedTensor, PeftConfig, TensorFile, TensorSlice,
    write_tensors,
};

use crate::golden::{MODELS, folder};

#[test]
fn adapters_of_peft_are_read_and_written_identically() {
    for name in MODELS {
        let theirs = folder(name).join("adapter");
        let adapter = AdapterFile::load(&theirs).unwrap();
        assert_eq!((adapter.config.rank, adapter.config.scale()), (4, 8.0));
        assert_eq!(adapter.pairs.len(), 2 * 7 + 1);
        let ours = tempfile::tempdir().unwrap();
        save(ours.path(), &adapter);
        assert_eq!(AdapterFile::load(ours.path()).unwrap(), adapter);

        // Every setting that the engine writes has the value that peft writes. For the other
        // settings peft assumes defaults.
        let config = |folder: &Path| -> serde_json::Map<String, serde_json::Value> {
            serde_json::from_slice(&fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
        };
        let own = config(ours.path());
        let peft = config(&theirs);
        for key in ["peft_type", "r", "lora_alpha", "target_modules", "task_type", "bias"] {
            assert!(own.contains_key(key), "{key}");
        }
        for (key, value) in &own {
            assert_eq!(Some(value), peft.get(key), "{key}");
        }

        let file = |folder: &Path| TensorFile::open(folder.join("adapter_model.safetensors"));
        let ours = file(ours.path()).unwrap();
        let theirs = file(&theirs).unwrap();
        assert_eq!(ours.names().collect::<Vec<_>>(), theirs.names().collect::<Vec<_>>());
        for tensor in theirs.tensors() {
            let own = ours.tensor(tensor.name()).unwrap();
            assert_eq!((own.dtype(), own.shape()), (tensor.dtype(), tensor.shape()));
            assert_eq!(own.bytes().unwrap(), tensor.bytes().unwrap());
        }
    }
}

#[test]
fn the_services_name_of_the_unembedding_is_accepted() {
    let adapter = AdapterFile::load(folder("qwen3").join("adapter")).unwrap();
    let ours = tempfile::tempdir().unwrap();
    save(ours.path(), &adapter);
    let path = ours.path().join("adapter_model.safetensors");
    let service_name =
        |name: &str| Some(name.replace(".lm_head.", ".model.unembed_tokens.").into());
    TensorFile::open(&path).unwrap().write_renamed(&path, service_name).unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert!(file.get("base_model.model.model.unembed_tokens.lora_A.weight").is_some());
    assert_eq!(AdapterFile::load(ours.path()).unwrap(), adapter);
}

fn save(path: &Path, adapter: &AdapterFile) {
    let pairs: Vec<LoraPairRef<'_>> = adapter
        .pairs
        .iter()
        .map(|pair| LoraPairRef {
            module: &pair.module,
            inputs: pair.inputs,
            outputs: pair.outputs,
            a: &pair.a,
            b: &pair.b,
        })
        .collect();
    AdapterFile::save(path, &adapter.config, &pairs).unwrap();
}

#[test]
fn adapters_of_unsupported_variants_are_refused() {
    let good = folder("llama").join("adapter");
    let text = fs::read(good.join("adapter_config.json")).unwrap();
    for (key, value) in [
        ("use_dora", serde_json::json!(true)),
        ("use_rslora", serde_json::json!(true)),
        ("bias", serde_json::json!("all")),
        ("peft_type", serde_json::json!("IA3")),
        ("rank_pattern", serde_json::json!({"q_proj": 8})),
        ("modules_to_save", serde_json::json!(["lm_head"])),
        ("init_lora_weights", serde_json::json!("pissa")),
        ("r", serde_json::json!(0)),
        ("r", serde_json::json!(8)),
    ] {
        let copy = tempfile::tempdir().unwrap();
        let tensors = "adapter_model.safetensors";
        fs::copy(good.join(tensors), copy.path().join(tensors)).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        config[key] = value.clone();
        fs::write(copy.path().join("adapter_config.json"), config.to_string()).unwrap();
        let error = AdapterFile::load(copy.path()).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }), "{key} = {value}: {error}");
    }
}

#[test]
fn adapters_of_changed_base_models_are_refused() {
    let good = folder("llama").join("adapter");
    let text = fs::read(good.join("adapter_config.json")).unwrap();
    let copy = tempfile::tempdir().unwrap();
    let path = copy.path().join("adapter_config.json");
    let read = |init: serde_json::Value| {
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        config["init_lora_weights"] = init;
        fs::write(&path, config.to_string()).unwrap();
        PeftConfig::read(&path)
    };
    for init in ["pissa", "pissa_niter_16", "PiSSA", "corda", "olora", "lora_ga"] {
        let error = read(init.into()).unwrap_err().to_string();
        assert!(
            error.contains(&format!("init_lora_weights {init:?} changes the weights of the base")),
            "{error}"
        );
        assert!(error.contains("path_initial_model_for_weight_conversion"), "{error}");
    }
    let error = read("loftq".into()).unwrap_err().to_string();
    assert!(error.contains("merge_and_unload"), "{error}");
    for init in [true.into(), false.into(), serde_json::Value::Null] {
        read(init).unwrap();
    }
    for init in ["gaussian", "eva", "orthogonal"] {
        read(init.into()).unwrap();
    }
}

#[test]
fn incomplete_pairs_and_non_finite_values_are_refused() {
    let config = PeftConfig {
        rank: 1,
        alpha: 32.0,
        base_model: "m".to_owned(),
        target_modules: vec!["q_proj".to_owned()],
    };
    let name =
        |matrix| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{matrix}.weight");
    let a = name("A");
    let b = name("B");
    let k = a.replace("q_proj", "k_proj");
    let embedding = "base_model.model.model.embed_tokens.lora_embedding_A";
    let out = |name, values| NamedTensor { name, shape: &[1, 1], values: TensorSlice::F32(values) };
    for (tensors, want) in [
        (vec![out(&a, &[1.0])], "tensor base_model.model.model.layers.0"),
        (vec![out(&a, &[1.0]), out(&b, &[f32::NAN])], "NaN"),
        (vec![out("x", &[1.0])], "not a LoRA matrix"),
        (vec![out(&a, &[1.0]), out(&b, &[1.0]), out(&k, &[1.0])], "does not select tensor"),
        (vec![out(embedding, &[1.0])], "lora_embedding_A is an adapter of an embedding"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        config.write(folder.path().join("adapter_config.json")).unwrap();
        write_tensors(folder.path().join("adapter_model.safetensors"), &tensors, &[]).unwrap();
        let error = AdapterFile::load(folder.path()).unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
    }
}

/// Writes a file with this header and `data` bytes after it.
fn file_with_header(header: &str, data: usize) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

#[test]
fn invalid_headers_are_refused_with_a_reason() {
    let f32s = |shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    for (header, data, want) in [
        ("", 0, "invalid header"),
        ("[]", 0, "invalid header"),
        ("{", 0, "invalid header"),
        (&format!(r#"{{"a":{}}}"#, f32s("[2]", 0, 8)), 4, "describes 8 bytes"),
        (&format!(r#"{{"a":{}}}"#, f32s("[2]", 0, 8)), 12, "describes 8 bytes"),
        (&format!(r#"{{"a":{}}}"#, f32s("[3]", 0, 8)), 8, "takes 12 bytes"),
        (&format!(r#"{{"a":{}}}"#, f32s("[2]", 8, 0)), 8, "offsets are 8..0"),
        (&format!(r#"{{"a":{}}}"#, f32s("[1]", 4, 8)), 8, "leaves a gap"),
        (&format!(r#"{{"a":{},"b":{}}}"#, f32s("[2]", 0, 8), f32s("[2]", 4, 12)), 12, "overlaps"),
        (&format!(r#"{{"a":{0},"a":{0}}}"#, f32s("[1]", 0, 4)), 4, "twice"),
        (
            &format!(r#"{{"a":{}}}"#, f32s("[4294967296,4294967296,4294967296]", 0, 8)),
            8,
            "too large",
        ),
        (&format!(r#"{{"a":{}}}"#, f32s("[1000000000000]", 0, 4_000_000_000_000)), 8, "describes"),
        (r#"{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#, 1, "\"F4\""),
        (r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4, "invalid header"),
    ] {
        let (_folder, path) = file_with_header(header, data);
        let error = TensorFile::open(&path).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }), "{header}: {error}");
        assert!(error.to_string().contains(want), "{header}: {error}");
    }
}

#[test]
fn short_files_and_long_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x");
    for bytes in [&b""[..], b"1234567", &[255; 8], &[255; 64], &100_u64.to_le_bytes()] {
        fs::write(&path, bytes).unwrap();
        let error = TensorFile::open(&path).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }), "{error}");
    }
    assert!(matches!(TensorFile::open(folder.path()), Err(Error::BadFile { .. })));
    assert!(matches!(TensorFile::open(folder.path().join("none")), Err(Error::Io { .. })));
}

#[test]
fn unaligned_elements_are_copied() {
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}"#;
    let (_folder, path) = file_with_header(header, 5);
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.tensor("b").unwrap().to_f32().unwrap()[..], [0.0]);
    let error = file.tensor("a").unwrap().to_f32().unwrap_err();
    assert!(error.to_string().contains("stored as U8"), "{error}");
    assert_eq!(file.tensor("a").unwrap().dtype(), DType::U8);
}

#[test]
fn a_tensor_that_does_not_fill_its_shape_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x");
    let one = |name, shape| NamedTensor { name, shape, values: TensorSlice::F32(&[1.0, 2.0]) };
    let wrong = write_tensors(&path, &[one("a", &[3])], &[]);
    assert!(matches!(wrong, Err(Error::InvalidTensor { .. })));
    let twice = write_tensors(&path, &[one("a", &[2]), one("a", &[2])], &[]);
    assert!(matches!(twice, Err(Error::InvalidTensor { .. })));
    assert!(!path.exists());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn mutated_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let ones = [half::bf16::ONE; 4];
        let tensors = [
            NamedTensor { name: "a", shape: &[2, 3], values: TensorSlice::F32(&[1.0; 6]) },
            NamedTensor { name: "bb", shape: &[4], values: TensorSlice::Bf16(&ones) },
        ];
        write_tensors(&path, &tensors, &[("k", "v")]).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fs::write(&path, bytes).unwrap();
        if let Ok(file) = TensorFile::open(&path) {
            for tensor in file.tensors() {
                prop_assert_eq!(tensor.dtype().byte_len(tensor.count()), Some(tensor.bytes().unwrap().len()));
                let _ = tensor.to_f32();
            }
        }
    }

    #[test]
    fn written_values_are_read_back(
        values in prop::collection::vec(any::<f32>(), 0..40),
        narrow in prop::collection::vec(any::<f32>(), 0..40),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let narrow: Vec<half::bf16> = narrow.into_iter().map(half::bf16::from_f32).collect();
        let len = narrow.len();
        let tensors = [
            NamedTensor { name: "n", shape: &[len, 1], values: TensorSlice::Bf16(&narrow) },
            NamedTensor { name: "w", shape: &[values.len()], values: TensorSlice::F32(&values) },
        ];
        write_tensors(&path, &tensors, &[]).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let w = file.tensor("w").unwrap();
        let n = file.tensor("n").unwrap();
        prop_assert_eq!(bits(&w.to_f32().unwrap()), bits(&values));
        let stored = n.bytes().unwrap();
        prop_assert!(stored.as_chunks().0.iter().zip(&narrow).all(|(a, b)| *a == b.to_le_bytes()));
    }
}
