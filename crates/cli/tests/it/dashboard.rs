//! `tinkex dashboard` finds the server on this machine and gets access to its dashboard; other
//! commands print its URL.

use std::io::{Read as _, Write as _};

use crate::sandbox::Sandbox;
use crate::serve::{ANY_PORT, ServeProcess};

/// Opens a URL of the page and returns the response.
fn open(url: &str) -> String {
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let request = format!("GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    String::from_utf8_lossy(&response).into_owned()
}

#[tokio::test]
async fn every_printed_url_logs_one_browser_in() {
    let sandbox = Sandbox::new();
    sandbox.run("dashboard --no-open").await.fails(4, &["no server runs", "tinkex serve"]);
    let mut serving = ServeProcess::start(&sandbox, ANY_PORT);
    let printed = serving.line_of_log("dashboard: ");
    let found = sandbox.run("dashboard --no-open --json").await.ok().json();
    assert_eq!(found["opened"], false);
    let found = found["url"].as_str().unwrap();
    assert_ne!(found, printed);
    for url in [printed.as_str(), found] {
        assert!(url.starts_with(&format!("{}/?code=", serving.url)), "{url}");
        assert!(open(url).contains("set-cookie: tinkex_session_"), "{url}");
        assert!(!open(url).contains("set-cookie"), "a code works once");
    }
    assert!(open(&format!("{}/", serving.url)).contains("<title>tinkex</title>"));
    serving.kill();
}

#[tokio::test]
async fn a_missing_run_folder_is_reported() {
    let sandbox = Sandbox::new();
    sandbox.run("ui missing --no-open").await.fails(4, &["missing", "does not exist"]);
}

#[tokio::test]
async fn run_folders_that_cannot_be_read_are_reported() {
    let mut sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("new-run")).unwrap();
    sandbox.write("new-run/run.json", "{\"version\": 2}");
    sandbox.interrupt_at = Some(("press Ctrl-C", 1));
    let shown = sandbox.run("ui --no-open").await.ok();
    assert!(shown.err.contains("it has version 2 of the run format"), "{}", shown.err);
}

#[tokio::test]
async fn commands_with_a_server_of_their_own_print_its_dashboard() {
    let mut sandbox = Sandbox::new();
    let sample = "sample --local -p The -t 0 --max-tokens 1";
    sandbox.input = "/exit\n".to_owned();
    for line in [sample, "chat --local", "quickstart --steps 1"] {
        let ran = sandbox.run(line).await.ok();
        let printed = ran.err.lines().find_map(|line| line.strip_prefix("dashboard: "));
        let url = printed.unwrap_or_else(|| panic!("{line}: {}", ran.err));
        assert!(url.starts_with("http://127.0.0.1:") && url.contains("/?code="), "{line}: {url}");
    }
    for option in ["--json", "--quiet"] {
        let ran = sandbox.run(&format!("{sample} {option}")).await.ok();
        assert_eq!(ran.err, "", "{option}");
    }
}
