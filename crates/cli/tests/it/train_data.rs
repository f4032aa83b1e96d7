//! Input of `tinkex train`: formats, compression, standard input, several files, and what is said
//! about files that cannot be used.

use std::fs;
use std::io::Write as _;

use serde_json::{Value, json};

use crate::sandbox::Sandbox;
use crate::train::{examples, losses};

/// Returns the plan of a training command.
async fn plan(sandbox: &Sandbox, files: &str) -> Value {
    sandbox.run(&format!("train {files} --local --dry-run --json")).await.ok().json()
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// The same conversations in four layouts have the same tokens.
#[tokio::test]
async fn arrays_and_compressed_files_are_read_like_json_lines() {
    let sandbox = Sandbox::new();
    let lines = examples(6);
    sandbox.write("a.jsonl", &lines);
    let list: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    sandbox.write("b.json", &serde_json::to_string_pretty(&list).unwrap());
    fs::write(sandbox.path("c.jsonl.gz"), gzip(&lines)).unwrap();
    fs::write(sandbox.path("d.jsonl.zst"), zstd::encode_all(lines.as_bytes(), 1).unwrap()).unwrap();
    let expected = plan(&sandbox, "a.jsonl").await;
    assert_eq!(expected["examples"], 6);
    for file in ["b.json", "c.jsonl.gz", "d.jsonl.zst"] {
        let plan = plan(&sandbox, file).await;
        for key in ["examples", "tokens", "tokens_learned", "longest_example"] {
            assert_eq!(plan[key], expected[key], "{file}: {key}");
        }
        assert_eq!(plan["formats"][0]["format"], "conversations", "{plan}");
    }
    let both = plan(&sandbox, "a.jsonl c.jsonl.gz").await;
    assert_eq!(both["examples"], 12);
}

/// Alpaca, ShareGPT and the native format of the same conversation have the same tokens.
#[tokio::test]
async fn formats_are_detected_and_shown_in_the_plan() {
    let sandbox = Sandbox::new();
    let same = [
        (
            "conversations",
            json!({ "messages": [{ "role": "user", "content": "Add\n\n1 2" },
            { "role": "assistant", "content": "3" }] }),
        ),
        ("alpaca", json!({ "instruction": "Add", "input": "1 2", "output": "3" })),
        (
            "sharegpt",
            json!({ "conversations": [{ "from": "human", "value": "Add\n\n1 2" },
            { "from": "gpt", "value": "3" }] }),
        ),
    ];
    let mut tokens = Vec::new();
    for (format, record) in &same {
        sandbox.write("data.jsonl", &format!("{record}\n"));
        let plan = plan(&sandbox, "data.jsonl").await;
        assert_eq!(plan["formats"][0]["format"], *format, "{plan}");
        tokens.push((plan["tokens"].clone(), plan["tokens_learned"].clone()));
    }
    assert!(tokens.iter().all(|one| *one == tokens[0]), "{tokens:?}");
    sandbox.write("text.jsonl", "{\"text\": \"abc\"}\n");
    let text = plan(&sandbox, "text.jsonl").await;
    let all = text["tokens"].as_f64();
    let learned = text["tokens_learned"].as_f64();
    assert_eq!(all, learned, "all of a text is learned");
    // Each file may have its own format.
    let shown = sandbox.run("train data.jsonl text.jsonl --local --dry-run").await.ok();
    assert!(shown.out.contains("data.jsonl: ShareGPT"), "{}", shown.out);
    assert!(shown.out.contains("text.jsonl: text"), "{}", shown.out);
}

#[tokio::test]
async fn mixed_formats_are_rejected_with_their_lines() {
    let sandbox = Sandbox::new();
    let text = "{\"text\": \"a\"}\n";
    sandbox.write("data.jsonl", &format!("{}{text}{text}{}", examples(1), examples(1)));
    let mixed = sandbox.run("train data.jsonl --local").await;
    mixed
        .fails(2, &["it mixes formats: conversations in lines 1, 4; text in lines 2, 3", "hint: "]);
}

#[tokio::test]
async fn wrong_files_are_explained() {
    let sandbox = Sandbox::new();
    let write = |bytes: &[u8]| fs::write(sandbox.path("data.jsonl"), bytes).unwrap();
    for (bytes, expected) in [
        (
            &b"{\"text\": \"caf\xE9\"}\n"[..],
            &["data.jsonl:1: not UTF-8: byte 0xE9 at column 14", "iconv -f latin1"][..],
        ),
        (
            b"{\"messages\": [{\"role\": \"human\", \"content\": \"a\"}]}",
            &["unknown role \"human\"; expected system, user"],
        ),
        (
            b"{\"question\": \"a\", \"answer\": \"b\"}",
            &["unknown format: found \"answer\", \"question\"", "Alpaca"],
        ),
        (b"{\n  \"text\": \"a\"\n}\n", &["data.jsonl:1: incomplete JSON", "JSON array"]),
        (
            b"[{\"text\": \"a\"},\n{\"txt\": \"b\"}]",
            &["data.jsonl:2: unknown format: found \"txt\""],
        ),
        (b"[{\"text\": \"a\"}", &["data.jsonl:1: the array is not closed"]),
        (
            b"{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}",
            &["a preference pair", "--method dpo"],
        ),
        (b"PAR1\0\0\0\0", &["it is a Parquet file", "pandas.read_parquet"]),
        (b"\xFF\xFE{\0", &["it is UTF-16", "iconv -f utf-16"]),
        (&gzip("{\"text\": \"a\"}\n")[..12], &["cannot read the rest of the file: ", "complete"]),
    ] {
        write(bytes);
        sandbox.run("train data.jsonl --local").await.fails(2, expected);
    }
    write(b"{\"text\": \"a\"}\n");
    let dpo = sandbox.run("train data.jsonl --local --method dpo").await;
    dpo.fails(2, &["expected \"chosen\" and \"rejected\", found text", "Omit --method dpo"]);
    let rl = sandbox.run("rl data.jsonl --local --reward exact").await;
    rl.fails(
        2,
        &["cannot read prompts file ", "expected \"prompt\" or \"messages\", found \"text\""],
    );
    let rl = sandbox.run("rl missing.jsonl --local --reward exact").await;
    rl.fails(1, &["cannot read prompts file ", "missing.jsonl: "]);
    #[cfg(unix)]
    sandbox.run("train /dev/null --local").await.fails(2, &["it is a pipe or a device", "Pass -"]);
    assert!(!sandbox.path("data-run").exists());
}

/// The examples are kept in the run folder, so that the run can be resumed.
#[tokio::test]
async fn run_on_standard_input_is_resumed_like_one_on_a_file() {
    let train = "--local --steps 6 --batch-size 2 --save-every 2 --eval-split 0.2";
    let mut sandbox = Sandbox::new();
    sandbox.write("data.jsonl", &examples(10));
    sandbox.run(&format!("train data.jsonl {train} --dir whole")).await.ok();
    sandbox.input = examples(10);
    sandbox.interrupt_at = Some(("step 3/6", 1));
    sandbox.run(&format!("train - {train}")).await.fails(130, &["--resume"]);
    sandbox.interrupt_at = None;
    sandbox.input = String::new();
    sandbox.run("train --resume stdin-run --local").await.ok();
    assert_eq!(losses(&sandbox, "stdin-run"), losses(&sandbox, "whole"));
    assert_eq!(sandbox.read("stdin-run/stdin.jsonl"), examples(10));
    sandbox.write("stdin-run/stdin.jsonl", "");
    let mut state: Value = serde_json::from_str(&sandbox.read("stdin-run/run.json")).unwrap();
    state["progress"]["finished"] = json!(false);
    sandbox.write("stdin-run/run.json", &state.to_string());
    sandbox.run("train --resume stdin-run --local").await.fails(2, &["has changed"]);

    sandbox.input = "nonsense\n".to_owned();
    sandbox.run("train - --local").await.fails(2, &["standard input:1: invalid JSON"]);
}

/// The run refers to all of its files.
#[tokio::test]
async fn run_on_several_files_is_resumed() {
    let train = "--local --steps 6 --batch-size 2 --save-every 2";
    let mut sandbox = Sandbox::new();
    sandbox.write("all.jsonl", &examples(10));
    let lines = examples(10);
    let (first, second) = lines.split_at(lines.match_indices('\n').nth(3).unwrap().0 + 1);
    sandbox.write("a.jsonl", first);
    fs::write(sandbox.path("b.jsonl.gz"), gzip(second)).unwrap();
    sandbox.run(&format!("train all.jsonl {train} --dir whole")).await.ok();
    sandbox.interrupt_at = Some(("step 3/6", 1));
    sandbox.run(&format!("train a.jsonl b.jsonl.gz {train}")).await.fails(130, &[]);
    sandbox.interrupt_at = None;
    sandbox.run("train --resume a-run --local").await.ok();
    assert_eq!(losses(&sandbox, "a-run"), losses(&sandbox, "whole"));
}

#[tokio::test]
async fn truncated_examples_are_counted_everywhere() {
    let sandbox = Sandbox::new();
    let long = json!({ "prompt": "", "completion": "a b c d e f g h ".repeat(20) });
    let short = json!({ "prompt": "", "completion": "a" });
    sandbox.write("data.jsonl", &format!("{long}\n{short}\n{long}\n"));
    let train = "train data.jsonl --local --max-tokens 16 --steps 1";
    let plan = sandbox.run(&format!("{train} --dry-run --json")).await.ok().json();
    assert_eq!(plan["truncated"], json!({ "train": 2, "eval": 0 }));
    let plan = sandbox.run(&format!("{train} --dry-run")).await.ok();
    assert!(plan.out.contains("2, to 16 tokens"), "{}", plan.out);
    let warning = "warning: 2 of 3 examples are longer than 16 tokens and truncated";
    assert!(plan.err.contains(warning), "{}", plan.err);
    let trained = sandbox.run(train).await.ok();
    assert!(trained.err.contains(warning), "{}", trained.err);
    assert!(trained.out.contains("; 2 examples truncated\n"), "{}", trained.out);
    let trained = sandbox.run(&format!("{train} --json")).await.ok().json();
    assert_eq!(trained["truncated"], json!({ "train": 2, "eval": 0 }));
}

#[tokio::test]
async fn dry_run_measures_a_step_and_computes_the_cost() {
    let sandbox = Sandbox::new();
    sandbox.write("data.jsonl", &examples(8));
    let line = "train data.jsonl --local --steps 10 --batch-size 4 --dry-run";
    let plan = sandbox.run(&format!("{line} --price 2 --json")).await.ok().json();
    let number = |pointer: &str| plan.pointer(pointer).and_then(Value::as_f64).expect(pointer);
    let step = number("/estimate/measured_step/seconds");
    assert_eq!(number("/estimate/measured_step/examples"), 4.0);
    // All examples are equally long, up to a few tokens.
    let steps = number("/estimate/seconds") / step;
    assert!((9.0..11.0).contains(&steps), "{plan}");
    let cost = number("/tokens_to_train_on") / 1e6 * 2.0;
    assert!((number("/estimate/cost_usd") - cost).abs() < 1e-12, "{plan}");
    let text = sandbox.run(line).await.ok();
    assert!(text.out.contains(" s for 4 examples, "), "{}", text.out);
    assert!(text.out.contains("none on this machine"), "{}", text.out);
    let runs = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(runs["runs"], json!([]), "a dry run leaves no run behind");
}
