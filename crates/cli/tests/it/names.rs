//! Names of runs, and references to runs and checkpoints by name, folder, id prefix and `latest`.

use serde_json::Value;

use crate::sandbox::Sandbox;
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
            let run = sandbox.run(&format!("run info {reference} --local --json")).await.ok().json();
            run["training_run_id"].as_str().unwrap().to_owned()
        }
    };
    for reference in ["data", "data-run", "./data-run", id, &id[..12]] {
        assert_eq!(info(reference.to_owned()).await, id, "{reference}");
    }
    assert_eq!(info("latest".to_owned()).await, state(&sandbox, "poems-run")["run_id"]);
    let unknown = sandbox.run("run info poem --local").await;
    unknown.fails(4, &["no training run has the name, id or folder \"poem\"", "Did you mean poems"]);
    // The ids of all runs differ in more than their first characters, except for the empty prefix.
    sandbox.run("run info xyz --local").await.fails(4, &["tinkex run list"]);

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
            None => drop(shown.fails(4, &["run data has no checkpoint step-3", "Did you mean"])),
        }
    }
    let both = sandbox.run(&path("data/step-8")).await;
    both.fails(2, &["names 2 checkpoints", "/weights/step-000008", "data/weights/step-8"]);

    let ask = ["sample", "--local", "--max-tokens", "4", "-p", "Hi"];
    for model in ["data", "data/step-8", "data-run", "poems/latest", "latest"] {
        sandbox.run_args(ask.into_iter().chain([model])).await.ok();
    }
    let unknown = sandbox.run_args(ask.into_iter().chain(["poem"])).await;
    unknown.fails(4, &["poem", "Did you mean poems?"]);

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
    let short = sandbox.run("train --resume data --steps 8 --local").await.ok();
    assert!(short.out.contains("already finished") || short.out.contains("Trained"), "{}", short.out);
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
    sandbox.run("checkpoint info data/weights/step-8 --local").await.ok();

    let more = "train data.jsonl --local --steps 2 --name more --from data";
    let from = sandbox.run(&format!("{more} --json")).await.ok().json();
    assert!(from["loss"]["first"].as_f64() < longer["loss"]["first"].as_f64(), "{from}");
    let line = more.replace("more", "warm") + "/step-10 --with-optimizer";
    sandbox.run(&line).await.ok();
    let config = self::state(&sandbox, "warm-run")["settings"].clone();
    assert_eq!(config["with_optimizer"], true);
    assert!(config["from"].as_str().unwrap().ends_with("/weights/step-000010"), "{config}");
    let alone = sandbox.run("train data.jsonl --local --with-optimizer").await;
    alone.fails(2, &["--from"]);
}
