//! `tinkex train`: checkpoints, resuming, plans, plots and invalid input.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tinkex_runs::{RunFolder, SavedCheckpoint};

use crate::sandbox::{Sandbox, lines};
use crate::scripted_cli::ScriptedCli;

/// Returns training examples as JSON Lines: conversations.
pub(crate) fn examples(count: usize) -> String {
    let line = |at: usize| {
        json!({ "messages": [
            { "role": "user", "content": format!("What comes after {at}?") },
            { "role": "assistant", "content": format!("After {at} comes {}.", at + 1) },
        ] })
        .to_string()
    };
    (0..count).map(|at| line(at) + "\n").collect()
}

/// Trains for 8 steps, with checkpoints at steps 3 and 6 and at the end.
pub(crate) const TRAIN: &str = "train data.jsonl --local --steps 8 --batch-size 4 --save-every 3 \
                    --eval-split 0.2 --schedule cosine --warmup 2";

/// Returns a sandbox with the training file of [`TRAIN`].
pub(crate) fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("data.jsonl", &examples(20));
    sandbox
}

/// Returns the `tinkex` commands with `--local` in the shell blocks of a page of the documentation.
fn local_commands(page: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let text = std::fs::read_to_string(path).unwrap();
    let blocks = text.split("```").skip(1).step_by(2).filter(|block| block.starts_with("sh\n"));
    let lines = blocks.flat_map(str::lines).map(|line| line.split("  #").next().unwrap().trim());
    let local = lines.filter(|line| line.starts_with("tinkex ") && line.contains("--local"));
    local.map(|line| line["tinkex ".len()..].to_owned()).collect()
}

/// Runs the `--local` commands of a page of the documentation in order. An argument may be in single
/// quotes, and `< FILE` at the end is the input.
pub(crate) async fn run_guide(sandbox: &Sandbox, page: &str) {
    let commands = local_commands(page);
    assert!(commands.len() >= 3, "{page}: {commands:?}");
    for command in commands {
        let mut runner = sandbox.share_folder();
        let (command, input) = match command.split_once(" < ") {
            Some((command, file)) => (command.to_owned(), sandbox.read(file)),
            None => (command, sandbox.input.clone()),
        };
        runner.input = input;
        let (command, quoted) = match command.split_once('\'') {
            Some((before, text)) => (before.to_owned(), text.split_once('\'')),
            None => (command, None),
        };
        let (quoted, rest) = quoted.map_or((None, ""), |(quoted, rest)| (Some(quoted), rest));
        let line = command.split_whitespace().chain(quoted).chain(rest.split_whitespace());
        runner.run_args(line).await.ok();
    }
}

/// Returns a block of a page of the documentation, which the page asks the reader to save.
pub(crate) fn block(page: &str, language: &str, index: usize) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let text = std::fs::read_to_string(path).unwrap();
    let mut blocks = text.split("```").skip(1).step_by(2);
    let found = blocks.by_ref().filter_map(|block| block.strip_prefix(&format!("{language}\n")));
    found.skip(index).map(str::to_owned).next().unwrap()
}

/// Runs the `--local` commands of the training guide and of the README, each page in its order.
#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_training_guide_work() {
    for page in ["docs/train.md", "README.md"] {
        let mut sandbox = Sandbox::new();
        sandbox.write("examples.jsonl", &examples(20));
        sandbox.write("more.jsonl", &examples(5));
        if page == "docs/train.md" {
            for (at, name) in ["examples.jsonl", "capitals.jsonl", "alpaca.json"].iter().enumerate()
            {
                sandbox.write(name, &block(page, "json", at));
            }
        }
        let folder = sandbox.path("models/my-model");
        std::fs::create_dir_all(&folder).unwrap();
        tinkex_server::write_built_in_model(&folder).unwrap();
        sandbox.input = "Who are you?\n".to_owned();
        run_guide(&sandbox, page).await;
    }
}

/// Returns step and loss of every step. Losses are returned as bits, to compare them exactly.
pub(crate) fn losses(sandbox: &Sandbox, folder: &str) -> Vec<(u64, u64)> {
    let lines = lines(&sandbox.path(folder).join("metrics.jsonl"));
    let steps = lines.iter().filter(|line| line["loss"].is_number());
    steps
        .map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap().to_bits()))
        .collect()
}

/// Returns the checkpoints of a run, from which `--resume` continues.
fn checkpoints(sandbox: &Sandbox, folder: &str) -> Vec<SavedCheckpoint> {
    RunFolder::read(&sandbox.path(folder)).unwrap().progress.checkpoints
}

#[tokio::test]
async fn resumed_run_has_the_losses_of_an_uninterrupted_one() {
    let mut sandbox = sandbox();
    let whole = sandbox.run(&format!("{TRAIN} --dir whole --json")).await.ok();
    let figures = whole.json();
    assert_eq!(figures["steps"], 8);
    assert!(figures["loss"]["last"].as_f64() < figures["loss"]["first"].as_f64());
    assert!(figures["eval_loss"]["last"].as_f64() < figures["eval_loss"]["first"].as_f64());

    sandbox.interrupt_at = Some(("step 4/8", 1));
    let stopped = sandbox.run(&format!("{TRAIN} --dir parts")).await;
    let stopped = stopped.fails(130, &["saving a checkpoint", "stopped at step", "--resume"]);
    assert!(stopped.out.is_empty());
    let step = checkpoints(&sandbox, "parts").last().unwrap().step;
    assert!((4..8).contains(&step), "{step}");

    sandbox.interrupt_at = None;
    let resumed = sandbox.run("train --resume parts --local").await.ok();
    assert!(resumed.out.contains("tinkex chat data-2 --local"), "{}", resumed.out);
    // The printed command downloads the adapter.
    let command =
        resumed.out.lines().find_map(|line| line.trim().strip_prefix("tinkex checkpoint "));
    let downloaded = sandbox.run(&format!("checkpoint {} --json", command.unwrap())).await.ok();
    let folder = downloaded.json()["destination"].as_str().unwrap().to_owned();
    let adapter = fs::read(Path::new(&folder).join("adapter_model.safetensors")).unwrap();
    assert!(adapter.windows(8).any(|name| name == b"lm_head."), "{folder}");
    let expected = losses(&sandbox, "whole");
    assert_eq!(expected.len(), 8);
    assert_eq!(losses(&sandbox, "parts"), expected);
    assert!(sandbox.read("parts/plot.svg").starts_with("<svg"));

    // The sampler checkpoint of the interruption is deleted when the run finishes.
    let listed = sandbox.run("checkpoint list --local --json").await.ok().json();
    let listed = listed["checkpoints"].as_array().unwrap();
    let samplers =
        listed.iter().filter(|checkpoint| checkpoint["checkpoint_type"] == "sampler").count();
    assert_eq!(samplers, 2, "{listed:?}");

    let again = sandbox.run("train --resume parts --local").await.ok();
    assert!(again.out.contains("finished"), "{}", again.out);
}

#[test]
fn second_ctrl_c_stops_at_once_and_keeps_the_last_checkpoint() {
    let mut sandbox = sandbox();
    sandbox.interrupt_at = Some(("step 5/8", 2));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stopped = runtime.block_on(sandbox.run(&format!("{TRAIN} --dir run")));
    // Like the program, do not wait for the work in progress on the server.
    runtime.shutdown_background();
    stopped.fails(130, &["interrupted", "Resume from step 3 with: tinkex train --resume"]);
    assert_eq!(checkpoints(&sandbox, "run").len(), 1);
}

#[tokio::test]
async fn invalid_training_files_are_rejected_before_the_run_starts() {
    let sandbox = sandbox();
    let good = examples(1);
    sandbox.write("data.jsonl", &format!("{good}\n{{\"prompt\": \"a\"}}\nnonsense\n"));
    let rejected = sandbox.run(TRAIN).await;
    rejected.fails(
        2,
        &["2 invalid lines", "data.jsonl:3: ", "\"completion\"", "data.jsonl:4: ", "hint"],
    );
    sandbox.write("data.jsonl", &good);
    let long = sandbox.run("train data.jsonl --local --max-tokens 3 --refuse-long").await;
    let long = long.fails(2, &["exceed the limit of 3", "Raise --max-tokens"]);
    assert!(!long.err.contains("messages"), "{}", long.err);
    sandbox.write("data.jsonl", "\n");
    sandbox.run(TRAIN).await.fails(2, &["it contains no examples"]);
    sandbox
        .run("train missing.jsonl --local")
        .await
        .fails(1, &["cannot read training file ", "missing.jsonl: ", "JSON Lines"]);
    sandbox.run("train . --local").await.fails(2, &["it is a folder", "--resume"]);
    let line = format!("{} --eval-file gone.jsonl", TRAIN.replace("--eval-split 0.2", ""));
    sandbox.run(&line).await.fails(1, &["cannot read evaluation file ", "gone.jsonl: "]);
    sandbox.write("data.jsonl", &examples(2));
    let split = sandbox.run("train data.jsonl --local --eval-split 0.9").await;
    split.fails(2, &["leaves no training examples: the file has 2"]);
    assert!(!sandbox.path("data-run").exists());
    let runs = sandbox.run("run list --local --json").await.ok();
    assert_eq!(runs.json()["runs"], json!([]));
}

#[tokio::test]
async fn invalid_train_options_are_rejected() {
    let sandbox = sandbox();
    for (line, message) in [
        ("train --local", "<FILE>"),
        ("train data.jsonl --local --resume run", "cannot be used with"),
        ("train data.jsonl --local --learning-rate 0", "2e-4"),
        ("train data.jsonl --local --batch-size 0", "above 0"),
        ("train data.jsonl --local --rank abc", "expected a whole number above 0"),
        ("train data.jsonl --local --steps -1", "expected a whole number above 0"),
        ("train data.jsonl --local --seed -1", "the number must not be negative"),
        ("train data.jsonl --local --epochs -0.5", "a number above 0, such as 3 or 0.5"),
        ("train data.jsonl --local --timeout 0", "a timeout of 0 would fail every request"),
        ("train data.jsonl --local --price 1", "--dry-run"),
        ("train - - --local", "standard input (-) is given twice"),
        ("train data.jsonl --local --steps 3 --epochs 1", "cannot be used with"),
    ] {
        sandbox.run(line).await.fails(2, &[message]);
    }
    let rejected = sandbox.run("train --resume run --seed 3 --local").await;
    let rejected =
        rejected.fails(2, &["cannot be used with", "hint: ", "Omit --seed <N> to resume"]);
    assert!(!rejected.err.contains("--rank"), "{}", rejected.err);
    let rejected = sandbox.run("train data.jsonl --resume run --local --json").await.fails(2, &[]);
    let document: Value = serde_json::from_str(&rejected.err).unwrap();
    let hint = document["error"]["hint"].as_str().unwrap();
    assert!(hint.contains("Omit [FILE]... to resume"), "{hint}");
    let nowhere = sandbox.run("train --resume nowhere --local").await;
    nowhere.fails(4, &["no run folder has the path, name or id \"nowhere\"", "--from nowhere"]);
    sandbox.run("train --resume . --local").await.fails(4, &["run.json is missing"]);
    for (name, reason) in [("latest", "newest run"), ("a/b", "without '/'"), ("a:b", "without ':'")]
    {
        sandbox.run(&format!("train data.jsonl --local --name {name}")).await.fails(2, &[reason]);
    }
}

/// Regression: the hint was to resume the run, which would repeat the rejected request.
#[tokio::test]
async fn rejected_rank_is_permanent_and_leaves_no_run_folder() {
    let sandbox = sandbox();
    for command in
        ["train data.jsonl --local --rank 7", "train data.jsonl --local --rank 7 --dry-run"]
    {
        let rejected = sandbox.run(command).await;
        let rejected =
            rejected.fails(7, &["error: lora_config.rank: 7 is not a power of two", "--rank 16"]);
        assert!(!rejected.err.contains("--resume"), "{}", rejected.err);
        assert!(!rejected.err.contains("again"), "{}", rejected.err);
        assert!(!rejected.err.contains("POST"), "{}", rejected.err);
        assert!(!sandbox.path("data-run").exists());
    }
    let verbose = sandbox.run("train data.jsonl --local --rank 7 -v").await;
    verbose.fails(7, &["request: POST /api/v1/create_model to http://127.0.0.1:"]);
    sandbox.write("prompts.jsonl", "{\"prompt\": \"Hi\", \"answer\": \"Yes\"}\n");
    let rl = sandbox.run("rl prompts.jsonl --local --reward exact --rank 7").await;
    rl.fails(7, &["error: lora_config.rank: 7 is not a power of two"]);
    assert!(!sandbox.path("prompts-run").exists());
}

/// Regression: the hint to start again replaced the hint about the API key.
#[tokio::test(start_paused = true)]
async fn rejected_key_is_explained_and_leaves_no_run_folder() {
    let cli = ScriptedCli::new(&[
        ("GET", "/api/v1/get_server_capabilities", json!({ "supported_models": [] })),
        ("POST", "/api/v1/create_session", json!({ "session_id": "s", "type": "create_session" })),
        ("POST", "/api/v1/create_model", json!({ "status": 401, "detail": "bad key" })),
    ]);
    std::fs::write(cli.home.path().join("data.jsonl"), examples(4)).unwrap();
    let line = "train data.jsonl --model tinkex/tiny --steps 1 --dir run";
    let failed = cli.run(line).await;
    assert_eq!(failed.exit, 3, "{}", failed.err);
    let hint = failed.err.lines().find_map(|line| line.strip_prefix("hint: ")).unwrap();
    assert_eq!(hint, "Check the API key (TINKER_API_KEY), or run `tinkex auth login`.");
    assert!(!cli.home.path().join("run").exists());
}

#[tokio::test]
async fn resume_rejects_changed_files_and_a_locked_run() {
    let mut sandbox = sandbox();
    sandbox.interrupt_at = Some(("step 4/8", 1));
    sandbox.write("held.jsonl", &examples(3));
    let line = TRAIN.replace("--eval-split 0.2", "--eval-file held.jsonl");
    sandbox.run(&format!("{line} --dir run")).await.fails(130, &[]);
    sandbox.interrupt_at = None;
    let lock = std::fs::File::open(sandbox.path("run/lock")).unwrap();
    lock.lock().unwrap();
    sandbox.run("train --resume run --local").await.fails(1, &["is already in progress"]);
    drop(lock);
    sandbox.write("held.jsonl", &examples(4));
    sandbox.run("train --resume run --local").await.fails(2, &["held.jsonl has changed"]);
    sandbox.write("held.jsonl", &examples(3));
    sandbox.write("data.jsonl", &examples(21));
    sandbox
        .run("train --resume run --local")
        .await
        .fails(2, &["has changed since the run started"]);
}

#[tokio::test]
async fn damaged_and_newer_run_folders_are_refused_and_left_alone() {
    let sandbox = sandbox();
    sandbox.run("train data.jsonl --local --steps 1 --dir run").await.ok();
    let intact = sandbox.read("run/run.json");
    let newer = intact.replacen("\"version\": 1", "\"version\": 2", 1);
    let half = &intact[..intact.len() / 2];
    let versions = "it has version 2 of the run format, and this program reads version 1";
    for (text, message, hint) in [
        (newer.as_str(), versions, "Use the version of tinkex that wrote the run, or a newer one."),
        (half, "run/run.json: EOF while parsing", "Restore run.json from a backup"),
        ("{\"version\": 1}", "run/run.json: missing field", "Restore run.json from a backup"),
    ] {
        sandbox.write("run/run.json", text);
        for command in
            ["train --resume run --local", "rl --resume run --local", "run info ./run --local"]
        {
            sandbox.run(command).await.fails(1, &[message, hint]);
        }
        assert_eq!(sandbox.read("run/run.json"), text);
    }
    sandbox.run("train data.jsonl --local --dir run").await.fails(2, &["already contains a run"]);
}

#[tokio::test]
async fn dry_run_prints_the_plan() {
    let sandbox = sandbox();
    let plan = sandbox.run(&format!("{TRAIN} --dry-run --json")).await.ok().json();
    assert_eq!((&plan["examples"], &plan["held_out"]), (&json!(16), &json!(4)));
    assert_eq!(plan["steps"], 8);
    assert_eq!(plan["epochs"], 2.0);
    let twice = plan["tokens"].as_u64().unwrap() * 2;
    assert_eq!(plan["tokens_to_train_on"], twice);
    assert!(!sandbox.path("data-run").exists());
}

#[tokio::test]
async fn plot_option_sets_path_and_format() {
    let mut sandbox = sandbox();
    let wrong = sandbox.run(&format!("{TRAIN} --plot loss.jpg")).await;
    wrong.fails(2, &["loss.jpg", "--plot <FILE>", "ends in .svg or .png"]);
    assert!(
        !sandbox.path("data-run").exists() && !sandbox.data().exists(),
        "an invalid option started a run"
    );
    sandbox.write("file", "");
    sandbox.run(&format!("{TRAIN} --plot file/loss.png")).await.fails(1, &["cannot create "]);
    let runs = sandbox.run("run list --local --json").await.ok();
    assert_eq!(runs.json()["runs"], json!([]));

    sandbox.interrupt_at = Some(("step 4/8", 1));
    sandbox.run(&format!("{TRAIN} --dir run --plot pictures/loss.png")).await.fails(130, &[]);
    sandbox.interrupt_at = None;
    let size = || {
        let image = std::fs::read(sandbox.path("pictures/loss.png")).unwrap();
        assert!(image.starts_with(b"\x89PNG\r\n"), "not a PNG file");
        let number = |at: usize| u32::from_be_bytes(image[at..at + 4].try_into().unwrap());
        (number(16), number(20))
    };
    assert_eq!(size(), (1600, 920));
    std::fs::write(sandbox.path("pictures/loss.png"), "").unwrap();
    let figures = sandbox.run("train --resume run --local --json").await.ok().json();
    assert!(figures["plot"].as_str().unwrap().ends_with("pictures/loss.png"), "{figures}");
    assert_eq!(size(), (1600, 920), "a resumed run must write the same file");
    assert!(!sandbox.path("run/plot.svg").exists());
}

#[tokio::test]
async fn keep_option_limits_the_number_of_checkpoints() {
    let sandbox = sandbox();
    let line = "train data.jsonl --local --steps 5 --save-every 1 --keep 2 --json";
    let figures = sandbox.run(line).await.ok().json();
    assert_eq!(checkpoints(&sandbox, "data-run").len(), 2);
    let listed = sandbox.run("checkpoint list --local --json").await.ok().json();
    let mut names: Vec<_> = listed["checkpoints"].as_array().unwrap().iter().collect();
    names.sort_by_key(|checkpoint| checkpoint["tinker_path"].as_str().unwrap().to_owned());
    let names = names.iter().map(|checkpoint| checkpoint["checkpoint_id"].as_str().unwrap());
    let names: Vec<_> = names.collect();
    assert_eq!(
        names,
        ["sampler_weights/step-000005", "weights/step-000004", "weights/step-000005"]
    );
    assert!(figures["sampler"].as_str().unwrap().ends_with("/sampler_weights/step-000005"));
    // The next run gets a new folder.
    sandbox.run("train data.jsonl --local --steps 1").await.ok();
    assert!(sandbox.path("data-2-run/metrics.jsonl").exists());
}
