//! Names of runs, and references to runs and checkpoints by name, folder, id prefix and `latest`.

use serde_json::Value;

use crate::sandbox::Sandbox;
use crate::scripted_cli::ScriptedCli;
use crate::train::{TRAIN, sandbox};

/// Returns the state of a run folder.
fn state(sandbox: &Sandbox, folder: &str) -> Value {
    serde_json::from_str(&sandbox.read(&format!("{folder}/run.json"))).unwrap()
}

#[tokio::test]
async fn runs_are_found_by_name_folder_id_prefix_and_latest() {
    let sandbox = sandbox();
    let first = sandbox.run(&format!("{TRAIN} --json")).await.ok().json();
    assert_eq!(first["name"], "data");
    let second = sandbox.run("train data.jsonl --local --steps 1 --json").await.ok().json();
    assert_eq!(second["name"], "data-2");
    let third = sandbox.run("train data.jsonl --local --steps 1 --name poems").await.ok();
    assert!(third.out.contains("tinkex chat poems --local"), "{}", third.out);
    assert!(third.out.contains("tinkex checkpoint download poems --local"), "{}", third.out);
    assert!(sandbox.path("poems-run/run.json").exists());
    let taken = sandbox.run("train data.jsonl --local --steps 1 --name poems --dir other").await;
    taken.fails(2, &["a run named poems already exists", "--resume poems", "--from poems"]);

    let list = sandbox.run("run list --local").await.ok().out;
    for text in ["Name", "data-2", "poems"] {
        assert!(list.contains(text), "{list}");
    }
    let id = first["run_id"].as_str().unwrap();
    let info = |reference: String| {
        let sandbox = &sandbox;
        async move {
            let run =
                sandbox.run(&format!("run info {reference} --local --json")).await.ok().json();
            run["training_run_id"].as_str().unwrap().to_owned()
        }
    };
    for reference in ["data", "data-run", "./data-run", id, &id[..12]] {
        assert_eq!(info(reference.to_owned()).await, id, "{reference}");
    }
    assert_eq!(info("latest".to_owned()).await, state(&sandbox, "poems-run")["progress"]["run_id"]);
    let unknown = sandbox.run("run info poem --local").await;
    unknown
        .fails(4, &["no training run has the name, id or folder \"poem\"", "Did you mean poems"]);
    // The ids of all runs differ in more than their first characters, except for the empty prefix.
    sandbox.run("run info xyz --local").await.fails(4, &["`tinkex run list --local`"]);

    let path = |reference: &str| format!("checkpoint info {reference} --local --json");
    for (reference, expected) in [
        ("data/step-3", None),
        ("data/weights/step-6", Some("/weights/step-000006")),
        ("data-run/sampler_weights/latest", Some("/sampler_weights/step-000008")),
        ("data/sampler_weights", Some("/sampler_weights/step-000008")),
        ("latest", Some("/sampler_weights/step-000001")),
    ] {
        let shown = sandbox.run(&path(reference)).await;
        match expected {
            Some(end) => {
                let shown = shown.ok().json();
                let path = shown["tinker_path"].as_str().unwrap();
                assert!(path.ends_with(end), "{reference}: {path}");
            }
            // Only the last two checkpoints are kept.
            None => drop(shown.fails(4, &["run data has no checkpoint step-3", "step-000006"])),
        }
    }
    let by_id = sandbox.run(&path(&format!("{id}/weights/step-6"))).await.ok().json();
    let found = by_id["tinker_path"].as_str().unwrap();
    assert!(found.ends_with("/weights/step-000006"), "{found}");
    let both = sandbox.run(&path("data/step-8")).await;
    both.fails(2, &["names 2 checkpoints", "/weights/step-000008", "weights/step-8."]);

    let ask = ["sample", "--local", "--max-tokens", "4", "-p", "Hi"];
    for model in ["data", "data/step-8", "data-run", "poems/latest", "latest"] {
        sandbox.run_args(ask.into_iter().chain([model])).await.ok();
    }
    let unknown = sandbox.run_args(ask.into_iter().chain(["poem"])).await;
    unknown.fails(4, &["poem", "Did you mean poems?"]);
    let unknown = sandbox.run_args(ask.into_iter().chain(["zzzzzzzz"])).await;
    unknown.fails(4, &["no base model, training run or checkpoint has", "tinkex run list --local"]);

    let downloaded = sandbox.run("checkpoint download data --local --json").await.ok().json();
    let folder = downloaded["destination"].as_str().unwrap().rsplit('/').next().unwrap();
    assert!(folder.ends_with("_train_0_weights_step-000008"), "{folder}");
    sandbox.run("export data/step-6 --to merged --local").await.ok();
    let listed = sandbox.run("checkpoint list --run-id data --local --json").await.ok().json();
    assert_eq!((&listed["run_id"], &listed["total"]), (&Value::from(id), &Value::from(3)));
}

#[tokio::test]
async fn a_finished_run_is_extended_and_started_from() {
    let sandbox = sandbox();
    sandbox.run(TRAIN).await.ok();
    let same = sandbox.run("train --resume data --steps 8 --local").await.ok();
    assert!(same.out.contains("already finished: 8 steps"), "{}", same.out);
    let short = sandbox.run("train --resume data --steps 5 --local").await;
    short.fails(2, &["it has finished 8", "--steps"]);
    let longer = sandbox.run("train --resume latest --steps 10 --local --json").await.ok().json();
    assert_eq!((&longer["steps"], &longer["name"]), (&Value::from(10), &Value::from("data")));
    let state = state(&sandbox, "data-run");
    let change = &state["changes"][0];
    assert_eq!((&change["setting"], &change["at_step"]), (&Value::from("steps"), &Value::from(8)));
    assert_eq!((&change["from"], &change["to"]), (&Value::from(8), &Value::from(10)));
    assert_eq!(state["settings"]["steps"], 10);
    // Both runs of the server have the name; the newest has the last checkpoint.
    sandbox.run("checkpoint info data/weights/step-10 --local").await.ok();
    sandbox.run("checkpoint info data/weights/step-9 --local").await.ok();

    let more = "train data.jsonl --local --steps 2 --name more --from data";
    let from = sandbox.run(&format!("{more} --json")).await.ok().json();
    assert!(from["loss"]["first"].as_f64() < longer["loss"]["first"].as_f64(), "{from}");
    let line = more.replace("more", "warm") + "/step-10 --with-optimizer";
    sandbox.run(&line).await.ok();
    let start = self::state(&sandbox, "warm-run")["settings"]["start"].clone();
    assert_eq!(start["with_optimizer"], true);
    assert!(start["checkpoint"].as_str().unwrap().ends_with("/weights/step-000010"), "{start}");
    let sampler = "train data.jsonl --local --from data/sampler_weights/step-10";
    sandbox.run(sampler).await.fails(2, &["expected a training checkpoint"]);
    let alone = sandbox.run("train data.jsonl --local --with-optimizer").await;
    alone.fails(2, &["--from"]);
}

#[tokio::test]
async fn models_are_named_by_their_paths() {
    let sandbox = sandbox();
    let folder = sandbox.path("models/mine");
    std::fs::create_dir_all(&folder).unwrap();
    tinkex_server::write_built_in_model(&folder).unwrap();
    let line = "train data.jsonl --local --model models/mine --steps 2 --name own --json";
    let trained = sandbox.run(line).await.ok().json();
    assert_eq!(trained["model"], "local/mine");
    // The server of a later command serves the model too.
    let ask = ["--local", "--max-tokens", "4", "-t", "0", "-p", "Hi", "--json"];
    let own = sandbox.run_args(["sample", "own"].into_iter().chain(ask)).await.ok().json();
    assert!(own["model"].as_str().unwrap().starts_with("tinker://"), "{own}");
    sandbox.run("train --resume own --steps 3 --local").await.ok();
    let sampled = sandbox.run_args(["sample", "./models/mine"].into_iter().chain(ask)).await.ok();
    assert_eq!(sampled.json()["model"], "local/mine");
    sandbox.run("logprobs models/mine --local -p Hi").await.ok();
    sandbox.write("broken.gguf", "no model");
    let broken = sandbox.run("sample broken.gguf --local -p Hi").await;
    broken.fails(7, &["cannot use base model \"local/broken\"", "broken.gguf"]);
    let moved = sandbox.path("models/other");
    std::fs::rename(&folder, &moved).unwrap();
    sandbox.run("sample --local --max-tokens 1 -p Hi").await.ok();
    std::fs::rename(&moved, &folder).unwrap();
    std::fs::write(folder.join("config.json"), "{").unwrap();
    sandbox.run("sample --local --max-tokens 1 -p Hi").await.ok();
    let broken = sandbox.run("sample models/mine --local --max-tokens 1 -p Hi").await;
    broken.fails(7, &["cannot use base model \"local/mine\""]);

    let remote = sandbox.run("sample models/mine -p Hi").await;
    remote.fails(2, &["is a model on this machine", "--local"]);
    sandbox.run("chat ./nothing --local").await.fails(4, &["model ./nothing does not exist"]);
    sandbox.run("chat x.gguf --local").await.fails(4, &["model x.gguf does not exist"]);
    sandbox.run("chat ./models --local").await.fails(4, &["config.json is missing"]);
}

#[tokio::test]
async fn a_running_server_that_lacks_a_model_is_explained() {
    let mut sandbox = sandbox();
    let folder = sandbox.path("mine");
    std::fs::create_dir_all(&folder).unwrap();
    tinkex_server::write_built_in_model(&folder).unwrap();
    let ask = "sample mine --local --max-tokens 1 -p Hi";
    for (options, message) in
        [("", Some("tinkex serve --model local/mine=")), ("--model m=mine", None)]
    {
        let interrupt = tinkex_cli::Interrupt::default();
        sandbox.interrupt = Some(interrupt.clone());
        let client = async {
            while !sandbox.data().join("server.json").exists() {
                tokio::task::yield_now().await;
            }
            let sampled = sandbox.share_folder().run(ask).await;
            interrupt.press();
            sampled
        };
        let line = format!("serve --port 0 {options}");
        let (served, sampled) = tokio::join!(sandbox.run(&line), client);
        served.ok();
        match message {
            Some(message) => drop(sampled.fails(1, &["does not serve the model", message])),
            None => drop(sampled.ok()),
        }
    }
}

#[tokio::test]
async fn runs_are_deleted_with_their_checkpoints() {
    let sandbox = sandbox();
    sandbox.run("train data.jsonl --local --steps 1").await.ok();
    sandbox.run("train data.jsonl --local --steps 1").await.ok();
    let unconfirmed = sandbox.run("run delete data --local").await;
    unconfirmed.fails(2, &["confirmation required", "--yes"]);
    // A download loads the checkpoint into a run, which it deletes.
    sandbox.run("checkpoint download data --local").await.ok();
    sandbox.run("export data-2 --to merged --local").await.ok();
    let runs = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(runs["total"], 2, "{runs}");
    let deleted = sandbox.run("run delete data --local --yes --json").await.ok().json();
    assert_eq!(
        (&deleted["checkpoints"], deleted["deleted"].as_array().unwrap().len()),
        (&Value::from(2), 1)
    );
    let runs = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(
        (&runs["total"], &runs["runs"][0]["user_metadata"]["name"]),
        (&Value::from(1), &Value::from("data-2"))
    );
    let checkpoints = sandbox.run("checkpoint list --local --json").await.ok().json();
    assert_eq!(checkpoints["total"], 2, "{checkpoints}");
    sandbox.run("run delete data --local --yes").await.fails(4, &["\"data\"", "data-2"]);
    // The name is free again.
    let again = sandbox.run("train data.jsonl --local --steps 1 --dir x --json").await.ok().json();
    assert_eq!(again["name"], "data");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_cannot_delete_runs_is_explained() {
    let run = serde_json::json!({ "training_run_id": "s:train:0", "base_model": "m",
        "model_owner": "me", "is_lora": true, "last_request_time": "2026-01-01T00:00:00Z" });
    let cli = ScriptedCli::new(&[
        ("GET", "/api/v1/training_runs/s:train:0", run),
        (
            "GET",
            "/api/v1/training_runs/s:train:0/checkpoints",
            serde_json::json!({ "checkpoints": [] }),
        ),
    ]);
    let refused = cli.run("run delete s:train:0 --yes").await;
    assert_eq!(refused.exit, 1, "{}", refused.err);
    assert!(refused.err.contains("this server cannot delete training runs"), "{}", refused.err);
    assert!(refused.err.contains("tinkex checkpoint delete --run-id s:train:0"), "{}", refused.err);
}
