//! `tinkex rl`: files, rewards, interruption, resumption and invalid input.

use std::fs;

use serde_json::{Value, json};
use tinkex_runs::RunFolder;

use crate::sandbox::{Sandbox, lines};
#[cfg(unix)]
use crate::serve::RestartedServer;
#[cfg(unix)]
use crate::train::{block, run_guide};

/// Returns prompts as JSON Lines.
fn prompts() -> String {
    let prompt = |text: &str| json!({ "prompt": text, "answer": 4 }).to_string() + "\n";
    ["What does a cow say?", "Who are you?", "Where do you live?"].map(prompt).concat()
}

/// Runs 3 steps of two groups of four completions.
const RL: &str = "rl prompts.jsonl --local --chat --steps 3 --group-size 4 --groups-per-batch 2 \
                  --max-tokens 12 --rank 4";

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("prompts.jsonl", &prompts());
    sandbox
}

/// Returns what a run computed: reward, loss and divergence of every step, as bits.
fn results(sandbox: &Sandbox, folder: &str) -> Vec<(u64, [Option<u64>; 3])> {
    let bits = |value: &Value| value.as_f64().map(f64::to_bits);
    lines(&sandbox.path(folder).join("metrics.jsonl"))
        .iter()
        .map(|line| {
            let values = [&line["reward"], &line["loss"], &line["kl"]].map(bits);
            (line["step"].as_u64().unwrap(), values)
        })
        .collect()
}

/// Runs a command with a reward that contains spaces.
async fn run(sandbox: &Sandbox, line: &str, reward: &str) -> crate::sandbox::CommandOutput {
    sandbox.run_args(line.split_whitespace().chain(["--reward", reward])).await
}

#[tokio::test]
async fn resumed_run_has_the_results_of_an_uninterrupted_one() {
    let mut sandbox = sandbox();
    let options = "--dir whole --plot reward.svg --log-to tensorboard --json";
    let whole = run(&sandbox, &format!("{RL} {options}"), "length:10").await.ok().json();
    assert!(sandbox.read("reward.svg").starts_with("<svg"));
    assert!(sandbox.path("whole/events.out.tfevents.tinkex").exists());
    assert_eq!(whole["steps"], 3);
    assert!(whole["reward"]["first"].is_number(), "{whole}");
    let samples = lines(&sandbox.path("whole/samples.jsonl"));
    assert_eq!(samples.len(), 3 * 2 * 4);
    assert!(samples[0]["completion"].is_string() && samples[0]["reward"].is_number());

    sandbox.interrupt_at = Some(("step 1/3", 1));
    let stopped = run(&sandbox, &format!("{RL} --dir parts"), "length:10").await;
    stopped.fails(130, &["saving a checkpoint", "stopped at step ", "tinkex rl --resume"]);
    sandbox.interrupt_at = None;
    sandbox.run("rl --resume parts --local").await.ok();
    let expected = results(&sandbox, "whole");
    assert_eq!(expected.len(), 3);
    assert_eq!(results(&sandbox, "parts"), expected);
    assert_eq!(lines(&sandbox.path("parts/samples.jsonl")).len(), samples.len());

    // More steps extend a finished run.
    let longer = sandbox.run("rl --resume parts --local --steps 4 --json").await.ok().json();
    assert_eq!(longer["steps"], 4);
    let shorter = sandbox.run("rl --resume parts --local --steps 2").await;
    shorter.fails(2, &["it has finished 4", "Pass --steps"]);
    let finished = sandbox.run("rl --resume parts --local").await.ok();
    assert!(finished.out.contains("already finished: 4 steps"), "{}", finished.out);
    // A run of another command is not touched.
    let other = sandbox.run("train --resume parts --local").await;
    other.fails(2, &["its method is rl", "Resume the run with `tinkex rl --resume "]);
}

#[tokio::test]
async fn zero_rewards_change_no_weights() {
    let sandbox = sandbox();
    let adapter = async |line: &str, name: &str| {
        let report = run(
            &sandbox,
            &format!("{line} --dir {name} --json"),
            "while read -r line; do echo 0; done",
        )
        .await
        .ok()
        .json();
        let path = report["checkpoint"].as_str().unwrap().to_owned();
        let downloaded =
            sandbox.run(&format!("checkpoint download {path} --local --json")).await.ok();
        let folder = downloaded.json()["destination"].as_str().unwrap().to_owned();
        fs::read(std::path::Path::new(&folder).join("adapter_model.safetensors")).unwrap()
    };
    let one = adapter(&RL.replace("--steps 3", "--steps 1"), "one").await;
    let three = adapter(RL, "three").await;
    assert!(one == three, "the weights changed");
    let metrics = lines(&sandbox.path("three/metrics.jsonl"));
    assert!(metrics.iter().all(|line| line["skipped_groups"] == 2 && line["loss"].is_null()));
}

/// The program is killed after its third answer; the run restarts it. Once it fails for good, the
/// run ends and can be resumed.
#[cfg(unix)]
#[tokio::test]
async fn reward_programs_are_restarted_and_a_failed_run_resumes() {
    let sandbox = sandbox();
    sandbox.write(
        "reward.sh",
        "n=0\nwhile read -r line; do\n  n=$((n+1))\n  \
         if [ $n -gt 3 ]; then echo bye >&2; exit 1; fi\n  \
         [ -e broken ] && exit 2\n  \
         echo \"{\\\"reward\\\": ${#line}, \\\"metrics\\\": {\\\"n\\\": $n}}\"\n\
         done\n",
    );
    let line = format!("{RL} --dir run --reward-workers 1");
    let finished = run(&sandbox, &line, "sh reward.sh").await.ok();
    assert!(finished.err.contains("reward: bye"), "{}", finished.err);
    assert!(finished.err.contains("reward: restarting"), "{}", finished.err);
    let metrics = lines(&sandbox.path("run/metrics.jsonl"));
    assert!(metrics[0]["reward/n"].is_number(), "{}", metrics[0]);

    sandbox.write("broken", "");
    let failed = sandbox.run("rl --resume run --local --steps 4 --reward-workers 1").await;
    failed.fails(1, &["reward program `sh reward.sh` failed", "3 attempts", "tinkex rl --resume"]);
    fs::remove_file(sandbox.path("broken")).unwrap();
    let resumed = sandbox.run("rl --resume run --local --json").await.ok().json();
    assert_eq!(resumed["steps"], 4);
}

#[tokio::test]
async fn evaluation_prompts_are_rewarded_before_and_after() {
    let sandbox = sandbox();
    sandbox.write("held.jsonl", &prompts());
    let line = format!("{RL} --eval-file held.jsonl --eval-every 2 --off-policy 1 --kl-coef 0.01");
    let report =
        run(&sandbox, &format!("{line} --json --loss grpo"), "length:10").await.ok().json();
    assert!(report["eval_reward"]["first"].is_number(), "{report}");
    assert!(report["best"]["reward"].is_number(), "{report}");
    let evaluated: Vec<_> = lines(&sandbox.path("prompts-run/metrics.jsonl"))
        .iter()
        .filter(|line| line["eval_reward"].is_number())
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(evaluated, [0, 2, 3]);
}

#[tokio::test]
async fn invalid_prompts_and_options_are_rejected_before_the_run_starts() {
    let sandbox = sandbox();
    sandbox.write("bad.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": 1}\n[]\n");
    sandbox
        .run("rl bad.jsonl --local --reward exact")
        .await
        .fails(2, &["2 invalid lines", "bad.jsonl:2: ", "bad.jsonl:3: expected an object", "hint"]);
    sandbox.write("bad.jsonl", "{\"prompt\": \"a\"}\n");
    let missing = sandbox.run("rl bad.jsonl --local --reward number").await;
    missing.fails(2, &["needs the field \"answer\"", "Add the field"]);
    for (line, message) in [
        ("rl prompts.jsonl --local", "--reward"),
        ("rl prompts.jsonl --local --reward regex:(", "invalid pattern"),
        ("rl prompts.jsonl --local --reward exact --group-size 1", "from 2 to 1024"),
        ("rl prompts.jsonl --local --reward exact --loss dro", "importance_sampling"),
        ("rl --resume x --local --reward exact", "cannot be used with"),
    ] {
        sandbox.run(line).await.fails(2, &[message]);
    }
    assert!(!sandbox.path("prompts-run").exists());
    sandbox.run("rl --resume nowhere --local").await.fails(4, &["no run folder has"]);
}

/// Runs the `--local` commands of the guide in order, with its files.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_guide_work() {
    let sandbox = Sandbox::new();
    sandbox.write("prompts.jsonl", &block("docs/rl.md", "json", 0));
    sandbox.write("reward.py", &block("docs/rl.md", "python", 0));
    run_guide(&sandbox, "docs/rl.md").await;
}

#[tokio::test]
async fn quickstart_trains_with_a_reward_and_compares_answers() {
    let sandbox = Sandbox::new();
    let report = sandbox.run("quickstart --rl --steps 1 --json").await.ok().json();
    assert_eq!((report["rewards"].as_array().unwrap().len(), &report["steps"]), (1, &json!(1)));
    assert_eq!(report["samples"].as_array().unwrap().len(), 4);
    assert!(report["sampler"].as_str().unwrap().starts_with("tinker://"), "{report}");
}

/// A second Ctrl-C, like a kill, ends the command in the middle of a batch. Every finished step is
/// saved.
#[test]
fn an_aborted_run_loses_only_the_running_batch() {
    let mut sandbox = sandbox();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let execute = |sandbox: &Sandbox, line: &str| {
        let runtime = runtime();
        let output = runtime.block_on(run(sandbox, line, "length:10"));
        // Like the program, do not wait for the work in progress on the server.
        runtime.shutdown_background();
        output
    };
    execute(&sandbox, &format!("{RL} --dir whole")).ok();
    sandbox.interrupt_at = Some(("step 2/3", 2));
    let aborted = execute(&sandbox, &format!("{RL} --dir parts"));
    aborted.fails(130, &["interrupted", "tinkex rl --resume"]);
    sandbox.interrupt_at = None;
    let progress = RunFolder::read(&sandbox.path("parts")).unwrap().progress;
    assert!(progress.step() >= 2, "{progress:?}");
    runtime().block_on(sandbox.run("rl --resume parts --local")).ok();
    assert_eq!(results(&sandbox, "parts"), results(&sandbox, "whole"));
}

/// Kills the server while a batch is sampled, and starts it again: the run waits for it and goes
/// on.
#[cfg(unix)]
#[tokio::test]
async fn a_run_continues_after_its_server_was_killed() {
    let mut sandbox = sandbox();
    sandbox.key = Some("tml-any");
    let serving = RestartedServer::start(&mut sandbox, "step 1/3");
    let server = format!("--model tinkex/tiny --base-url {} --dir run", serving.url);
    let line = RL.replace("--local", &server);
    run(&sandbox, &line, "length:10").await.ok();
    assert_eq!(results(&sandbox, "run").len(), 3);
    serving.end();
}

/// The proof that the loop learns: the mean reward rises from below 0.2 to above 0.9, over three
/// seeds.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: cargo test --release -p tinkex-cli --test it -- --ignored mean_reward"]
async fn the_mean_reward_rises_from_a_fifth_to_nine_tenths() {
    let sandbox = Sandbox::new();
    let beginnings = [
        "Once upon a time",
        "One day",
        "In the morning",
        "There was a",
        "Every evening",
        "Long ago",
        "One night",
        "Near the river",
    ];
    let lines_of: String =
        beginnings.map(|text| json!({ "prompt": text }).to_string() + "\n").concat();
    sandbox.write("stories.jsonl", &lines_of);
    for seed in 0..3 {
        let line = format!(
            "rl stories.jsonl --local --steps 30 --groups-per-batch 8 --max-tokens 32 \
             --learning-rate 6e-3 --seed {seed} --dir seed-{seed}"
        );
        run(&sandbox, &line, "regex:golden").await.ok();
        let metrics = lines(&sandbox.path(&format!("seed-{seed}/metrics.jsonl")));
        let rewards: Vec<f64> =
            metrics.iter().map(|line| line["reward"].as_f64().unwrap()).collect();
        assert!(rewards[0] < 0.2, "seed {seed}: {rewards:?}");
        let last = rewards[27..].iter().sum::<f64>() / 3.0;
        assert!(last > 0.9, "seed {seed}: {rewards:?}");
    }
}
