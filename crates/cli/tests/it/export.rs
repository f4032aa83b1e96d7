//! `tinkex export` against the local server and with local adapters.

use serde_json::{Value, json};
use tinkex_cli::Interrupt;

use crate::sandbox::Sandbox;

/// Saves an adapter of the built-in model and returns its path.
async fn saved(sandbox: &Sandbox) -> String {
    let line = "checkpoint save --local --base-model tinkex/tiny --rank 4 --name start --json";
    let saved = sandbox.run(line).await.ok().json();
    saved["weights_path"].as_str().unwrap().to_owned()
}

fn files(document: &Value) -> Vec<&str> {
    let mut names: Vec<&str> =
        document["files"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn checkpoints_of_the_built_in_model_are_exported() {
    let sandbox = Sandbox::new();
    let path = saved(&sandbox).await;
    let line = format!("export {path} --local --to out/merged --format hf --dtype f32 --json");
    let exported = sandbox.run(&line).await.ok().json();
    assert_eq!(
        files(&exported),
        [
            "README.md",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    assert_eq!(exported["destination"], "out/merged");
    assert_eq!(exported["dtype"], "f32");
    assert_eq!((&exported["is_untied"], &exported["has_tokenizer"]), (&json!(true), &json!(true)));
    let config: Value = serde_json::from_str(&sandbox.read("out/merged/config.json")).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config["torch_dtype"], "float32");
    let card = sandbox.read("out/merged/README.md");
    assert!(card.contains("base_model: tinkex/tiny\n"), "{card}");
    assert!(card.contains(&format!("| checkpoint | `{path}` |")), "{card}");
    let names: Vec<_> = std::fs::read_dir(sandbox.path("out")).unwrap().collect();
    assert_eq!(names.len(), 1, "nothing but the export is left: {names:?}");

    // The adapter alone, and from there without a server.
    let line = format!("export {path} --local --to adapter --format peft --json");
    assert_eq!(sandbox.run(&line).await.ok().json()["dtype"], "f32");
    let kept = sandbox.run(&format!("export {path} --local --to kept --json")).await.ok().json();
    assert_eq!(kept["dtype"], "bf16", "the dtype of the base model");
    let table = sandbox.run("export adapter --to again --dtype f32").await.ok();
    assert!(table.out.contains("Written to"), "{}", table.out);
    let weights =
        |folder: &str| std::fs::read(sandbox.path(&format!("{folder}/model.safetensors"))).unwrap();
    assert!(weights("again") == weights("out/merged"));

    let line = "export adapter --to split --dtype f32 --max-shard-size 100KB --json";
    let split = sandbox.run(line).await.ok().json();
    let shards = files(&split).into_iter().filter(|name| name.ends_with(".safetensors")).count();
    assert!(shards > 2, "{split}");
    assert!(files(&split).contains(&"model.safetensors.index.json"), "{split}");
    sandbox
        .run("export adapter --to split-2 --max-shard-size 5")
        .await
        .fails(2, &["expected a size with a unit"]);
    sandbox
        .run("export adapter --to split-2 --max-shard-size 0GB")
        .await
        .fails(2, &["expected at least 1B"]);
    for format in ["gguf", "peft"] {
        let line = format!("export adapter --to split-2 --format {format} --max-shard-size 2GB");
        let message = format!("format {format} has one file of weights");
        sandbox.run(&line).await.fails(2, &[&message, "choose format hf"]);
    }
}

#[tokio::test]
async fn errors_of_an_export_say_what_to_do() {
    let sandbox = Sandbox::new();
    let path = saved(&sandbox).await;
    sandbox.run(&format!("export {path} --local --to adapter --format peft")).await.ok();
    let again = sandbox.run("export adapter --to adapter").await;
    again.fails(1, &["adapter already exists", "hint: Pass --force"]);
    sandbox
        .run("export nowhere --to x --local")
        .await
        .fails(4, &["no training run has the name, id or folder \"nowhere\""]);
    let reason = "format peft keeps the element type of the adapter";
    let refused = sandbox.run("export adapter --to x --format peft --dtype f16").await;
    let refused = refused.fails(2, &[reason]);
    assert_eq!(refused.err.matches(reason).count(), 1, "{}", refused.err);
    sandbox.run("export adapter --to x --base gone").await.fails(1, &["gone/config.json"]);
    let config = sandbox.read("adapter/adapter_config.json").replace("tinkex/tiny", "org/gone");
    sandbox.write("adapter/adapter_config.json", &config);
    sandbox.run("export adapter --to x").await.fails(
        4,
        &[
            "cannot find base model \"org/gone\": its weights are not in the hub cache",
            "--base FOLDER",
        ],
    );
    let other = format!("export {} --local --to x", path.replace("start", "other"));
    sandbox.run(&other).await.fails(4, &["other"]);
    sandbox.run("export adapter --to x --format onnx").await.fails(2, &["hf", "peft"]);
    assert!(!sandbox.path("x").exists());
}

#[tokio::test]
async fn an_interrupted_export_leaves_nothing() {
    let mut sandbox = Sandbox::new();
    let path = saved(&sandbox).await;
    sandbox.run(&format!("export {path} --local --to adapter --format peft")).await.ok();
    let interrupt = Interrupt::default();
    interrupt.press();
    sandbox.interrupt = Some(interrupt);
    sandbox.run("export adapter --to out/merged").await.fails(130, &["interrupted"]);
    let left = std::fs::read_dir(sandbox.path("out")).map_or(0, Iterator::count);
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_model_card_states_what_is_known_about_the_training() {
    let sandbox = crate::train::sandbox();
    let train = crate::train::TRAIN;
    let trained = sandbox.run(&format!("{train} --name animals --dir run --json")).await.ok();
    let trained = trained.json();
    let steps = trained["steps"].as_u64().unwrap();
    let sampler = trained["sampler"].as_str().unwrap();
    for (checkpoint, to) in [("animals", "latest"), (sampler, "sampler")] {
        sandbox.run(&format!("export {checkpoint} --local --to {to} --format peft")).await.ok();
        let card = sandbox.read(&format!("{to}/README.md"));
        for row in [
            "| training run | `animals` |".to_owned(),
            "| method | `sft` |".to_owned(),
            "| training data | `data.jsonl` |".to_owned(),
            format!("| steps | `{steps}` |"),
        ] {
            assert!(card.contains(&row), "{row} in {card}");
        }
    }
    // Without the run folder, only the server is asked.
    std::fs::remove_dir_all(sandbox.path("run")).unwrap();
    sandbox.run("export animals --local --to again --format peft").await.ok();
    let card = sandbox.read("again/README.md");
    assert!(card.contains("| training run | `animals` |") && !card.contains("| steps |"), "{card}");
}

#[tokio::test]
async fn another_base_model_is_a_warning() {
    let sandbox = Sandbox::new();
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden");
    let base = golden.join("qwen3");
    let adapter = golden.join("qwen3/adapter");
    let base = base.to_str().unwrap();
    let adapter = adapter.to_str().unwrap();
    let exported = sandbox.run(&format!("export {adapter} --base {base} --to same")).await.ok();
    assert_eq!(exported.err.matches("warning:").count(), 0, "{}", exported.err);
    std::fs::create_dir(sandbox.path("other")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join("qwen3").join(name), sandbox.path("other").join(name)).unwrap();
    }
    let exported = sandbox.run(&format!("export {adapter} --base other --to merged")).await.ok();
    let warning = "warning: the adapter was trained on \"qwen3\" but is exported with";
    assert_eq!(exported.err.matches(warning).count(), 1, "{}", exported.err);
}
