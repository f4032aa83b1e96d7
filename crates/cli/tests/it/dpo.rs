//! `tinkex train --method dpo`: metrics, resumption and invalid input.

use std::fs;

use serde_json::{Value, json};

use crate::sandbox::{Sandbox, lines};
use crate::train::{block, run_guide};

/// Returns preference pairs: texts, and every third a conversation.
fn pairs(count: usize) -> String {
    let line = |at: usize| match at % 3 {
        0 => json!({
            "prompt": [{ "role": "user", "content": format!("What comes after {at}?") }],
            "chosen": { "role": "assistant", "content": format!("After {at} comes {}!", at + 1) },
            "rejected": { "role": "assistant", "content": "I do not know." },
        })
        .to_string(),
        _ => json!({
            "prompt": format!("{at} and"), "chosen": " so on!", "rejected": " no more",
        })
        .to_string(),
    };
    (0..count).map(|at| line(at) + "\n").collect()
}

const DPO: &str = "train pairs.jsonl --local --method dpo --beta 0.2 --steps 6 --batch-size 4 \
                   --save-every 2 --eval-split 0.25";

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("pairs.jsonl", &pairs(16));
    sandbox
}

/// Returns the lines of the steps, without the speed.
fn steps(sandbox: &Sandbox, folder: &str) -> Vec<Value> {
    let mut lines = lines(&sandbox.path(folder).join("metrics.jsonl"));
    for line in &mut lines {
        line.as_object_mut().unwrap().remove("tokens_per_second");
    }
    lines
}

#[tokio::test]
async fn dpo_learns_preferences_and_resumes_to_the_bit() {
    let mut sandbox = sandbox();
    let report = sandbox.run(&format!("{DPO} --dir whole --json")).await.ok().json();
    let first = report["loss"]["first"].as_f64().unwrap();
    assert!((first - 2.0_f64.ln()).abs() < 1e-6, "the reference is the starting weights: {first}");
    assert!(report["loss"]["last"].as_f64().unwrap() < first, "{report}");
    assert!(report["metrics_last"]["margin"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!(report["eval_metrics_last"]["accuracy"], 1.0);
    let whole = steps(&sandbox, "whole");
    assert!(whole[1]["chosen_reward"].is_number() && whole[1]["rejected_reward"].is_number());

    sandbox.interrupt_at = Some(("step 3/6", 1));
    sandbox.run(&format!("{DPO} --dir parts")).await.fails(130, &["--resume"]);
    sandbox.interrupt_at = None;
    // The reference is recomputed from the starting weights if its file is lost.
    fs::remove_file(sandbox.path("parts/reference.json")).unwrap();
    let resumed = sandbox.run("train --resume parts --local").await.ok();
    assert!(resumed.out.contains("held-out accuracy 1.00"), "{}", resumed.out);
    assert_eq!(steps(&sandbox, "parts"), whole);
    let reference = |folder: &str| fs::read(sandbox.path(folder).join("reference.json")).unwrap();
    assert_eq!(reference("whole"), reference("parts"));
}

#[tokio::test]
async fn invalid_pairs_and_options_are_rejected() {
    let sandbox = sandbox();
    sandbox.write(
        "bad.jsonl",
        "{\"prompt\": \"a\", \"chosen\": \"b\"}\n\
         {\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"b\"}\n\
         {\"chosen\": \"b\", \"rejected\": \"c\"}\n",
    );
    sandbox
        .run("train bad.jsonl --local --method dpo")
        .await
        .fails(2, &["3 invalid lines", "bad.jsonl:1: ", "are equal", "needs a \"prompt\"", "hint"]);
    let wrong = sandbox.run("train pairs.jsonl --local --beta 0.1").await;
    wrong.fails(2, &["--beta applies to --method dpo only"]);
    let plan = sandbox.run(&format!("{DPO} --dry-run --json")).await.ok().json();
    assert_eq!((&plan["examples"], &plan["settings"]["beta"]), (&json!(12), &json!(0.2)));
}

/// Runs the `--local` commands of the guide in order, with its files.
#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_guide_work() {
    let sandbox = Sandbox::new();
    sandbox.write("pairs.jsonl", &block("docs/dpo.md", "json", 0));
    run_guide(&sandbox, "docs/dpo.md").await;
}

/// With arbitrary labels there is nothing to learn: the accuracy on held-out pairs stays near 0.5.
#[tokio::test]
async fn random_preferences_do_not_carry_over() {
    let sandbox = Sandbox::new();
    let animals = ["cow", "dog", "cat", "hen", "pig", "fox", "bee", "owl", "ant", "elk"];
    let sounds = ["moo", "woof", "meow", "cluck", "oink", "yip", "buzz", "hoot", "tap", "bugle"];
    // Every pair compares two answers of the same form; a hash of its index decides which is
    // chosen.
    let line = |at: usize| {
        let answer = |sound: &str| format!(" says \"{sound}\".");
        let one = answer(sounds[at % 10]);
        let two = answer(sounds[(at / 10 + at + 1) % 10]);
        let heads = (at.wrapping_mul(0x9E37_79B9) >> 7).is_multiple_of(2);
        let (chosen, rejected) = if heads { (one, two) } else { (two, one) };
        let prompt = format!("Animal {at}: the {}", animals[(at * 7) % 10]);
        json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected }).to_string() + "\n"
    };
    sandbox.write("pairs.jsonl", &(0..80).map(line).collect::<String>());
    let line = "train pairs.jsonl --local --method dpo --steps 20 --batch-size 8 --eval-split 0.5 \
                --learning-rate 3e-4 --json";
    let report = sandbox.run(line).await.ok().json();
    let accuracy = report["eval_metrics_last"]["accuracy"].as_f64().unwrap();
    assert!((0.3..=0.7).contains(&accuracy), "{accuracy}");
    let loss = report["eval_loss"]["last"].as_f64().unwrap();
    assert!(loss > 0.6, "{loss}");
}
