//! Commands that lose the connection to their server, to the hub or to a file host.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tinkex_server::{Server, ServerOptions};

use crate::scripted_cli::ScriptedCli;
#[cfg(unix)]
use crate::serve::RestartedServer;
use crate::train::{TRAIN, losses, sandbox};

#[tokio::test]
async fn run_resumes_after_its_server_stopped() {
    let mut sandbox = sandbox();
    sandbox.run(&format!("{TRAIN} --dir whole")).await.ok();
    sandbox.key = Some("tml-any");
    let mut options = ServerOptions::new(sandbox.path("other"));
    let server = Server::start(options.clone()).await.unwrap();
    options.address = server.address();
    let url = server.base_url();
    let server = Mutex::new(Some(server));
    let runtime = tokio::runtime::Handle::current();
    let stop_server = move || {
        let server = server.lock().unwrap().take().unwrap();
        runtime.spawn(async move { server.stop().await });
    };
    sandbox.on_stderr = Some(("step 5/8", Arc::new(stop_server)));
    let line =
        TRAIN.replace("--local", &format!("--model tinkex/tiny --retry-for 0 --base-url {url}"));
    let failed = sandbox.run(&format!("{line} --dir run")).await;
    let failed = failed.fails(5, &["Resume from step 3 with: tinkex train --resume"]);

    sandbox.on_stderr = None;
    let server = start(options).await;
    // The command in the hint must work as printed.
    let hint = failed.err.split(" with: tinkex ").nth(1).unwrap().lines().next().unwrap();
    assert!(hint.ends_with(&format!(" --base-url {url}")), "{hint}");
    sandbox.run(hint).await.ok();
    assert_eq!(losses(&sandbox, "run"), losses(&sandbox, "whole"));
    server.stop().await;
}

#[tokio::test]
async fn json_error_of_a_failed_run_names_the_resume_command() {
    let mut sandbox = sandbox();
    sandbox.key = Some("tml-any");
    let server = Server::start(ServerOptions::new(sandbox.path("other"))).await.unwrap();
    let line = format!(
        "train data.jsonl --model tinkex/tiny --steps 100000 --batch-size 4 --save-every 1 \
         --retry-for 0 --json --dir run --base-url {}",
        server.base_url()
    );
    let stop_server = async {
        let saved = || std::fs::read_to_string(sandbox.path("run/run.json")).unwrap_or_default();
        while !saved().contains("step-00000") {
            tokio::task::yield_now().await;
        }
        server.stop().await;
    };
    let (failed, ()) = tokio::join!(sandbox.run(&line), stop_server);
    assert!(failed.out.is_empty(), "{}", failed.out);
    let failed = failed.fails(5, &[]);
    let document: Value = serde_json::from_str(&failed.err).unwrap();
    let text = |field: &str| document["error"][field].as_str().unwrap().to_owned();
    assert!(text("hint").contains("with: tinkex train --resume"), "{document}");
    assert!(!text("message").is_empty() && !text("kind").is_empty());
}

/// Starts a server, retrying until the previous one has released the folder.
async fn start(options: ServerOptions) -> Server {
    loop {
        match Server::start(options.clone()).await {
            Ok(server) => return server,
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

/// Kills the server while several requests are in flight, and starts it again.
#[cfg(unix)]
#[tokio::test]
async fn outage_and_recovery_are_reported_once_each() {
    let mut sandbox = sandbox();
    sandbox.key = Some("tml-any");
    let serving = RestartedServer::start(&mut sandbox, "step 5/8");
    let url = &serving.url;
    // Saving and evaluating at every step keeps several requests in flight.
    let line = TRAIN.replace("--local", &format!("--model tinkex/tiny --base-url {url}"));
    let line = line.replace("--save-every 3", "--save-every 1 --eval-every 1");
    let trained = sandbox.run(&line).await.ok();
    let count = |text: &str| trained.err.lines().filter(|line| line.contains(text)).count();
    let counts = (count("no connection to the server"), count("the server responds again"));
    assert_eq!(counts, (1, 1), "{}", trained.err);
    serving.end();
}

/// Regression: the notice was about the server, which responded.
#[tokio::test(start_paused = true)]
async fn outages_of_file_host_and_hub_name_the_host() {
    // The scripted server treats every host as unreachable at port 9.
    let urls = json!({ "urls": { "model.safetensors": "http://files.test:9/a?signature=secret" },
        "expires": "2099-01-01T00:00:00Z" });
    let path = "/api/v1/training_runs/r/checkpoints/external_weights/hf/external_weights_urls";
    let cli = ScriptedCli::new(&[("GET", path, urls)])
        .with_variable("HF_ENDPOINT", "http://hub.test:9")
        .with_variable("HF_TOKEN", "hf_token");
    for (line, warning) in [
        (
            "checkpoint download tinker://r/external_weights/hf",
            "warning: no connection to the file host (http://files.test:9); retrying",
        ),
        (
            "checkpoint push-hf tinker://r/external_weights/hf --repo me/x",
            "warning: no connection to the Hugging Face hub (http://hub.test:9); retrying",
        ),
    ] {
        let failed = cli.run(line).await;
        assert_eq!(failed.exit, 5, "{line}: {}", failed.err);
        let warnings: Vec<&str> =
            failed.err.lines().filter(|line| line.contains("no connection")).collect();
        assert_eq!(warnings, [warning], "{line}: {}", failed.err);
        assert!(!failed.err.contains("the server responds again"), "{line}: {}", failed.err);
        assert!(!failed.err.contains("secret"), "{line}: {}", failed.err);
        // With -v, every retry is announced.
        let verbose = cli.run(&format!("{line} -v")).await;
        let host = warning.split(['(', ')']).nth(1).unwrap();
        let notices = verbose.err.lines().filter(|line| line.starts_with("retrying"));
        let notices: Vec<&str> = notices.filter(|line| line.contains(host)).collect();
        assert!(!notices.is_empty(), "{line}: {}", verbose.err);
    }
}

#[tokio::test]
async fn first_contact_fails_at_once_with_address_and_reason() {
    let mut sandbox = sandbox();
    sandbox.key = Some("tml-any");
    // Bind and release a port, so that no program listens there.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = sandbox.run(&format!("run list --base-url http://{closed}")).await;
    let message = format!("error: connection to http://{closed} failed: Connection refused\n");
    let refused = refused.fails(5, &[&message, "tinkex serve"]);
    assert!(!refused.err.contains("attempts"), "{}", refused.err);

    let server = Server::start(ServerOptions::new(sandbox.path("other"))).await.unwrap();
    let address = server.address();
    let tls = sandbox.run(&format!("run list --base-url https://{address}")).await;
    let hint = format!("Use http://{address}");
    let tls = tls.fails(7, &["failed: the server speaks HTTP without TLS\n", &hint]);
    assert!(!tls.err.contains("attempts"), "{}", tls.err);
    server.stop().await;
}
