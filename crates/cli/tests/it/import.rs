//! `tinkex import`: an adapter that was downloaded, or comes from elsewhere, is used by the server.

use std::fs;
use std::path::Path;

use crate::sandbox::Sandbox;
use crate::scripted_cli::ScriptedCli;
use crate::train::{TRAIN, sandbox};

/// Returns the arguments of the printed command that starts with `tinkex COMMAND`.
fn printed(text: &str, command: &str) -> String {
    let start = format!("tinkex {command} ");
    let line = text.lines().map(str::trim).find(|line| line.starts_with(&start));
    let line = line.unwrap_or_else(|| panic!("no command {command}: {text}"));
    line["tinkex ".len()..].to_owned()
}

async fn download(sandbox: &Sandbox, command: &str) -> String {
    let downloaded = sandbox.run(&format!("{command} --json")).await.ok().json();
    downloaded["destination"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_adapter_is_downloaded_imported_sampled_and_trained_further() {
    let sandbox = sandbox();
    let trained = sandbox.run(&format!("{TRAIN} --dir run")).await.ok().out;
    let folder = download(&sandbox, &printed(&trained, "checkpoint")).await;

    let imported =
        sandbox.run_args(["import", &folder, "--name", "mine", "--local"]).await.ok().out;
    assert!(imported.contains("adapter of tinkex/tiny, rank 16"), "{imported}");
    let runs = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(runs["runs"][0]["corrupted"], false, "{runs}");
    let sample = "--local -t 0 --max-tokens 12 -p After";
    let chat = printed(&imported, "chat");
    let path = chat.split(' ').nth(1).unwrap();
    assert!(path.ends_with("/sampler_weights/mine"), "{path}");
    let original = printed(&trained, "chat");
    let original = original.split(' ').nth(1).unwrap();
    let expected = sandbox.run(&format!("sample {original} {sample}")).await.ok().out;
    assert_eq!(sandbox.run(&format!("sample {path} {sample}")).await.ok().out, expected);

    let again = download(&sandbox, &format!("checkpoint download {path} --local --to again")).await;
    assert!(Path::new(&again).ends_with("again"), "{again}");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        let content = |folder: &str| fs::read(sandbox.path(folder).join(name)).unwrap();
        assert!(content(&again) == content(&folder), "{name} differs");
    }

    let continued = printed(&imported, "train").replace("FILE", "data.jsonl");
    let plan = sandbox.run(&format!("{continued} --dry-run --json")).await.ok().json();
    assert_eq!(
        (&plan["settings"]["base_model"], &plan["settings"]["rank"]),
        (&"tinkex/tiny".into(), &16.into())
    );
    let steps = format!("{continued} --steps 2 --batch-size 4 --learning-rate 1e-4 --json");
    let second = sandbox.run(&format!("{steps} --dir second")).await.ok().json();
    let fresh = "train data.jsonl --local --steps 2 --batch-size 4 --learning-rate 1e-4 --json";
    let fresh = sandbox.run(&format!("{fresh} --dir fresh")).await.ok().json();
    let first_loss = |run: &serde_json::Value| run["loss"]["first"].as_f64().unwrap();
    assert!(first_loss(&second) < first_loss(&fresh), "{second} {fresh}");
}

#[tokio::test]
async fn unusable_folders_and_servers_without_imports_are_reported() {
    let sandbox = Sandbox::new();
    sandbox
        .run("import missing --local")
        .await
        .fails(2, &["missing/adapter_config.json: not found", "PEFT"]);
    sandbox
        .run("train x.jsonl --local --from tinker://r/sampler_weights/a")
        .await
        .fails(2, &["weights/NAME"]);

    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3/adapter");
    let golden = golden.to_str().unwrap();
    let unknown = sandbox.run_args(["import", golden, "--local"]).await;
    unknown.fails(7, &["base model \"qwen3\" is not available", "--base"]);
    let other = sandbox.run_args(["import", golden, "--base", "tinkex/tiny", "--local"]).await;
    let warning = "warning: the adapter was trained on \"qwen3\" but is imported for";
    let other = other.fails(7, &["adapter of", warning]);
    assert_eq!(other.err.matches("warning:").count(), 1, "{}", other.err);

    let output = ScriptedCli::new(&[]).run(&format!("import {golden}")).await;
    assert_eq!(output.exit, 7, "{}", output.err);
    assert!(output.err.contains("error: this server cannot import adapters"), "{}", output.err);
    assert!(output.err.contains("--local"), "{}", output.err);
}
