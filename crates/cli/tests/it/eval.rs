//! `tinkex eval`: the loss, answers and scores of a model.

use crate::sandbox::Sandbox;
use crate::train::{block, run_guide};

const PAGE: &str = "docs/eval.md";

/// Returns a sandbox with the examples of the guide.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("questions.jsonl", &block(PAGE, "json", 0));
    sandbox
}

#[tokio::test]
async fn the_loss_is_the_held_out_loss_and_learned_answers_match() {
    let sandbox = sandbox();
    let line = "train questions.jsonl --local --steps 60 --batch-size 4 --json \
                --eval-file questions.jsonl --eval-every 0";
    let trained = sandbox.run(line).await.ok().json();
    let sampler = trained["sampler"].as_str().unwrap();
    let evaluated =
        sandbox.run(&format!("eval {sampler} questions.jsonl --local --json")).await.ok().json();
    let loss = |value: &serde_json::Value| value.as_f64().unwrap();
    let held_out = loss(&trained["eval_loss"]["last"]);
    let measured = loss(&evaluated["loss"]);
    assert!((held_out - measured).abs() < 1e-4 * held_out.max(1.0), "{held_out} {measured}");
    assert_eq!((&evaluated["examples"], &evaluated["answers"]), (&4.into(), &4.into()));
    assert_eq!(evaluated["score"], 1.0, "{evaluated}");
    let first = &evaluated["results"][0];
    assert_eq!((&first["expected"], &first["stop_reason"]), (&"Moo.".into(), &"stop".into()));
    assert_eq!(first["prompt"], "What does a cow say?");

    // A run is evaluated with its latest checkpoint.
    let run = trained["run_id"].as_str().unwrap();
    let table = sandbox.run(&format!("eval {run} questions.jsonl --local --limit 2")).await.ok();
    assert!(table.out.contains("2 examples") && table.out.contains("2 of 2 answers match (exact)"));
    let csv = sandbox.run(&format!("eval {run} questions.jsonl --local -f csv")).await.ok().out;
    assert!(csv.starts_with("#,Loss,Match,Prompt,Expected,Answer\r\n1,"), "{csv}");
    assert!(csv.contains(",Yes,") && csv.contains(",Moo.,Moo.\r\n"), "{csv}");

    // The run folder has a line for each evaluation.
    let lines = crate::sandbox::lines(&sandbox.path("questions-run/evaluations.jsonl"));
    let counts: Vec<_> = lines.iter().map(|line| line["examples"].as_u64().unwrap()).collect();
    assert_eq!(counts, [4, 2, 4]);
    assert_eq!((&lines[0]["checkpoint"], &lines[0]["score"]), (&sampler.into(), &1.0.into()));
}

#[tokio::test]
async fn scores_below_the_minimum_and_invalid_options_fail() {
    let sandbox = sandbox();
    let eval = "eval tinkex/tiny questions.jsonl --local --max-tokens 8";
    let low = sandbox.run(&format!("{eval} --min-score 0.9")).await;
    assert!(low.out.contains("0 of 4 answers match (exact)"), "{}", low.out);
    low.fails(1, &["score 0.000 is below --min-score 0.9"]);
    let loss = sandbox.run(&format!("{eval} --loss-only --json")).await.ok().json();
    assert_eq!((&loss["answers"], &loss["score"]), (&0.into(), &serde_json::Value::Null));
    sandbox.write("text.jsonl", "{\"messages\": []}\n");
    for (line, code, message) in [
        ("eval tinkex/tiny none.jsonl --local", 1, "cannot read evaluation file"),
        ("eval tinkex/tiny text.jsonl --local", 2, "text.jsonl:1:"),
        ("eval tinkex/tiny questions.jsonl --local --match regex:(", 2, "invalid pattern"),
        ("eval tinkex/tiny questions.jsonl --local --match fuzzy", 2, "expected exact, contains"),
        ("eval tinkex/tiny questions.jsonl --local --loss-only --min-score 1", 2, "--min-score"),
    ] {
        sandbox.run(line).await.fails(code, &[message]);
    }
}

/// Runs the `--local` commands of the guide in order, with its files.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_guide_work() {
    let sandbox = sandbox();
    sandbox.write("judge.py", &block(PAGE, "python", 0));
    sandbox.write("prompts.jsonl", &block(PAGE, "json", 1));
    run_guide(&sandbox, PAGE).await;
}
