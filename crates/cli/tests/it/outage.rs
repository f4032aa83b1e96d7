//! Training whose server goes away.

use std::sync::{Arc, Mutex};

use serde_json::Value;
use tinkex_server::{Server, ServerOptions};

use crate::train::{LINE, losses, sandbox};

#[tokio::test]
async fn a_run_whose_server_dies_can_be_gone_on_with() {
    let mut sandbox = sandbox();
    sandbox.run(&format!("{LINE} --dir whole")).await.ok();
    sandbox.key = Some("tml-any");
    let mut options = ServerOptions::new(sandbox.path("other"));
    let server = Server::start(options.clone()).await.unwrap();
    options.address = server.address();
    let url = server.base_url();
    let (server, runtime) = (Mutex::new(Some(server)), tokio::runtime::Handle::current());
    let leave = move || {
        let server = server.lock().unwrap().take().unwrap();
        runtime.spawn(async move { server.stop().await });
    };
    sandbox.on_stderr = Some(("step 5/8", Arc::new(leave)));
    let line =
        LINE.replace("--local", &format!("--model tinkex/tiny --retry-for 0 --base-url {url}"));
    let failed = sandbox.run(&format!("{line} --dir run")).await;
    let failed = failed.fails(5, &["go on from step 3 with: tinkex train --resume"]);

    sandbox.on_stderr = None;
    let server = start(options).await;
    // What is told can be pasted.
    let hint = failed.err.split(" with: tinkex ").nth(1).unwrap().lines().next().unwrap();
    assert!(hint.ends_with(&format!(" --base-url {url}")), "{hint}");
    sandbox.run(hint).await.ok();
    assert_eq!(losses(&sandbox, "run"), losses(&sandbox, "whole"));
    server.stop().await;
}

#[tokio::test]
async fn a_program_learns_why_a_run_ended_and_how_to_go_on() {
    let mut sandbox = sandbox();
    sandbox.key = Some("tml-any");
    let server = Server::start(ServerOptions::new(sandbox.path("other"))).await.unwrap();
    let line = format!(
        "train talks.jsonl --model tinkex/tiny --steps 100000 --batch-size 4 --save-every 1 \
         --retry-for 0 --json --dir run --base-url {}",
        server.base_url()
    );
    let leave = async {
        let saved = || std::fs::read_to_string(sandbox.path("run/run.json")).unwrap_or_default();
        while !saved().contains("step-00000") {
            tokio::task::yield_now().await;
        }
        server.stop().await;
    };
    let (failed, ()) = tokio::join!(sandbox.run(&line), leave);
    assert!(failed.out.is_empty(), "{}", failed.out);
    let failed = failed.fails(5, &[]);
    let document: Value = serde_json::from_str(&failed.err).unwrap();
    let told = |field: &str| document["error"][field].as_str().unwrap().to_owned();
    assert!(told("hint").contains("with: tinkex train --resume"), "{document}");
    assert!(!told("message").is_empty() && !told("kind").is_empty());
}

/// The folder is free once the old server has stopped.
async fn start(options: ServerOptions) -> Server {
    loop {
        match Server::start(options.clone()).await {
            Ok(server) => return server,
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

/// All that waits is lost at once, and the server is back before long.
#[cfg(unix)]
#[tokio::test]
async fn an_outage_is_told_once_and_so_is_its_end() {
    use crate::serve::ServeProcess;

    let mut sandbox = sandbox();
    sandbox.key = Some("tml-any");
    let serving = ServeProcess::start(&sandbox, &["--port", "0"]);
    let url = serving.url.clone();
    let serving = Arc::new(Mutex::new(Some(serving)));
    let (again, port) = (Arc::clone(&serving), url.rsplit(':').next().unwrap().to_owned());
    let guest = sandbox.share_folder();
    let fall = move || {
        again.lock().unwrap().take().unwrap().kill();
        let (again, port, guest) = (Arc::clone(&again), port.clone(), guest.share_folder());
        std::thread::spawn(move || {
            *again.lock().unwrap() = Some(ServeProcess::start(&guest, &["--port", &port]));
        });
    };
    sandbox.on_stderr = Some(("step 5/8", Arc::new(fall)));
    // Much that waits at the same time.
    let line = LINE.replace("--local", &format!("--model tinkex/tiny --base-url {url}"));
    let line = line.replace("--save-every 3", "--save-every 1 --eval-every 1");
    let trained = sandbox.run(&line).await.ok();
    let said = |text: &str| trained.err.lines().filter(|line| line.contains(text)).count();
    let told = (said("no connection to the server"), said("the server answers again"));
    assert_eq!(told, (1, 1), "{}", trained.err);
    let serving = serving.lock().unwrap().take().unwrap();
    serving.end();
}
