//! Sampling, chat, tokenizer, quickstart and doctor commands against the local server.

use serde_json::json;

use crate::sandbox::{Sandbox, lines};

#[tokio::test]
async fn sample_prints_only_the_completion() {
    let mut sandbox = Sandbox::new();
    let line = ["sample", "--local", "--chat", "-t", "0", "-p", "What does a cow say?"];
    assert_eq!(sandbox.run_args(line).await.ok().out, "A cow says \"moo\".\n");
    sandbox.input = "What does a cow say?\n".to_owned();
    let piped = sandbox.run("sample --local --chat -t 0").await.ok();
    assert_eq!(piped.out, "A cow says \"moo\".\n");
    let written = sandbox.run("sample --local --chat -t 0 --output out.txt").await.ok();
    assert_eq!((written.out.as_str(), &*sandbox.read("out.txt")), ("", "A cow says \"moo\".\n"));
    let written = sandbox.run("sample --local --chat -t 0 --output out.json --json").await.ok();
    assert_eq!(written.json()["output"], "out.json", "standard output is a JSON document");
    assert!(sandbox.read("out.json").contains("moo"));

    let tokens = sandbox.run("tokenizer encode tinkex/tiny moo").await.ok();
    sandbox.write("tokens.json", &format!("[{}]", tokens.out.trim()));
    let line = "sample --local --prompt-file tokens.json -n 2 --max-tokens 3 --seed 1 --json";
    let sampled = sandbox.run(line).await.ok().json();
    assert_eq!(sampled["sequences"].as_array().unwrap().len(), 2);
    assert_eq!(sampled, sandbox.run(line).await.ok().json(), "a seed must be reproducible");
    sandbox.input = tokens.out;
    assert_eq!(sandbox.run("tokenizer decode tinkex/tiny").await.ok().out, "moo\n");
    let unknown = sandbox.run("tokenizer decode tinkex/tiny 999999").await.ok();
    assert!(unknown.err.contains("not in the vocabulary: 999999"), "{}", unknown.err);
}

#[tokio::test]
async fn sample_streams_the_tokens_of_the_same_completion() {
    let sandbox = Sandbox::new();
    let question = ["-p", "What does a cow say?"];
    let line = ["sample", "--local", "--chat", "-t", "0", "--stream"].into_iter().chain(question);
    let streamed = sandbox.run_args(line.clone()).await.ok();
    assert_eq!(streamed.out, "A cow says \"moo\".\n");
    let streamed = sandbox.run_args(line.chain(["--json"])).await.ok();
    let tokens: Vec<serde_json::Value> =
        streamed.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(text, "A cow says \"moo\".");
    assert_eq!(tokens.last().unwrap()["stop_reason"], "stop");
    let whole = ["sample", "--local", "--chat", "-t", "0", "--json"].into_iter().chain(question);
    let whole = sandbox.run_args(whole).await.ok().json();
    for (field, all) in [("token", "tokens"), ("logprob", "logprobs")] {
        let one: Vec<_> = tokens.iter().map(|token| token[field].clone()).collect();
        assert_eq!(json!(one), whole["sequences"][0][all]);
    }
    let invalid = sandbox.run("sample --local -p x --stream -n 2").await;
    invalid.fails(2, &["--stream", "--num-samples"]);
}

#[tokio::test]
async fn logprobs_and_tokenizer_info_print_their_results() {
    let sandbox = Sandbox::new();
    let line = ["logprobs", "--local", "--json", "-p", "The cat says \"meow\"."];
    let scored = sandbox.run_args(line).await.ok().json();
    let tokens = scored["tokens"].as_array().unwrap();
    assert_eq!(tokens[0]["logprob"], json!(null));
    let sum: f64 = tokens.iter().filter_map(|token| token["logprob"].as_f64()).sum();
    assert!((sum - scored["logprob_sum"].as_f64().unwrap()).abs() < 1e-4);
    let table = sandbox.run_args([
        "sample",
        "--local",
        "-t",
        "0",
        "--topk-logprobs",
        "2",
        "--max-tokens",
        "2",
        "-p",
        "A",
    ]);
    assert!(table.await.ok().out.contains("Most Likely"));
    let info = sandbox.run("tokenizer info tinkex/tiny --json").await.ok().json();
    assert_eq!((&info["vocab_size"], &info["has_chat_template"]), (&json!(1024), &json!(true)));
}

#[tokio::test]
async fn errors_of_sampling_commands_name_the_cause() {
    let sandbox = Sandbox::new();
    sandbox.write("data.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}");
    for line in [
        "sample some/model -p x",
        "chat some/model",
        "logprobs some/model -p x",
        "train data.jsonl --model some/model",
        "train data.jsonl",
        "run list",
        "checkpoint list",
        "model list",
    ] {
        sandbox.run(line).await.fails(3, &["API key", "hint: ", "pass --local"]);
    }
    let unknown = sandbox.run("sample --local unknown/model -p x").await;
    unknown.fails(
        4,
        &["unknown/model", "hint: List what the local server has: tinkex model list --local"],
    );
    sandbox.run("sample --local tinker://x -p x").await.fails(2, &["tinker://x"]);
    sandbox.run("sample --local --run none -p x").await.fails(4, &["none"]);
    sandbox.run("sample --local --prompt-file gone").await.fails(1, &["cannot read gone"]);
    sandbox
        .run("sample --local --tokens 1,2 --chat")
        .await
        .fails(2, &["--chat requires a text prompt"]);
    sandbox.run("sample --local").await.fails(2, &["the prompt is empty"]);
    sandbox.run("tokenizer decode tinkex/tiny 1,x").await.fails(2, &["x"]);
    sandbox.run("tokenizer info unknown/model --offline").await.fails(4, &["unknown/model"]);
}

#[tokio::test]
async fn chat_with_piped_input_answers_every_line() {
    let mut sandbox = Sandbox::new();
    sandbox.input = "What does a cow say?\n\n/save chat.jsonl\n/reset\nWhat does a dog say?\n\
                  /system Be kind.\n/model tinkex/tiny\n/help\n/quit\nnever asked\n"
        .to_owned();
    let chat = sandbox.run("chat --local -t 0").await.ok();
    assert_eq!(chat.out, "A cow says \"moo\".\nA dog says \"woof\".\n");
    assert!(chat.err.contains("(saved to chat.jsonl)") && chat.err.contains("/reset"));
    let conversation = &lines(&sandbox.path("chat.jsonl"))[0]["messages"];
    assert_eq!(conversation[1], json!({ "role": "assistant", "content": "A cow says \"moo\"." }));
    // A saved conversation is valid training data.
    sandbox.run("train chat.jsonl --local --dry-run").await.ok();
    sandbox.input = "/nonsense\n".to_owned();
    sandbox.run("chat --local").await.fails(2, &["unknown command /nonsense", "/help"]);
}

/// Runs the quickstart of the README with fewer steps.
#[tokio::test]
async fn quickstart_fine_tunes_the_model() {
    let sandbox = Sandbox::new();
    let figures = sandbox.run("quickstart --steps 45 --json").await.ok().json();
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let held_out = &figures["held_out_loss"];
    assert!(number(&held_out["after"]) * 5.0 < number(&held_out["before"]), "{held_out}");
    assert_eq!(figures["losses"].as_array().unwrap().len(), 45);
    for sample in figures["samples"].as_array().unwrap() {
        assert!(!sample["before"].as_str().unwrap().contains("matey"), "{sample}");
        assert!(sample["after"].as_str().unwrap().contains("matey"), "{sample}");
    }
    // Later commands can use the checkpoint.
    let path = figures["sampler"].as_str().unwrap();
    let line = ["sample", "--local", path, "--chat", "-t", "0", "-p", "What does a lion say?"];
    assert!(sandbox.run_args(line).await.ok().out.contains("matey"));
    let run = figures["run_id"].as_str().unwrap();
    let line = ["sample", "--local", "--run", run, "--chat", "-t", "0", "-p", "Who are you?"];
    assert!(sandbox.run_args(line).await.ok().out.contains("matey"));
    let short = sandbox.run("quickstart --steps 2").await.ok();
    assert!(short.out.contains("Training loss") && short.out.contains("tinkex serve"));
    sandbox
        .run("quickstart --base-url http://localhost:1")
        .await
        .fails(2, &["runs its own server"]);
}

#[tokio::test]
async fn doctor_reports_missing_credential_and_unreachable_server() {
    let mut sandbox = Sandbox::new();
    let verdict = |document: &serde_json::Value, what: &str| {
        let checks = document["checks"].as_array().unwrap();
        let found = checks.iter().find(|check| check["what"] == what);
        found.unwrap_or_else(|| panic!("no {what} in {document}"))["verdict"].clone()
    };
    let healthy = sandbox.run("doctor --local --json").await.ok().json();
    for what in ["version", "configuration", "credential", "server", "clock", "data folder"] {
        assert_eq!(verdict(&healthy, what), "ok", "{what}");
    }
    let keyless = sandbox.run("doctor --json").await;
    assert_eq!((keyless.code, verdict(&keyless.json(), "credential")), (1, json!("wrong")));
    sandbox.key = Some("tml-any");
    let unreachable = sandbox.run("doctor --json --base-url http://127.0.0.1:9").await;
    assert_eq!((unreachable.code, verdict(&unreachable.json(), "server")), (1, json!("wrong")));
    let table = sandbox.run("doctor --base-url http://127.0.0.1:9").await;
    assert!(table.out.contains("Check the network, the proxy and TINKER_BASE_URL"));
}
