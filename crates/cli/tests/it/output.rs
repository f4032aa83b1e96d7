//! Output of commands: curves, colors, raw values, samples and event files of a training run.

use crate::sandbox::{Sandbox, lines};
use crate::train::TRAIN;

fn sandbox() -> Sandbox {
    crate::train::sandbox()
}

/// Returns the events of an event file of TensorBoard: the bytes of each.
fn events(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut events = Vec::new();
    let mut rest = bytes;
    while let Some((length, after)) = rest.split_first_chunk::<8>() {
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap();
        events.push(after[4..4 + length].to_vec());
        rest = &after[4 + length + 4..];
    }
    events
}

fn contains(event: &[u8], text: &str) -> bool {
    event.windows(text.len()).any(|part| part == text.as_bytes())
}

#[tokio::test]
async fn answers_and_event_files_of_a_run_survive_a_resumption() {
    let mut sandbox = sandbox();
    sandbox.write(
        "prompts.jsonl",
        "{\"prompt\": \"4 and\"}\n\
         {\"messages\": [{\"role\": \"user\", \"content\": \"What comes after 5?\"}]}\n",
    );
    let options = "--sample-prompts prompts.jsonl --sample-every 4 --log-to tensorboard";
    let whole = sandbox.run(&format!("{TRAIN} {options} --dir whole")).await.ok();
    assert!(whole.err.contains("step 4: What comes after 5? → "), "{}", whole.err);
    let samples = lines(&sandbox.path("whole/samples.jsonl"));
    let steps: Vec<_> = samples.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 0, 4, 4, 8, 8], "before, during and after");
    assert_eq!(samples[1]["prompt"], "What comes after 5?");

    sandbox.interrupt_at = Some(("step 2/8", 1));
    sandbox.run(&format!("{TRAIN} {options} --dir parts")).await.fails(130, &["--resume"]);
    sandbox.interrupt_at = None;
    let resumed = sandbox.run("train --resume parts --local --json").await.ok().json();
    assert!(resumed["samples"].as_str().unwrap().ends_with("samples.jsonl"), "{resumed}");
    assert_eq!(lines(&sandbox.path("parts/samples.jsonl")), samples);

    for folder in ["whole", "parts"] {
        let path = sandbox.path(folder).join("events.out.tfevents.tinkex");
        let events = events(&std::fs::read(path).unwrap());
        assert!(contains(&events[0], "brain.Event:2"), "{folder}");
        let count = |tag| events.iter().filter(|event| contains(event, tag)).count();
        assert_eq!(count("train/loss"), 8, "{folder}");
        assert_eq!(count("train/learning_rate"), 8, "{folder}");
        assert!(count("eval/loss") >= 2, "{folder}");
    }
    let wrong = sandbox.run(&format!("{TRAIN} --sample-every 4")).await;
    wrong.fails(2, &["--sample-prompts"]);
    let missing = sandbox.run(&format!("{TRAIN} --sample-prompts none.jsonl")).await;
    missing.fails(1, &["none.jsonl"]);
    let stdin = sandbox.run(&format!("{TRAIN} --sample-prompts -")).await;
    stdin.fails(1, &["prompts file", "Pass the path of a JSON Lines file."]);
}

#[tokio::test]
async fn csv_has_raw_values_and_json_has_plain_tokens() {
    let sandbox = sandbox();
    sandbox.run("train data.jsonl --local --steps 1 -q").await.ok();
    let runs = sandbox.run("run list --local --format csv --columns id,updated").await.ok().out;
    let time = runs.lines().nth(1).unwrap().split(',').nth(1).unwrap();
    assert!(time.starts_with("20") && time.contains('T'), "{runs}");
    let list = "checkpoint list --local --format csv --columns id,size,expires";
    let checkpoints = sandbox.run(list).await.ok().out;
    let cells: Vec<_> = checkpoints.lines().nth(1).unwrap().split(',').collect();
    assert!(cells[1].parse::<u64>().is_ok_and(|bytes| bytes > 1024), "{checkpoints}");
    assert_eq!(cells[2], "", "a checkpoint that never expires");

    let args = ["tokenizer", "encode", "tinkex/tiny", "say \"hi\"", "--json"];
    let pieces = sandbox.run_args(args).await.ok().json()["pieces"].clone();
    let text: String = pieces.as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    assert_eq!(text, "say \"hi\"");
    let args = ["logprobs", "--local", "--prompt", "The cat", "--json"];
    let tokens = sandbox.run_args(args).await.ok().json()["tokens"].clone();
    let texts = tokens.as_array().unwrap().iter().map(|one| one["text"].as_str().unwrap());
    assert_eq!(texts.collect::<String>(), "The cat");
    let args = ["logprobs", "--local", "--prompt", "The cat", "--format", "csv"];
    let csv = sandbox.run_args(args).await.ok().out;
    let first = csv.lines().nth(1).unwrap();
    assert!(first.ends_with(',') && !csv.contains('"'), "{csv}");
}

#[tokio::test]
async fn errors_and_help_are_colored_on_request_only() {
    let sandbox = Sandbox::new();
    let error = sandbox.run("--color always eval tinkex/tiny none.jsonl --local").await;
    assert!(error.err.starts_with("\u{1b}[1;31merror:\u{1b}[0m cannot read"), "{}", error.err);
    let usage = sandbox.run("run lst --color=always").await.fails(2, &["\u{1b}[1;31merror:"]);
    assert!(usage.err.contains("\u{1b}[1mUsage:\u{1b}[0m tinkex run"), "{}", usage.err);
    let help = sandbox.run("--color always train --help").await.ok().out;
    assert!(help.contains("\u{1b}[1mExamples:\u{1b}[0m\n"), "{help}");
    for line in ["eval tinkex/tiny none.jsonl --local", "run lst", "train --help"] {
        let plain = sandbox.run(line).await;
        assert!(!format!("{}{}", plain.out, plain.err).contains('\u{1b}'), "{line}");
    }
}

/// Runs the program in a terminal of 72 columns.
#[cfg(unix)]
#[test]
fn a_terminal_gets_a_curve_and_lines_that_fit() {
    use crate::terminal::Terminal;

    let sandbox = sandbox();
    let mut terminal = Terminal::start_in(&sandbox, 72, TRAIN);
    terminal.wait_for("loss per token by step; o = held out");
    terminal.wait_for("┤");
    terminal.wait_for("└──");
    terminal.wait_for("Trained 8 steps");
    let mut terminal = Terminal::start_in(&sandbox, 72, "run list --local");
    terminal.wait_for("Last Update");
    terminal.wait_for("…");
    let mut terminal = Terminal::start_in(&sandbox, 72, "eval tinkex/tiny none.jsonl --local");
    terminal.wait_for("\u{1b}[1;31merror:\u{1b}[0m cannot read evaluation file");
}
