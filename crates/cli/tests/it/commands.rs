//! Commands that the Python CLI does not have, and the precedence of settings.

use std::fs;

use serde_json::{Value, json};

use crate::scripted_cli::ScriptedCli;

fn checkpoint(name: &str, time: &str, public: bool) -> Value {
    json!({ "checkpoint_id": format!("weights/{name}"), "checkpoint_type": "training",
        "time": time, "tinker_path": format!("tinker://r/weights/{name}"), "size_bytes": 1024,
        "public": public })
}

#[tokio::test(start_paused = true)]
async fn html_error_page_is_not_printed() {
    let page = "<!DOCTYPE HTML>\n<html>\n<h1>Error response</h1>\n</html>\n";
    let page = json!({ "status": 501, "page": page });
    let cli = ScriptedCli::new(&[("GET", "/api/v1/training_runs", page)]);
    let output = cli.run("run list").await;
    let requests = cli.server.requests();
    let lists = requests.iter().filter(|request| request.to_string().contains("training_runs"));
    assert_eq!((output.exit, lists.count()), (7, 1), "a 501 is permanent: {requests:?}");
    let message = "server responded with status 501 and an HTML page\n";
    assert!(output.err.contains(message), "{}", output.err);
    assert!(
        output.err.contains("hint: Check that http://a.test is a Tinker server"),
        "{}",
        output.err
    );
    assert!(!output.err.contains("<h1>"), "{}", output.err);
}

#[tokio::test(start_paused = true)]
async fn settings_precedence_is_flag_environment_profile_stored_key() {
    let no_runs =
        json!({ "training_runs": [], "cursor": { "offset": 0, "limit": 20, "total_count": 0 } });
    let cli = ScriptedCli::new(&[("GET", "/api/v1/training_runs", no_runs)]);
    fs::create_dir_all(cli.home.path().join(".tinker")).unwrap();
    let key = |key: &str| json!({ "type": "manual", "key": key, "name": "n" });
    let store = json!({ "version": 1, "default": "1",
        "keys": { "1": key("tml-first"), "2": key("tml-second") } });
    fs::write(cli.home.path().join(".tinker/credentials.json"), store.to_string()).unwrap();
    fs::write(cli.home.path().join("key"), "tml-file\n").unwrap();
    let set = "config set --profile work";
    assert_eq!(cli.run(&format!("{set} base_url http://profile.test")).await.exit, 0);
    assert_eq!(cli.run(&format!("{set} key_id 2")).await.exit, 0);

    let expect = async |cli: &ScriptedCli, line: &str, host: &str, key: &str| {
        let output = cli.run(line).await;
        assert_eq!(output.exit, 0, "{line}: {}", output.err);
        assert_eq!(cli.last_request(), (host.to_owned(), key.to_owned()), "{line}");
    };
    let flags = "run list --profile work --base-url http://flag.test --api-key-file key";
    expect(&cli, flags, "flag.test", "tml-file").await;
    expect(&cli, "run list --api-key tml-flag", "a.test", "tml-flag").await;
    expect(&cli, "run list --profile work", "a.test", "tml-env").await;
    let cli = cli.without_variable("TINKER_BASE_URL").without_variable("TINKER_API_KEY");
    expect(&cli, "run list --profile work", "profile.test", "tml-second").await;
    expect(&cli, "run list --base-url http://b.test", "b.test", "tml-first").await;
    assert_eq!(cli.run("config set profile work").await.exit, 0);
    expect(&cli, "run list", "profile.test", "tml-second").await;

    assert_eq!(cli.run("auth use 2").await.exit, 0);
    let listed = cli.run("auth list --json").await;
    assert_eq!(listed.json()["keys"][1]["default"], true);
    assert!(!listed.out.contains("tml-"), "{}", listed.out);
    for wrong in ["auth use 9", "auth logout 9"] {
        assert_eq!(cli.run(wrong).await.exit, 4, "{wrong}");
    }
    assert_eq!(cli.run("run list --profile nope").await.exit, 2);
    assert_eq!(cli.run("config unset base_url").await.exit, 0);
    assert_eq!(cli.run("config get base_url").await.exit, 4);
}

/// Regression: the message did not say which of several keys was meant.
#[tokio::test(start_paused = true)]
async fn invalid_api_key_is_reported_with_its_source() {
    let cli = ScriptedCli::new(&[]);
    fs::write(cli.home.path().join("key"), "sk-file\n").unwrap();
    fs::create_dir_all(cli.home.path().join(".tinker")).unwrap();
    let stored = json!({ "version": 1, "default": "1",
        "keys": { "1": { "type": "manual", "key": "sk-stored", "name": "n" } } });
    fs::write(cli.home.path().join(".tinker/credentials.json"), stored.to_string()).unwrap();
    let expect = async |cli: &ScriptedCli, line: &str, source: &str| {
        let output = cli.run(line).await;
        assert_eq!(output.exit, 3, "{line}: {}", output.err);
        let message = format!("{source}: API key does not start with tml-\n");
        assert!(output.err.contains(&message), "{line}: {}", output.err);
        assert!(!output.err.contains("sk-"), "{line}: {}", output.err);
    };
    expect(&cli, "run list --api-key-file key", "error: API key file key").await;
    expect(&cli, "run list --api-key sk-flag", "error: --api-key").await;
    let cli = cli.with_variable("TINKER_API_KEY", "sk-env");
    expect(&cli, "run list", "error: TINKER_API_KEY").await;
    let cli = cli.without_variable("TINKER_API_KEY");
    expect(&cli, "run list", "credentials.json").await;
    assert_eq!(cli.run("config set --profile work key_id 1").await.exit, 0);
    expect(&cli, "run list --profile work", "error: stored key \"1\"").await;
}

#[tokio::test(start_paused = true)]
async fn an_empty_api_key_option_does_not_select_another_key() {
    let cli = ScriptedCli::new(&[]).with_variable("TINKER_API_KEY", "tml-another");
    fs::write(cli.home.path().join("key"), "\n").unwrap();
    for (line, message) in [
        ("run list --api-key-file key", "error: API key file key is empty"),
        ("run list --api-key=", "error: --api-key is empty"),
    ] {
        let output = cli.run(line).await;
        assert_eq!(output.exit, 3, "{line}: {}", output.err);
        assert!(output.err.contains(message), "{line}: {}", output.err);
    }
    assert!(cli.server.requests().is_empty());
}

#[tokio::test(start_paused = true)]
async fn checkpoint_gc_lists_and_deletes_old_checkpoints() {
    let path = "/api/v1/training_runs/r/checkpoints";
    let list = json!({ "checkpoints": [
        checkpoint("1", "2024-01-01T00:00:00Z", false),
        checkpoint("2", "2024-01-02T00:00:00Z", true),
        checkpoint("3", "2024-01-03T00:00:00Z", false),
        checkpoint("4", "2024-01-04T00:00:00Z", false),
    ]});
    let first = format!("{path}/weights/1");
    let third = format!("{path}/weights/3");
    let cli = ScriptedCli::new(&[
        ("GET", path, list),
        ("DELETE", &first, json!({})),
        ("DELETE", &third, json!({})),
    ]);
    let deletes = |cli: &ScriptedCli| {
        cli.server.requests().iter().filter(|request| request["method"] == "DELETE").count()
    };
    let output = cli.run("checkpoint gc --run-id r --json").await;
    assert_eq!(output.json()["freed_bytes"], 2048);
    assert_eq!(output.json()["paths"], json!(["tinker://r/weights/1", "tinker://r/weights/3"]));
    assert_eq!(
        cli.run("checkpoint gc --run-id r --delete").await.exit,
        2,
        "deletion needs confirmation"
    );
    let dry = cli.run("checkpoint delete --run-id r --before 2024-01-02 --dry-run").await;
    assert!(dry.out.contains("1 checkpoint(s) would be deleted, 1.0 KB in total"), "{}", dry.out);
    assert_eq!(deletes(&cli), 0, "a dry run deleted checkpoints");
    let output = cli.run("checkpoint gc --run-id r --delete --yes --json").await;
    assert_eq!((output.exit, &output.json()["deleted_count"]), (0, &json!(2)), "{}", output.err);
    assert_eq!(deletes(&cli), 2);
}

#[tokio::test(start_paused = true)]
async fn failed_deletions_are_reported_once_and_as_an_error() {
    let path = |name: &str| format!("/api/v1/training_runs/r/checkpoints/weights/{name}");
    let cli = ScriptedCli::new(&[("DELETE", &path("1"), json!({}))]);
    let run = async |line: &str| cli.run(&format!("checkpoint delete --yes {line}")).await;
    let output = run("tinker://r/weights/1 tinker://r/weights/1 --json").await;
    assert_eq!((output.exit, &output.json()["deleted_count"]), (0, &json!(1)), "{}", output.err);
    let deletes = cli.server.requests().into_iter().filter(|request| request["method"] == "DELETE");
    assert_eq!(deletes.count(), 1, "a path given twice is deleted once");

    let output = run("tinker://r/weights/1 tinker://r/weights/2 --json").await;
    let error: Value = serde_json::from_str(&output.err).unwrap();
    assert_eq!(
        (output.exit, &output.json()["failed"][0]["tinker_path"]),
        (6, &json!("tinker://r/weights/2"))
    );
    assert_eq!(error["error"]["status"], 404, "{error}");
    for json in ["", "--json"] {
        let output = run(&format!("tinker://r/weights/2 tinker://r/weights/3 {json}")).await;
        assert_eq!((output.exit, &*output.out), (4, ""), "without a deletion there is no result");
        assert_eq!(
            output.err.contains("\n  - tinker://r/weights/3: "),
            json.is_empty(),
            "{}",
            output.err
        );
    }
}

#[tokio::test(start_paused = true)]
async fn interrupted_deletion_reports_what_was_deleted() {
    let path = |at: u32| format!("/api/v1/training_runs/r/checkpoints/weights/{at}");
    let paths: Vec<String> = (0..40).map(path).collect();
    // The response to the first deletion is slow; the user presses Ctrl-C meanwhile.
    let response = |at: usize| if at == 0 { json!({ "sleep": 1.0 }) } else { json!({}) };
    let replies =
        paths.iter().enumerate().map(|(at, path)| ("DELETE", path.as_str(), response(at)));
    let replies: Vec<_> = replies.collect();
    let cli = ScriptedCli::new(&replies);
    let named: String = (0..40).map(|at| format!(" tinker://r/weights/{at}")).collect();
    let output = cli.run(&format!("checkpoint delete --yes --json{named}")).await;
    assert_eq!(output.exit, 130, "{}", output.err);
    let document = output.json();
    let count = |key: &str| document[key].as_array().unwrap().len();
    let deleted = count("deleted");
    let remaining = count("not_deleted");
    assert!(deleted + remaining == 40 && remaining > 0, "{document}");
    assert!(
        output.out.contains("tinker://r/weights/0\""),
        "the deletion in flight is missing: {document}"
    );
    let deletes = cli.server.requests().into_iter().filter(|request| request["method"] == "DELETE");
    assert_eq!(deletes.count(), deleted, "an unreported deletion was sent");
    assert!(output.err.contains(&format!("{remaining} of 40")), "{}", output.err);
}

#[tokio::test(start_paused = true)]
async fn invalid_arguments_are_rejected_before_any_request() {
    let cli = ScriptedCli::new(&[]);
    let details = json!({ "org_details": { "name": "o" }, "user_details": { "email": "e" } });
    let generated =
        json!({ "type": "generated", "key": "tml-made", "name": "n", "details": details });
    let store = json!({ "version": 1, "keys": { "7": generated } }).to_string();
    let file = cli.home.path().join(".tinker/credentials.json");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, &store).unwrap();
    for (line, message) in [
        ("sample m -p x --max-tokens 0", "--max-tokens"),
        ("sample m -p x --num-samples 0", "--num-samples"),
        ("sample m -p x --top-p 3", "at most 1"),
        ("sample m -p x --temperature -1", "at least 0"),
        ("checkpoint set-ttl tinker://r/weights/1 --ttl -5", "such as 90s"),
        ("auth login --local", "is found automatically"),
        ("auth logout 7 --local", "is found automatically"),
    ] {
        let output = cli.run(line).await;
        assert_eq!(output.exit, 2, "{line}: {}", output.err);
        assert!(output.err.contains(message), "{line}: {}", output.err);
    }
    let cli = cli.with_variable("TINKER_BASE_URL", "localhost:80");
    let output = cli.run("run list").await;
    assert_eq!(output.exit, 2, "{}", output.err);
    assert!(output.err.contains("TINKER_BASE_URL"), "{}", output.err);
    // Regression: the advice was to set an API key.
    let output = cli.run("doctor").await;
    assert_eq!(output.exit, 1, "{}", output.out);
    assert!(output.out.contains("error    configuration  TINKER_BASE_URL: "), "{}", output.out);
    assert!(!output.out.contains("TINKER_API_KEY"), "{}", output.out);
    assert!(cli.server.requests().is_empty());
    assert_eq!(fs::read_to_string(file).unwrap(), store);
}

#[tokio::test(start_paused = true)]
async fn session_model_audit_and_copy_commands_print_their_results() {
    let session = json!({ "session_id": "s-1", "created_at": "2024-01-01T00:00:00Z",
        "owner": "me", "project_id": "p-1", "status": { "type": "active" },
        "checkpoints_count": 2, "display_name": "nightly", "checkpoint_storage_bytes": 2048 });
    let cli = ScriptedCli::new(&[
        ("GET", "/api/v1/sessions", json!({ "sessions": ["s-1", "s-2"] })),
        (
            "GET",
            "/api/v1/sessions/s-1",
            json!({ "training_run_ids": ["r-1"], "sampler_ids": [],
            "user_metadata": { "seed": "7" } }),
        ),
        ("POST", "/api/v1/sessions/search", json!({ "sessions": [session] })),
        ("PUT", "/api/v1/sessions/s-1/project", json!({})),
        (
            "GET",
            "/api/v1/get_server_capabilities",
            json!({ "supported_models": [
            { "model_name": "Qwen/Qwen3-8B", "max_context_length": 32768 }] }),
        ),
        (
            "GET",
            "/api/v1/audit",
            json!({ "entries": [
            { "timestamp": "2026-07-13T00:00:00Z", "event": "checkpoint.deleted",
              "tinker_path": "tinker://r/weights/1" }] }),
        ),
        ("POST", "/api/v1/copy_weights", json!({ "tinker_path": "tinker://c/weights/1" })),
    ]);
    for (line, expected) in [
        ("session list", &["2 sessions", "s-2"][..]),
        ("session info s-1", &["r-1", "- seed"]),
        ("session search --status active --metadata a=2", &["s-1", "Active", "2.0 KB", "nightly"]),
        ("model info qwen/qwen3-8b", &["32768"]),
        ("audit log --day 2026-07-13", &["checkpoint.deleted", "tinker://r/weights/1"]),
        ("checkpoint copy tinker://r/weights/1 --project-id p-2", &["tinker://c/weights/1"]),
    ] {
        let output = cli.run(line).await;
        assert_eq!(output.exit, 0, "{line}: {}", output.err);
        for text in expected {
            assert!(output.out.contains(text), "{line}: {text} is not in {}", output.out);
        }
        let output = cli.run(&format!("{line} --json")).await;
        assert!(output.json().is_object(), "{line}");
    }
    let moved = cli.run("session assign-project s-1 p-2 --json").await;
    assert_eq!(moved.json(), json!({ "session_id": "s-1", "project_id": "p-2" }), "{}", moved.err);
    for (line, exit) in [
        ("model info qwen3", 4),
        ("audit log --day monday", 2),
        ("session search --metadata x", 2),
        ("checkpoint urls tinker://r/weights/1", 2),
        ("run list --sort nope", 2),
    ] {
        assert_eq!(cli.run(line).await.exit, exit, "{line}");
    }
}

#[tokio::test(start_paused = true)]
async fn lists_are_sorted_and_limited_to_the_given_columns() {
    let list = json!({ "checkpoints": [
        checkpoint("b", "2024-01-01T00:00:00Z", false),
        checkpoint("a", "2024-01-02T00:00:00Z", false),
    ], "cursor": { "offset": 0, "limit": 20, "total_count": 2 }});
    let cli = ScriptedCli::new(&[("GET", "/api/v1/checkpoints", list)]);
    for (line, expected) in [
        ("--sort id", "weights/a\t1.0 KB\nweights/b\t1.0 KB\n"),
        ("--sort -created", "weights/a\t1.0 KB\nweights/b\t1.0 KB\n"),
        ("--sort created", "weights/b\t1.0 KB\nweights/a\t1.0 KB\n"),
    ] {
        let line = format!("checkpoint list --columns id,size --format plain {line}");
        assert_eq!(cli.run(&line).await.out, expected, "{line}");
    }
    let cli = cli.with_variable("TINKEX_FORMAT", "json");
    assert_eq!(cli.run("checkpoint list").await.json()["shown"], 2);
    let wrong = cli.with_variable("TINKEX_FORMAT", "xml").run("checkpoint list").await;
    assert_eq!(wrong.exit, 2, "{}", wrong.err);
}

#[cfg(unix)]
#[test]
fn shell_completion_offers_listed_ids() {
    use std::process::{Command, Stdio};
    let replies = crate::capture::file("run-list.reply.json").unwrap();
    let home = tempfile::tempdir().unwrap();
    let server = crate::tcp_server::TcpServer::start(&replies, None);
    let url = server.url();
    let run = |line: &[&str], env: &[(&str, &str)]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tinkex"))
            .args(line)
            .env_clear()
            .envs([
                ("HOME", home.path().to_str().unwrap()),
                ("TINKER_BASE_URL", &url),
                ("TINKER_API_KEY", "tml-test-0000"),
            ])
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success(), "{line:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    run(&["run", "list"], &[]);
    let complete = |words: &[&str]| {
        let index = (words.len() - 1).to_string();
        let line: Vec<&str> = ["--"].into_iter().chain(words.iter().copied()).collect();
        run(
            &line,
            &[
                ("COMPLETE", "bash"),
                ("_CLAP_COMPLETE_INDEX", &index),
                ("_CLAP_COMPLETE_COMP_TYPE", "9"),
                ("_CLAP_COMPLETE_SPACE", "true"),
                ("_CLAP_IFS", "\n"),
            ],
        )
    };
    let offered = complete(&["tinkex", "run", "info", ""]);
    assert!(offered.contains("run-1") && offered.contains("run-3"), "{offered}");
    assert!(complete(&["tinkex", "che"]).contains("checkpoint"));
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(run(&["completions", shell], &[]).contains("COMPLETE"), "{shell}");
    }
    // Bash passes words that it split at colons, and replaces only the part behind the last one.
    let script = "source <(tinkex completions bash)\n\
         COMP_LINE='tinkex checkpoint info tinker://ru' COMP_POINT=34 COMP_TYPE=9\n\
         COMP_WORDS=(tinkex checkpoint info tinker : //ru) COMP_CWORD=5\n\
         _tinkex_complete; printf '%s ' \"${COMPREPLY[@]}\"\n\
         COMP_LINE='tinkex run info run' COMP_POINT=19\n\
         COMP_WORDS=(tinkex run info run) COMP_CWORD=3\n\
         _tinkex_complete; printf '%s ' \"${COMPREPLY[@]}\"";
    let list = "{\"lists\":[{\"kind\":\"checkpoint\",\"written\":99999999999,\
                \"ids\":[\"tinker://run-1/weights/a\"]},{\"kind\":\"run\",\
                \"written\":99999999999,\"ids\":[\"run-1\",\"run-3\"]}]}";
    let cache = home.path().join(".cache/tinkex/ids.json");
    assert!(cache.exists());
    std::fs::write(cache, list).unwrap();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_tinkex")).parent().unwrap();
    let output = Command::new("bash")
        .args(["-c", script])
        .env("PATH", format!("{}:/usr/bin:/bin", program.display()))
        .env("HOME", home.path())
        .output()
        .unwrap();
    let offered = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        offered,
        "//run-1/weights/a run-1 run-3 ",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(run(&["man"], &[]).contains(".TH tinkex 1"));
    let dir = home.path().join("man");
    run(&["man", "--dir", dir.to_str().unwrap()], &[]);
    assert!(dir.join("tinkex-checkpoint-gc.1").exists());
}
