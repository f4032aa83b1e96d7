//! Tests of finding base models: hub caches, model folders, upstreams, and tokenizers.

use super::*;

/// Creates a revision of a model in a hub cache with the given files of the golden model.
fn revision(hub: &Path, model: &str, hash: &str, files: &[&str]) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3");
    let folder = hub.join(model).join("snapshots").join(hash);
    std::fs::create_dir_all(&folder).unwrap();
    for file in files {
        std::fs::copy(golden.join(file), folder.join(file)).unwrap();
    }
    folder
}

fn find(
    tokenizer_dir: &Path,
    mapped: &[(String, PathBuf)],
    hub_cache: Option<&Path>,
) -> Result<BaseModels, StartError> {
    let mut options = ServerOptions::new(tokenizer_dir);
    options.models = mapped.to_vec();
    options.hub_cache = hub_cache.map(Path::to_owned);
    BaseModels::find(tokenizer_dir, &options)
}

const COMPLETE: &[&str] = &["config.json", "model.safetensors"];

/// The limits of an upstream's model come from its `config.json` in the hub cache.
#[test]
fn models_of_upstreams_have_the_limits_of_their_configuration() {
    let hub = tempfile::tempdir().unwrap();
    revision(hub.path(), "models--org--remote", "aaa", &["config.json"]);
    std::fs::create_dir(hub.path().join("models--org--remote/refs")).unwrap();
    std::fs::write(hub.path().join("models--org--remote/refs/main"), "aaa").unwrap();
    let models = find(hub.path(), &[], Some(hub.path())).unwrap();
    models.add_upstream(&"a".into(), "org/remote", None);
    models.add_upstream(&"a".into(), "org/unknown", None);
    let limits = |name| {
        let model = models.get(name).unwrap();
        (model.vocab_size(), model.known_context())
    };
    let config = ModelConfig::read(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3/config.json"),
    )
    .unwrap();
    assert_eq!(limits("org/remote"), (config.vocab_size, Some(config.max_positions)));
    assert_eq!(limits("org/unknown"), (usize::MAX, None));
}

#[test]
fn hub_cache_models_are_found_by_repository_name() {
    let hub = tempfile::tempdir().unwrap();
    let main = revision(hub.path(), "models--Qwen--Qwen3-0.6B", "aaa", COMPLETE);
    revision(hub.path(), "models--Qwen--Qwen3-0.6B", "bbb", COMPLETE);
    std::fs::create_dir(hub.path().join("models--Qwen--Qwen3-0.6B/refs")).unwrap();
    std::fs::write(hub.path().join("models--Qwen--Qwen3-0.6B/refs/main"), "aaa\n").unwrap();
    let only = revision(hub.path(), "models--plain", "ccc", COMPLETE);
    revision(hub.path(), "models--org--tokenizer-only", "ddd", &["config.json"]);
    let unknown = revision(hub.path(), "models--org--unknown", "eee", COMPLETE);
    std::fs::write(unknown.join("config.json"), "{\"model_type\": \"unknown\"}").unwrap();
    std::fs::create_dir(hub.path().join(".locks")).unwrap();
    std::fs::write(hub.path().join("version.txt"), "1").unwrap();

    let tokenizer = tempfile::tempdir().unwrap();
    let models = find(tokenizer.path(), &[], Some(hub.path())).unwrap();
    assert_eq!(models.names(), ["Qwen/Qwen3-0.6B", "plain", builtin::NAME]);
    assert_eq!(models.get("Qwen/Qwen3-0.6B").unwrap().folder, main);
    assert_eq!(models.get("plain").unwrap().folder, only);
    let message = models.unavailable_message("org/unknown");
    assert!(message.contains("architecture \"unknown\" is not supported"), "{message}");

    // A mapped folder replaces a cached model of the same name.
    let mapped = [("Qwen/Qwen3-0.6B".to_owned(), only.clone())];
    let models = find(tokenizer.path(), &mapped, Some(hub.path())).unwrap();
    assert_eq!(models.get("Qwen/Qwen3-0.6B").unwrap().folder, only);
    let missing = [("x".to_owned(), hub.path().join("missing"))];
    let error = find(tokenizer.path(), &missing, None).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("cannot use base model \"x\": cannot read "), "{message}");
    assert!(message.contains("missing/config.json: "), "{message}");
}

/// The server checks the headers of the files before it starts, and the error names the faulty
/// part. A faulty model in the hub cache is skipped.
#[test]
fn damaged_folders_are_refused_when_the_server_starts() {
    type Damage = fn(&Path);
    fn edit(folder: &Path, file: &str, from: &str, to: &str) {
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        assert!(text.contains(from), "{file} contains {from}");
        std::fs::write(folder.join(file), text.replace(from, to)).unwrap();
    }
    let cases: [(Damage, &str); 8] = [
        (|f| std::fs::remove_file(f.join("config.json")).unwrap(), "config.json"),
        (|f| edit(f, "config.json", "Qwen3ForCausalLM", "GPT2LMHeadModel"), "\"GPT2LMHeadModel\""),
        (|f| edit(f, "config.json", "\"vocab_size\"", "\"size\""), "vocab_size is missing"),
        (
            |f| edit(f, "config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"),
            "tensor model.layers.2.input_layernorm.weight is missing",
        ),
        (
            |f| {
                edit(f, "config.json", "\"intermediate_size\": 64", "\"intermediate_size\": 65");
            },
            "tensor model.layers.0.mlp.gate_proj.weight has shape",
        ),
        (
            |f| {
                let path = f.join("model.safetensors");
                let bytes = std::fs::read(&path).unwrap();
                std::fs::write(path, &bytes[..bytes.len() - 4]).unwrap();
            },
            "model.safetensors: the header describes",
        ),
        (
            |f| {
                std::fs::remove_file(f.join("model.safetensors")).unwrap();
                std::fs::write(f.join("model.safetensors.index.json"), "{}").unwrap();
            },
            "not an index of tensor files: missing field `weight_map`",
        ),
        (
            |f| std::fs::write(f.join("generation_config.json"), "{").unwrap(),
            "generation_config.json: not a generation configuration",
        ),
    ];
    for (damage, want) in cases {
        let hub = tempfile::tempdir().unwrap();
        let tokenizer = tempfile::tempdir().unwrap();
        let folder = revision(hub.path(), "models--org--x", "aaa", COMPLETE);
        damage(&folder);
        let mapped = [("x".to_owned(), folder)];
        let error = find(tokenizer.path(), &mapped, None).unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("cannot use base model \"x\": "), "{message}");
        assert!(message.contains(want), "{message}");
        let models = find(tokenizer.path(), &[], Some(hub.path())).unwrap();
        assert!(models.get("org/x").is_none(), "{want}");
        if !want.ends_with("config.json") {
            assert!(models.unavailable_message("org/x").contains(want), "{want}");
        }
    }
}

#[test]
fn a_missing_or_small_tokenizer_does_not_prevent_the_start() {
    let hub = tempfile::tempdir().unwrap();
    let tokenizer = tempfile::tempdir().unwrap();
    let folder = revision(hub.path(), "models--org--x", "aaa", COMPLETE);
    let start = || {
        let mapped = [("x".to_owned(), folder.clone())];
        let models = find(tokenizer.path(), &mapped, None).unwrap();
        models.get("x").unwrap()
    };
    let error = start().vocabulary().unwrap_err();
    assert!(error.contains("tokenizer.json: "), "{error}");
    std::fs::write(folder.join("tokenizer.json"), builtin::TOKENIZER).unwrap();
    let model = start();
    assert!(model.vocabulary().unwrap().len() > model.vocab_size());
}

#[test]
fn end_of_sequence_tokens_of_the_generation_configuration_count() {
    let hub = tempfile::tempdir().unwrap();
    let tokenizer = tempfile::tempdir().unwrap();
    let folder = revision(hub.path(), "models--org--x", "aaa", COMPLETE);
    let generation = r#"{"eos_token_id": [7, 2]}"#;
    std::fs::write(folder.join("generation_config.json"), generation).unwrap();
    let models = find(tokenizer.path(), &[], Some(hub.path())).unwrap();
    assert_eq!(models.get("org/x").unwrap().eos(), [2, 7]);
}

#[test]
fn the_folder_of_a_tokenizer_must_have_one_and_its_model_must_exist() {
    let hub = tempfile::tempdir().unwrap();
    let tokenizer = tempfile::tempdir().unwrap();
    let folder = revision(hub.path(), "models--org--x", "aaa", COMPLETE);
    let given = tempfile::tempdir().unwrap();
    let find = |name: &str| {
        let mut options = ServerOptions::new(tokenizer.path())
            .model("mapped", &folder)
            .tokenizer(name, given.path());
        options.hub_cache = Some(hub.path().to_owned());
        BaseModels::find(tokenizer.path(), &options)
    };
    let error = find("mapped").unwrap_err();
    let shown = given.path().display();
    assert_eq!(
        error.to_string(),
        format!(
            "cannot use a tokenizer for \"mapped\": {shown} has neither tokenizer.json nor tiktoken.model"
        )
    );
    assert!(error.model_hint().unwrap().contains("--tokenizer mapped=FOLDER"));
    std::fs::write(given.path().join("tokenizer.json"), builtin::TOKENIZER).unwrap();
    for name in ["mapped", "org/x"] {
        let models = find(name).unwrap();
        assert_eq!(models.get(name).unwrap().folder, given.path());
        let other = if name == "mapped" { "org/x" } else { "mapped" };
        assert_eq!(models.get(other).unwrap().folder, folder);
    }
    let error = find("unknown").unwrap_err().to_string();
    let want =
        "cannot use a tokenizer for \"unknown\": no such base model; available: mapped, org/x";
    assert_eq!(error, want);
}
