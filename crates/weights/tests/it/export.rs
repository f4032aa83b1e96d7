//! Exports of adapters: files, checks before writing, and failures.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use tinkex_weights::{
    AdapterExport, AdapterFile, DType, Error, ExportDType, ExportFormat, ExportedModel, GgufModel,
    ModelFolder, NamedTensor, RemoteAdapter, StoredAdapter, TensorFile, TensorSlice, write_tensors,
};

use crate::export_gguf::add_tokenizer;
use crate::golden::{MODELS, OwnedTensor, change_tensors, copy_of, folder};

fn run(export: AdapterExport) -> Result<ExportedModel, Error> {
    let prepared = export.prepare()?;
    let expected = prepared.bytes();
    let mut last = 0;
    let exported = prepared.write(|now| {
        assert!(now.bytes >= last && now.bytes_total == expected);
        last = now.bytes;
        ControlFlow::Continue(())
    })?;
    assert_eq!((last, exported.bytes), (expected, expected));
    Ok(exported)
}

/// Returns the names of the files of a folder, and checks that they add up to `bytes`.
fn files(exported: &ExportedModel) -> Vec<String> {
    let mut names = exported.files.clone();
    names.sort();
    assert_eq!(names, names_in(&exported.folder));
    let size = |name: &String| fs::metadata(exported.folder.join(name)).unwrap().len();
    assert_eq!(names.iter().map(size).sum::<u64>(), exported.bytes);
    names
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Computes `W + scale · B · A` in f64.
fn expected(model: &ModelFolder, adapter: &AdapterFile, source: &str, module: &str) -> Vec<f64> {
    let mut values: Vec<f64> =
        model.tensor(source).unwrap().to_f32().unwrap().into_iter().map(f64::from).collect();
    let rank = adapter.config.rank;
    if let Some(pair) = adapter.pairs.iter().find(|pair| pair.module == module) {
        for (i, value) in values.iter_mut().enumerate() {
            let row = i / pair.inputs;
            let column = i % pair.inputs;
            let term = |k: usize| {
                f64::from(pair.b[row * rank + k]) * f64::from(pair.a[k * pair.inputs + column])
            };
            *value += adapter.config.scale() * (0..rank).map(term).sum::<f64>();
        }
    }
    values
}

#[test]
fn every_tensor_is_merged_and_rounded_once() {
    for name in MODELS {
        let base = folder(name);
        let adapter = folder(name).join("adapter");
        let model = ModelFolder::open(&base).unwrap();
        let file = AdapterFile::load(&adapter).unwrap();
        for (dtype, stored, relative) in [
            (ExportDType::F32, DType::F32, 1e-6),
            (ExportDType::Bf16, DType::Bf16, 0.0040),
            (ExportDType::F16, DType::F16, 0.0005),
        ] {
            let out = TempDir::new().unwrap();
            let to = out.path().join("merged");
            let exported = run(AdapterExport::new(&adapter, &to).base(&base).dtype(dtype));
            assert_eq!(exported.unwrap().dtype, Some(dtype));
            let merged = ModelFolder::open(&to).unwrap();
            assert!(!merged.config().tied, "the adapter changes the unembedding");
            for (tensor, shape) in merged.config().tensors() {
                let source = match tensor.as_str() {
                    "lm_head.weight" if model.config().tied => "model.embed_tokens.weight",
                    name => name,
                };
                let module = tensor.strip_suffix(".weight").unwrap_or(&tensor);
                let got = merged.tensor(&tensor).unwrap();
                assert_eq!((got.dtype(), got.shape()), (stored, &shape[..]));
                let want = expected(&model, &file, source, module);
                for (got, want) in got.to_f32().unwrap().into_iter().zip(want) {
                    let error = (f64::from(got) - want).abs();
                    assert!(error <= want.abs() * relative + 1e-7, "{tensor}: {got} for {want}");
                }
            }
        }
    }
}

#[test]
fn a_folder_has_the_files_of_the_base_model_and_a_card() {
    let base = copy_of("qwen3");
    for (name, text) in [
        ("tokenizer.json", "{}"),
        ("generation_config.json", r#"{"eos_token_id": 2}"#),
        ("chat_template.jinja", "{{ messages }}"),
        ("LICENSE", "Apache"),
        ("training_args.bin", "not copied"),
    ] {
        fs::write(base.path().join(name), text).unwrap();
    }
    let out = TempDir::new().unwrap();
    let to = out.path().join("new/merged");
    let adapter = folder("qwen3").join("adapter");
    let export = AdapterExport::new(&adapter, &to)
        .base(base.path())
        .detail("checkpoint", "tinker://run/weights/final");
    let exported = run(export).unwrap();
    assert!(exported.is_untied && exported.has_tokenizer);
    assert_eq!(
        files(&exported),
        [
            "LICENSE",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json"
        ]
    );
    for name in ["LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json"] {
        assert_eq!(fs::read(to.join(name)).unwrap(), fs::read(base.path().join(name)).unwrap());
    }
    let mut config = read_json(&base.path().join("config.json"));
    config["tie_word_embeddings"] = json!(false);
    assert_eq!(read_json(&to.join("config.json")), config);
    let card = fs::read_to_string(to.join("README.md")).unwrap();
    assert!(card.contains("| checkpoint | `tinker://run/weights/final` |"), "{card}");
    assert!(card.contains("LoRA, rank 4, alpha 32"), "{card}");
    assert_eq!(TensorFile::open(to.join("model.safetensors")).unwrap().metadata()["format"], "pt");
    assert_eq!(names_in(out.path()), ["new"]);
}

#[test]
fn the_configuration_of_an_untied_model_changes_only_with_the_element_type() {
    let base = folder("llama");
    let adapter = folder("llama").join("adapter");
    let out = TempDir::new().unwrap();
    let same = out.path().join("same");
    let half = out.path().join("half");
    let exported = run(AdapterExport::new(&adapter, &same).base(&base)).unwrap();
    assert_eq!(exported.dtype, Some(ExportDType::F32));
    let config = |folder: &Path| fs::read(folder.join("config.json")).unwrap();
    assert_eq!(config(&same), config(&base));
    run(AdapterExport::new(&adapter, &half).base(&base).dtype(ExportDType::F16)).unwrap();
    let mut expected = read_json(&base.join("config.json"));
    expected["dtype"] = json!("float16");
    expected["torch_dtype"] = json!("float16");
    assert_eq!(read_json(&half.join("config.json")), expected);
}

/// As in `transformers`, which uses both matrices.
#[test]
fn a_separate_unembedding_of_a_tied_model_is_merged_and_stays_separate() {
    let base = copy_of("qwen3");
    add_tokenizer(base.path(), ModelFolder::open(base.path()).unwrap().config().vocab_size);
    change_tensors(&base, |tensors| {
        let embedding = tensors.iter().find(|tensor| tensor.name == "model.embed_tokens.weight");
        let OwnedTensor { shape, values, .. } = embedding.unwrap();
        let head = OwnedTensor {
            name: "lm_head.weight".to_owned(),
            shape: shape.clone(),
            values: values.iter().map(|value| 0.5 - value).collect(),
        };
        tensors.push(head);
    });
    assert_eq!(read_json(&base.path().join("config.json"))["tie_word_embeddings"], true);
    let adapter = folder("qwen3").join("adapter");
    let model = ModelFolder::open(base.path()).unwrap();
    let file = AdapterFile::load(&adapter).unwrap();
    let want = expected(&model, &file, "lm_head.weight", "lm_head");
    let embedding = model.tensor("model.embed_tokens.weight").unwrap().to_f32().unwrap();
    let check = |head: Vec<f32>, stored_embedding: Vec<f32>| {
        assert_eq!(stored_embedding, embedding);
        for (got, want) in head.into_iter().zip(&want) {
            assert!((f64::from(got) - want).abs() <= want.abs() * 1e-6 + 1e-7, "{got} for {want}");
        }
    };
    let out = TempDir::new().unwrap();
    let export = |format: ExportFormat| {
        let to = out.path().join(format.as_str());
        let export = AdapterExport::new(&adapter, &to).base(base.path()).format(format);
        let exported = run(export.dtype(ExportDType::F32)).unwrap();
        assert!(!exported.is_untied, "the base model is untied already");
        to
    };
    let to = export(ExportFormat::Hf);
    assert_eq!(read_json(&to.join("config.json"))["tie_word_embeddings"], false);
    let merged = ModelFolder::open(&to).unwrap();
    assert_eq!(merged.warnings(), [""; 0]);
    let read = |name: &str| merged.tensor(name).unwrap().to_f32().unwrap();
    check(read("lm_head.weight"), read("model.embed_tokens.weight"));
    let to = export(ExportFormat::Gguf);
    let merged = GgufModel::open(to.join("gguf.gguf")).unwrap();
    assert!(!merged.config().tied);
    let read = |name: &str| merged.tensor(name).unwrap().to_f32().unwrap();
    check(read("lm_head.weight"), read("model.embed_tokens.weight"));
}

#[test]
fn large_models_are_split_and_indexed() {
    let base = folder("qwen2");
    let adapter = folder("qwen2").join("adapter");
    let out = TempDir::new().unwrap();
    let whole = out.path().join("whole");
    let split = out.path().join("split");
    run(AdapterExport::new(&adapter, &whole).base(&base)).unwrap();
    let exported = run(AdapterExport::new(&adapter, &split).base(&base).shard_bytes(9000)).unwrap();
    let shards: Vec<String> =
        files(&exported).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    let count = shards.len();
    assert!(count > 2, "{shards:?}");
    assert_eq!(shards[1], format!("model-00002-of-{count:05}.safetensors"));
    let index = read_json(&split.join("model.safetensors.index.json"));
    let whole = ModelFolder::open(whole).unwrap();
    let split = ModelFolder::open(split).unwrap();
    let mut size = 0;
    for (name, _) in whole.config().tensors() {
        let tensor = whole.tensor(&name).unwrap();
        size += tensor.bytes().unwrap().len();
        assert_eq!(tensor.bytes().unwrap(), split.tensor(&name).unwrap().bytes().unwrap());
    }
    assert_eq!(index["metadata"]["total_size"], size);
}

#[test]
fn a_peft_adapter_is_copied_unchanged_and_the_services_names_are_replaced() {
    let adapter = folder("qwen3").join("adapter");
    let out = TempDir::new().unwrap();
    let to = out.path().join("copy");
    let exported = run(AdapterExport::new(&adapter, &to).format(ExportFormat::Peft)).unwrap();
    assert_eq!(files(&exported), ["README.md", "adapter_config.json", "adapter_model.safetensors"]);
    assert_eq!(exported.dtype, Some(ExportDType::F32));
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        assert_eq!(fs::read(to.join(name)).unwrap(), fs::read(adapter.join(name)).unwrap());
    }

    let service = out.path().join("service");
    fs::create_dir(&service).unwrap();
    let name = |name: &str| Some(name.replace(".lm_head.", ".model.unembed_tokens.").into());
    let tensors = "adapter_model.safetensors";
    let file = TensorFile::open(adapter.join(tensors)).unwrap();
    file.write_renamed(service.join(tensors), name).unwrap();
    let config =
        json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": "all-linear" });
    fs::write(service.join("adapter_config.json"), config.to_string()).unwrap();
    let to = out.path().join("converted");
    run(AdapterExport::new(&service, &to).format(ExportFormat::Peft)).unwrap();
    let converted = TensorFile::open(to.join(tensors)).unwrap();
    assert_eq!(converted.names().collect::<Vec<_>>(), file.names().collect::<Vec<_>>());
    for tensor in file.tensors() {
        let other = converted.tensor(tensor.name()).unwrap();
        assert_eq!(tensor.bytes().unwrap(), other.bytes().unwrap(), "{}", tensor.name());
    }
    let config = read_json(&to.join("adapter_config.json"));
    assert!(config["target_modules"].as_array().unwrap().contains(&json!("lm_head")), "{config}");
    assert_eq!(AdapterFile::load(&to).unwrap().pairs, AdapterFile::load(&adapter).unwrap().pairs);
}

/// Replaces one value of a tensor of a file.
fn replace_value(path: &Path, tensor: &str, index: usize, value: f32) {
    let file = TensorFile::open(path).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<f32>)> = file
        .tensors()
        .map(|stored| {
            let mut values = stored.to_f32().unwrap();
            if stored.name() == tensor {
                values[index] = value;
            }
            (stored.name().to_owned(), stored.shape().to_vec(), values)
        })
        .collect();
    let tensors: Vec<NamedTensor<'_>> = tensors
        .iter()
        .map(|(name, shape, values)| NamedTensor { name, shape, values: TensorSlice::F32(values) })
        .collect();
    write_tensors(path, &tensors, &[]).unwrap();
}

#[test]
fn a_full_disk_is_found_before_anything_is_written() {
    let base = folder("qwen3");
    let adapter = folder("qwen3").join("adapter");
    let out = TempDir::new().unwrap();
    let to = out.path().join("not/yet/there");
    let export =
        |free: u64| AdapterExport::new(&adapter, &to).base(&base).free_space(move |_| Some(free));
    let needed = export(u64::MAX).prepare().unwrap().bytes();
    let least = export(u64::MAX).check(None).unwrap();
    assert!(least < needed, "the adapter unties the model: {least} {needed}");
    let _ = export(needed).prepare().unwrap();
    for error in
        [export(needed - 1).prepare().unwrap_err(), export(least - 1).check(None).unwrap_err()]
    {
        let Error::NotEnoughSpace { path, shortage } = &error else { panic!("{error}") };
        assert_eq!(
            (path, shortage.available + 1, &*shortage.folder),
            (&to, shortage.needed, out.path())
        );
        let message = error.to_string();
        assert!(message.contains("not/yet/there: needs "), "{message}");
        assert!(message.ends_with(&format!("free on {}", out.path().display())), "{message}");
        assert_eq!(names_in(out.path()), Vec::<String>::new());
    }
    export(least).check(None).unwrap();
    // An adapter of the unembedding unties the model, and is at least as large as its matrices of
    // the unembedding.
    let remote = RemoteAdapter { rank: 4, unembedding: true };
    let exported = export(u64::MAX).check(Some(&remote)).unwrap();
    assert!(exported > least && exported < needed && needed - exported < 10_000);
    let adapter = fs::metadata(adapter.join("adapter_model.safetensors")).unwrap().len();
    let unembedding = ModelFolder::open(&base).unwrap();
    let unembedding = unembedding.config().vocab_size + unembedding.config().hidden_size;
    let error = export(exported).check(Some(&remote)).unwrap_err();
    let Error::NotEnoughSpace { shortage, .. } = &error else { panic!("{error}") };
    let download = shortage.needed - exported;
    assert_eq!(download, 4 * 2 * unembedding as u64);
    assert!(download <= adapter, "{adapter}");
    export(shortage.needed).check(Some(&remote)).unwrap();
    // Other formats have other sizes.
    let peft = export(1).format(ExportFormat::Peft);
    assert_eq!(peft.check(None).unwrap(), 0, "without the adapter, its size is not known");
    assert!(matches!(peft.prepare(), Err(Error::NotEnoughSpace { .. })));
}

#[test]
fn everything_but_the_adapter_is_checked_without_it() {
    let base = folder("llama");
    let out = TempDir::new().unwrap();
    let to = out.path().join("a/merged");
    let export = || AdapterExport::new("", &to);
    let refused = |export: AdapterExport, expected: &str| {
        let error = export.check(None).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(names_in(out.path()), Vec::<String>::new(), "{expected}");
    };
    refused(export().base(&base).dtype(ExportDType::Q8_0), "format hf cannot store q8_0");
    refused(export().format(ExportFormat::Peft).dtype(ExportDType::F16), "convert it to f16");
    refused(export().base(&base).shard_bytes(0), "expected at least 1 byte");
    for format in [ExportFormat::Gguf, ExportFormat::Peft] {
        let export = export().base(&base).format(format).shard_bytes(1);
        refused(export, &format!("format {format} has one file of weights"));
    }
    refused(export(), "a/merged: format hf needs the folder of the base model");
    refused(export().base(out.path().join("gone")), "gone/config.json");
    refused(export().base(base.join("config.json")), "config.json is a file, expected");
    refused(export().base(&base).format(ExportFormat::Gguf), "tokenizer.json");
    let truncated = copy_of("llama");
    let path = truncated.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    refused(export().base(truncated.path()), "model.safetensors");
    assert_eq!(export().base(&base).dtype(ExportDType::F16).check(None).unwrap() * 2, {
        export().base(&base).dtype(ExportDType::F32).check(None).unwrap()
    });
    fs::create_dir_all(&to).unwrap();
    let error = export().base(&base).check(None).unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    export().base(&base).replace(true).check(None).unwrap();
}

#[test]
fn faults_are_found_before_anything_is_written() {
    let base = folder("llama");
    let adapter = folder("llama").join("adapter");
    let out = TempDir::new().unwrap();
    let to = out.path().join("merged");
    let export = || AdapterExport::new(&adapter, &to);
    let refused = |export: AdapterExport, expected: &str| {
        let error = export.prepare().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(names_in(out.path()), Vec::<String>::new(), "{expected}");
    };
    refused(export(), "format hf needs the folder of the base model");
    let peft = export().format(ExportFormat::Peft);
    refused(peft.dtype(ExportDType::F16), "cannot convert it to f16");
    refused(export().base(out.path().join("gone")), "gone/config.json");
    let file = base.join("model.safetensors");
    refused(export().base(file), "model.safetensors is a file, expected a Hugging Face folder");
    refused(AdapterExport::new(out.path().join("gone"), &to).base(&base), "gone/adapter_config");
    refused(
        export().base(folder("qwen2")),
        "q_proj are for a module of shape [40, 40], but the base model in",
    );

    let shallow = copy_of("llama");
    let path = shallow.path().join("config.json");
    let mut config = read_json(&path);
    config["num_hidden_layers"] = json!(1);
    fs::write(&path, config.to_string()).unwrap();
    refused(
        export().base(shallow.path()),
        "it adapts model.layers.1.mlp.down_proj, which is not a linear layer of the base model",
    );
    let truncated = copy_of("llama");
    let path = truncated.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    refused(export().base(truncated.path()), "model.safetensors");

    // The values of the adapter are read too.
    let damaged = copy_of("llama/adapter");
    let tensors = damaged.path().join("adapter_model.safetensors");
    let name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight";
    replace_value(&tensors, name, 5, f32::NAN);
    refused(
        AdapterExport::new(damaged.path(), &to).base(&base),
        &format!("tensor {name} is NaN at index 5, expected finite weights"),
    );

    fs::create_dir(&to).unwrap();
    fs::write(to.join("old"), "x").unwrap();
    let error = export().base(&base).prepare().unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    run(export().base(&base).replace(true)).unwrap();
    assert!(!to.join("old").exists());
}

#[test]
fn values_that_the_element_type_cannot_hold_are_refused_by_tensor() {
    let base = copy_of("llama");
    let model = ModelFolder::open(base.path()).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<f32>)> = model
        .config()
        .tensors()
        .map(|(name, shape)| {
            let mut values = model.tensor(&name).unwrap().to_f32().unwrap();
            if name == "model.layers.1.mlp.up_proj.weight" {
                values[7] = 1e5;
            }
            (name, shape, values)
        })
        .collect();
    let rewrite = |change: &dyn Fn(&str, &mut [f32])| {
        let mut tensors = tensors.clone();
        for (name, _, values) in &mut tensors {
            change(name, values);
        }
        let tensors: Vec<NamedTensor<'_>> = tensors
            .iter()
            .map(|(name, shape, values)| NamedTensor {
                name,
                shape,
                values: TensorSlice::F32(values),
            })
            .collect();
        write_tensors(base.path().join("model.safetensors"), &tensors, &[]).unwrap();
    };
    let out = TempDir::new().unwrap();
    let to = out.path().join("merged");
    let adapter = folder("llama").join("adapter");
    let export = |dtype| AdapterExport::new(&adapter, &to).base(base.path()).dtype(dtype);
    let refused = |export: AdapterExport, expected: &str| {
        let error = run(export).unwrap_err().to_string();
        assert!(error.starts_with("cannot write tensor model.layers.1.mlp.up_proj.weight: "));
        assert!(error.contains(expected), "{error}");
        assert_eq!(names_in(out.path()), Vec::<String>::new());
    };
    rewrite(&|_, _| {});
    refused(export(ExportDType::F16), "is outside the range of F16");
    run(export(ExportDType::Bf16)).unwrap();
    fs::remove_dir_all(&to).unwrap();
    rewrite(&|name, values| {
        if name == "model.layers.1.mlp.up_proj.weight" {
            values[9] = f32::INFINITY;
        }
    });
    refused(export(ExportDType::F32), "inf at index 9");
}

#[test]
fn a_cancelled_export_leaves_nothing() {
    let base = folder("llama");
    let adapter = folder("llama").join("adapter");
    let out = TempDir::new().unwrap();
    let to = out.path().join("a/b/merged");
    for limit in [0, 1000, 100_000] {
        let prepared = AdapterExport::new(&adapter, &to).base(&base).prepare().unwrap();
        let error = prepared.write(|now| {
            if now.bytes >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(error, Err(Error::Cancelled)), "{error:?}");
        assert_eq!(names_in(out.path()), Vec::<String>::new());
    }
}

#[test]
fn a_target_that_appears_during_the_export_is_kept() {
    let base = folder("llama");
    let adapter = folder("llama").join("adapter");
    let out = TempDir::new().unwrap();
    let to = out.path().join("merged");
    let prepared = AdapterExport::new(&adapter, &to).base(&base).prepare().unwrap();
    let error = prepared.write(|_| {
        fs::write(&to, "mine").unwrap();
        ControlFlow::Continue(())
    });
    assert!(matches!(error, Err(Error::AlreadyExists { .. })), "{error:?}");
    assert_eq!(fs::read(&to).unwrap(), b"mine");
    assert_eq!(names_in(out.path()), ["merged"]);
}

#[test]
fn stored_adapters_read_the_matrices_of_a_module() {
    let adapter = StoredAdapter::open(folder("qwen3").join("adapter")).unwrap();
    let modules: Vec<&str> = adapter.modules().collect();
    assert_eq!(modules.len(), 15);
    let pair = adapter.pair("lm_head").unwrap();
    assert_eq!((pair.a.shape()[0], pair.b.shape()[1]), (4, 4));
    assert!(adapter.pair("model.embed_tokens").is_none());
}
