//! Runs the programs of this package against embedded servers.

#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod servers;

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;

use servers::TestServer;

/// Returns the command that runs a program with the server of the test.
fn program(executable: &str, server: &TestServer) -> Command {
    let mut command = Command::new(executable);
    command
        .env("TINKER_BASE_URL", server.url())
        .env("TINKER_API_KEY", "tml-test")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Runs a program to its end and returns the lines that it prints.
async fn run(mut command: Command) -> Vec<String> {
    let output = command.output().await.unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{command:?}: {}\n{printed}{errors}", output.status);
    printed.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_killed_fine_tuning_run_resumes_with_the_losses_of_one_that_was_not_killed() {
    let server = TestServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    let sft = |file: &str| {
        let mut command = program(env!("CARGO_BIN_EXE_sft_resume"), &server);
        command.arg(folder.path().join(file));
        command
    };
    let whole = run(sft("whole.json")).await;
    assert_eq!((&*whole[0], whole.len()), ("starting at step 0", 42));
    assert_eq!(whole[41], "all 4 answers are right");

    // Kill the program after a step that follows the second checkpoint.
    let mut child = sft("killed.json").spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while let Some(line) = lines.next_line().await.unwrap() {
        if line.starts_with("step 24:") {
            break;
        }
    }
    child.kill().await.unwrap();
    let resumed = run(sft("killed.json")).await;
    assert_eq!(resumed[0], "starting at step 20");
    assert_eq!(resumed[1..], whole[21..]);
}

#[tokio::test]
async fn group_relative_advantages_raise_the_reward() {
    let server = TestServer::start().await;
    // The program fails if the reward does not rise.
    let lines = run(program(env!("CARGO_BIN_EXE_grpo"), &server)).await;
    assert_eq!(lines.len(), 16);
}

#[tokio::test]
async fn three_keys_get_the_same_samples_from_two_servers() {
    let servers = [TestServer::start().await, TestServer::start().await];
    let mut command = program(env!("CARGO_BIN_EXE_load"), &servers[0]);
    command.args(["--samples", "50"]).args(["--key", "tml-a", "--key", "tml-b", "--key", "tml-c"]);
    for server in &servers {
        command.args(["--server", &*server.url()]);
    }
    // The program fails if a sample is lost, or differs between keys or servers.
    let lines = run(command).await;
    assert_eq!(lines.len(), 7);
    assert!(lines[6].starts_with("300 samples, "), "{}", lines[6]);
}

/// Sends a request to the streaming service, and returns the status line and the body.
async fn post(address: &str, body: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let head = format!(
        "POST /complete HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

#[tokio::test]
async fn a_web_service_streams_the_text_of_a_completion() {
    let server = TestServer::start().await;
    let mut command = program(env!("CARGO_BIN_EXE_streaming_service"), &server);
    let mut child = command.arg("127.0.0.1:0").spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap().expect("the service prints its address");
    let address = line.strip_prefix("listening on http://").unwrap();

    let (status, body) =
        post(address, r#"{"prompt": "The cow says", "max_tokens": 6, "seed": 3}"#).await;
    assert_eq!(status, "HTTP/1.1 200 OK");
    let events: Vec<serde_json::Value> = body
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    assert_eq!(events.len(), 6, "{body}");
    let text: String = events.iter().map(|event| event["text"].as_str().unwrap()).collect();
    assert_eq!(text, server.complete("The cow says", 6, 3).await);
    assert!(events[5]["stop_reason"].is_string(), "{body}");

    let (status, body) = post(address, r#"{"prompt": "The cow says", "max_tokens": 0}"#).await;
    assert_eq!(status, "HTTP/1.1 400 Bad Request", "{body}");
    child.kill().await.unwrap();
}
