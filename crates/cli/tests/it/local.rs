use tinkex_cli::Interrupt;
use tinkex_server::{Server, ServerOptions};

use crate::sandbox::Sandbox;

#[tokio::test]
async fn local_commands_need_no_key_and_share_one_folder() {
    let sandbox = Sandbox::new();
    let (one, two) = tokio::join!(
        sandbox.run_args(["sample", "--local", "--prompt", "The cat", "-t", "0", "--json"]),
        sandbox.run_args(["sample", "--local", "--prompt", "The cat", "-t", "0", "--json"]),
    );
    let (one, two) = (one.ok().json(), two.ok().json());
    assert_eq!(one["sequences"], two["sequences"]);
    assert_eq!(one["model"], "tinkex/tiny");
    assert!(!sandbox.data().join("server.json").exists(), "the note is gone with the server");
}

#[tokio::test]
async fn a_server_that_runs_is_found() {
    let mut sandbox = Sandbox::new();
    sandbox.interrupt = Some(Interrupt::default());
    let guest = async {
        while !sandbox.data().join("server.json").exists() {
            tokio::task::yield_now().await;
        }
        let guest = sandbox.share_folder();
        let said = guest.run("sample --local -p The -t 0 --max-tokens 1").await.ok();
        assert!(!said.out.is_empty());
        let found = guest.run("doctor --local").await.ok();
        assert!(found.out.contains(&format!("(process {})", std::process::id())), "{}", found.out);
        sandbox.interrupt.as_ref().unwrap().press();
    };
    let (served, ()) = tokio::join!(sandbox.run("serve --port 0"), guest);
    let served = served.ok();
    let mut lines = served.out.lines();
    assert!(lines.next().unwrap().starts_with("http://127.0.0.1:"));
    assert_eq!(lines.next(), None);
    assert!(served.err.contains("stopped; 0 models saved, nothing waits"), "{}", served.err);
}

#[tokio::test]
async fn dangerous_servers_are_refused_with_a_reason() {
    let sandbox = Sandbox::new();
    sandbox.write("short", "tml-short");
    sandbox.write("odd", "secret");
    sandbox.write("open", "tml-0123456789abcdef0123");
    for (line, says) in [
        ("serve --host 0.0.0.0", "there is no key"),
        ("serve --host 0.0.0.0 --api-key-file short", "could guess it"),
        ("serve --api-key-file odd", "no client can send"),
        ("serve --api-key-file missing", "cannot be read"),
        ("serve --api-key tml-secret-0123456789", "can be seen by everyone"),
        ("serve --local", "this command is the server"),
        ("serve --model name", "NAME=FOLDER"),
        ("serve --model a=b --model a=c", "two folders are called a"),
        ("serve --port 0 --model a=nowhere", "a base model cannot be used"),
    ] {
        let refused = sandbox.run(line).await;
        assert!(refused.code == 1 || refused.code == 2, "{line}: {}", refused.err);
        assert!(refused.err.contains(says), "{line}: {}", refused.err);
        assert!(refused.out.is_empty() && !refused.err.contains("0123456789"), "{line}");
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
