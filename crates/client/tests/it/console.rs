//! The console log, in a process of its own: it is installed once per process.

use std::process::Command;

use bytes::Bytes;
use http::{Request, Response};
use tinkex::rest::ListSessions;
use tinkex::tracing::Level;
use tinkex::{Env, ErrorKind, ServiceClient};

const KEY: &str = "tml-console-secret";

/// Covers P6C.5.
#[test]
fn the_console_log_prints_the_events_of_a_request_with_durations() {
    let run = |level: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["console::logging_process", "--exact", "--ignored", "--nocapture"])
            .env("TINKER_LOG", level)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8(output.stderr).unwrap()
    };
    let log = run("debug");
    let requests: Vec<_> = log.lines().filter(|line| line.contains("request stop")).collect();
    assert_eq!(requests.len(), 3, "two for the configuration, one for the list: {log}");
    let list = requests[2];
    for part in
        ["DEBUG", "tinkex::http", "path=\"/api/v1/sessions\"", "status=200", "retry_count=0"]
    {
        assert!(list.contains(part), "{part}: {list}");
    }
    let duration = list.split("duration=").nth(1).unwrap().split(' ').next().unwrap();
    assert!(duration.parse::<f64>().is_ok_and(|seconds| seconds >= 0.0), "{duration}");
    assert!(!log.contains(KEY), "{log}");
    assert!(!log.contains("\u{1b}"), "no colors without a terminal");
    assert!(
        !run("").contains("request stop"),
        "the level of the call applies without the variable"
    );
}

#[tokio::test]
#[ignore = "run by the_console_log_prints_the_events_of_a_request_with_durations, in a process of its own"]
async fn logging_process() {
    tinkex::log_to_console(Level::WARN).unwrap();
    let second = tinkex::log_to_console(Level::WARN).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Config);
    let respond = |request: Request<Bytes>| async move {
        let body =
            if request.uri().path().ends_with("/sessions") { "{\"sessions\":[]}" } else { "{}" };
        Ok(Response::new(Bytes::from_static(body.as_bytes())))
    };
    let builder = ServiceClient::builder().env(Env::empty()).api_key(KEY).without_telemetry();
    let service = builder.base_url("http://server.test").http(respond).build().unwrap();
    service.rest().list_sessions(&ListSessions::default()).await.unwrap();
}
