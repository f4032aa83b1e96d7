//! Local server: started by a command, found by others, and refused if unsafe.

use tinkex_cli::Interrupt;
use tinkex_server::{Server, ServerOptions};

use crate::sandbox::Sandbox;

#[tokio::test]
async fn concurrent_local_commands_share_one_folder_without_a_key() {
    let sandbox = Sandbox::new();
    let (first, second) = tokio::join!(
        sandbox.run_args(["sample", "--local", "--prompt", "The cat", "-t", "0", "--json"]),
        sandbox.run_args(["sample", "--local", "--prompt", "The cat", "-t", "0", "--json"]),
    );
    let first = first.ok().json();
    let second = second.ok().json();
    assert_eq!(first["sequences"], second["sequences"]);
    assert_eq!(first["model"], "tinkex/tiny");
    assert!(!sandbox.data().join("server.json").exists(), "server.json outlived the server");
}

#[tokio::test]
async fn running_server_is_found_by_local_commands() {
    let mut sandbox = Sandbox::new();
    sandbox.interrupt = Some(Interrupt::default());
    let client = async {
        while !sandbox.data().join("server.json").exists() {
            tokio::task::yield_now().await;
        }
        let client = sandbox.share_folder();
        let sampled = client.run("sample --local -p The -t 0 --max-tokens 1").await.ok();
        assert!(!sampled.out.is_empty());
        let found = client.run("doctor --local").await.ok();
        assert!(found.out.contains(&format!("(process {})", std::process::id())), "{}", found.out);
        sandbox.interrupt.as_ref().unwrap().press();
    };
    let (served, ()) = tokio::join!(sandbox.run("serve --port 0"), client);
    let served = served.ok();
    let mut lines = served.out.lines();
    assert!(lines.next().unwrap().starts_with("http://127.0.0.1:"));
    assert_eq!(lines.next(), None);
    assert!(served.err.contains("stopped: 0 models saved, no pending requests"), "{}", served.err);
}

#[tokio::test]
async fn unsafe_serve_options_are_rejected_with_a_reason() {
    let sandbox = Sandbox::new();
    sandbox.write("short", "tml-short");
    sandbox.write("odd", "secret");
    sandbox.write("open", "tml-0123456789abcdef0123");
    for (line, message) in [
        ("serve --host 0.0.0.0 --no-key", "no API key is required"),
        ("serve --no-key --api-key-file open", "contradict each other"),
        ("serve --host 0.0.0.0 --api-key-file short", "shorter than 20 characters"),
        ("serve --api-key-file odd", "clients cannot send it"),
        ("serve --api-key-file missing", "cannot read API key file "),
        ("serve --api-key tml-secret-0123456789", "is visible to every user"),
        ("serve --local", "this command runs one"),
        ("serve --model name", "NAME=PATH"),
        ("serve --quantize q2", "expected q8, q4, NAME=q8 or NAME=q4"),
        ("serve --quantize =q8", "expected the name of a model"),
        (
            "serve --no-hub-cache --port 0 --quantize other=q8",
            "cannot quantize \"other\": no such base model; available: tinkex/tiny",
        ),
        ("serve --tokenizer folder", "expected NAME=FOLDER"),
        (
            "serve --port 0 --tokenizer a=nowhere",
            "nowhere has neither tokenizer.json nor tiktoken.model",
        ),
        ("serve --model a=b --model a=c", "duplicate model name a"),
        ("serve --port 0 --model a=nowhere", "cannot use base model \"a\": cannot read "),
    ] {
        let rejected = sandbox.run(line).await;
        assert!(matches!(rejected.code, 1 | 2 | 7), "{line}: {}", rejected.err);
        assert!(rejected.err.contains(message), "{line}: {}", rejected.err);
        assert!(rejected.out.is_empty() && !rejected.err.contains("0123456789"), "{line}");
    }
    #[cfg(unix)]
    sandbox
        .run("serve --host 0.0.0.0 --api-key-file open")
        .await
        .fails(2, &["can read", "chmod 600"]);
    let server = Server::start(ServerOptions::new(sandbox.data())).await.unwrap();
    sandbox.run("serve --port 0").await.fails(1, &["in use by another server", "--data-dir"]);
    server.stop().await;
}
