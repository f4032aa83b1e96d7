//! Replays the recorded commands of the Python CLI and compares requests, tables, files and errors.

use std::collections::BTreeSet;
use std::fs;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use futures_util::FutureExt as _;
use serde_json::Value;
use tinkex::Env;
use tinkex_cli::{Environment, Input, Interrupt, LogScope, Terminals};

use crate::capture::{self, Capture, file};
use crate::compare::{contains_all, rows};
use crate::replay_cases::{
    CASES, ExpectedDocument, ExpectedRequests, ExpectedTable, Interruption, ReplayCase,
};
use crate::scripted_server::ScriptedServer;
use crate::sink::Sink;

/// Returns whether `tty.rs` replays the recording.
pub(crate) fn is_replayed_elsewhere(capture: &Capture) -> bool {
    capture.is_terminal()
}

/// Exit code, output and requests of a replayed command.
pub(crate) struct ReplayOutput {
    pub(crate) exit: u8,
    pub(crate) out: String,
    pub(crate) err: String,
    requests: Vec<Value>,
    pub(crate) home: tempfile::TempDir,
    pub(crate) work: tempfile::TempDir,
}

/// Runs the recorded command. With `interactive`, standard input is a terminal, so prompts appear.
pub(crate) async fn run(capture: &Capture, json: bool, interactive: bool) -> ReplayOutput {
    run_as(capture, &capture.line(json), interactive).await
}

/// Runs a command that sends no request.
pub(crate) async fn run_line(line: &[String]) -> ReplayOutput {
    let version = capture::all().into_iter().find(|capture| capture.name == "version");
    run_as(&version.unwrap(), line, false).await
}

/// Runs another command in the environment of a recording.
pub(crate) async fn run_as(capture: &Capture, line: &[String], interactive: bool) -> ReplayOutput {
    let home = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    capture.prepare(home.path(), work.path());
    let env = capture.env(home.path());
    let interrupt = Interrupt::default();
    let interruption = ReplayCase::of(&capture.name).interruption;
    let interrupted_by_server = interruption == Some(Interruption::AtSlowResponse);
    let server_interrupt = interrupted_by_server.then(|| interrupt.clone());
    let server = ScriptedServer::new(&capture.replies_text(), server_interrupt);
    let out = Sink::default();
    let err = Sink::default();
    let http = server.clone();
    let (silent_input, _writer) = std::io::pipe().unwrap();
    let input = if interruption == Some(Interruption::AtPrompt) {
        interrupt.press();
        Input::new(std::io::BufReader::new(silent_input))
    } else {
        Input::new(std::io::Cursor::new(capture.stdin().to_owned()))
    };
    let mut environment = Environment {
        variables: Env::from_pairs(env.iter().map(|(name, value)| (name.as_str(), value.as_str()))),
        folder: work.path().to_owned(),
        out: Box::new(out.clone()),
        err: Box::new(err.clone()),
        input,
        terminals: Terminals { input: interactive, ..Terminals::default() },
        interrupt,
        log_scope: LogScope::ThisThread,
        prepare: Box::new(move |client| client.http(http.clone())),
    };
    let args = ["tinkex"].into_iter().chain(line.iter().skip(1).map(String::as_str));
    let line = args.map(Into::into).collect();
    // A paused clock advances while the runtime waits for another process, up to the time limit of
    // the credential command.
    let runs_command = env.iter().any(|(name, _)| name == "TINKER_CREDENTIAL_CMD");
    if runs_command {
        tokio::time::resume();
    }
    let exit = tinkex_cli::run(&mut environment, line).await.code();
    if runs_command {
        tokio::time::pause();
    }
    ReplayOutput { exit, out: out.text(), err: err.text(), requests: server.requests(), home, work }
}

/// Returns the distinct requests as text, without telemetry and heartbeats.
fn distinct_requests(requests: &[Value]) -> BTreeSet<String> {
    let relevant = |request: &&Value| {
        let path = request["path"].as_str().unwrap();
        // A download deletes the run of its export, on servers that can.
        let deletes_run = request["method"] == "DELETE" && !path.contains("/checkpoints/");
        let deletes_run = deletes_run && path.contains("/training_runs/");
        !path.ends_with("/telemetry") && !path.ends_with("/session_heartbeat") && !deletes_run
    };
    let describe = |request: &Value| {
        let text = |key: &str| match &request[key] {
            Value::Null => String::new(),
            Value::Object(map) if map.is_empty() => String::new(),
            value => value.to_string(),
        };
        // The program name in the metadata differs.
        let body = text("body").replace("tinkex checkpoint download", "tinker checkpoint download");
        let body = body.replace(r#","detail":null"#, "").replace(r#""detail":null,"#, "");
        // The model card and the encoding of a hub commit differ.
        let is_hub = request["path"].as_str().unwrap().starts_with("/api/")
            && !request["path"].as_str().unwrap().starts_with("/api/v1/");
        let body = if is_hub { String::new() } else { body };
        // The Python SDK sends this request without the `x-sdk-method` header.
        let lacks_sdk_method = request["path"] == "/api/v1/weights_info";
        let headers = if lacks_sdk_method { String::new() } else { text("headers") };
        format!("{} {} {} {body} {headers}", text("method"), text("path"), text("query"))
    };
    requests.iter().filter(relevant).map(describe).collect()
}

/// Checks the downloaded files and the credential file.
fn check_files(capture: &Capture, ours: &ReplayOutput) {
    let name = &capture.name;
    for (file, content) in capture.files_after() {
        let written = fs::read(ours.work.path().join(&file));
        let written = written.unwrap_or_else(|error| panic!("{name}: {file}: {error}"));
        match content.as_str() {
            Some(text) => {
                assert_eq!(String::from_utf8(written).unwrap().replace("\r\n", "\n"), text);
            }
            None => assert_eq!(written.len() as u64, content.as_u64().unwrap(), "{name}: {file}"),
        }
    }
    let partial_files = |folder: &Path| -> usize {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .filter(|entry| entry.as_ref().unwrap().path().to_str().unwrap().contains(".part"))
            .count()
    };
    if ours.exit == 0 {
        assert_eq!(partial_files(ours.work.path()), 0, "{name}: a partial download is left");
    }
    if let Some(expected) = capture.credentials_after() {
        let path = ours.home.path().join(".tinker/credentials.json");
        let text = fs::read_to_string(&path).unwrap();
        // Compare only the content of an unchanged file: the recording does not keep its format.
        if Some(&text) == capture.credentials_before().as_ref() {
            let parsed = |text: &str| serde_json::from_str::<Value>(text).ok();
            assert_eq!(parsed(&text), parsed(expected), "{name}: the credentials changed");
            return;
        }
        assert_eq!(text, expected, "{name}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{name}");
        }
    }
}

/// Checks the requests that the command sent.
fn check_requests(capture: &Capture, case: &ReplayCase, ours: &ReplayOutput) {
    let mut sent = distinct_requests(&ours.requests);
    let mut expected = distinct_requests(&capture.requests());
    match case.requests {
        ExpectedRequests::Recorded => {}
        ExpectedRequests::SameToTinkerApi => {
            let is_tinker_api = |request: &String| request.contains("/api/v1/");
            expected.retain(is_tinker_api);
            sent.retain(is_tinker_api);
        }
        ExpectedRequests::None => expected.clear(),
        ExpectedRequests::Unchecked => return,
    }
    let extra: Vec<_> = sent.difference(&expected).collect();
    let missing: Vec<_> = expected.difference(&sent).collect();
    assert!(
        extra.is_empty() && missing.is_empty(),
        "{}: extra: {extra:#?} missing: {missing:#?}",
        capture.name
    );
}

/// Checks that standard output is the expected table.
fn check_table(capture: &Capture, case: &ReplayCase, ours: &ReplayOutput) {
    let name = capture.name.as_str();
    let recorded = |name: &str| file(&format!("{name}.table.txt"));
    let theirs = match case.table {
        ExpectedTable::Recorded => recorded(name),
        ExpectedTable::Of(other) => Some(recorded(other).unwrap()),
        ExpectedTable::Text(text) => Some(text()),
        ExpectedTable::Nothing => {
            assert_eq!(ours.out, "", "{name}: an error goes to standard error");
            None
        }
        ExpectedTable::Unchecked => None,
    };
    if let Some(theirs) = theirs {
        let rows = rows(&ours.out, Some(ours.work.path()));
        assert_eq!(rows, result_rows(&theirs), "{name}: {}", ours.err);
    }
}

/// Checks that standard output is the expected JSON document.
fn check_document(capture: &Capture, case: &ReplayCase, ours: &ReplayOutput) {
    let name = capture.name.as_str();
    match case.document {
        ExpectedDocument::Recorded | ExpectedDocument::Any => {}
        ExpectedDocument::Nothing => {
            assert_eq!(ours.out, "", "{name}: an error goes to standard error");
            return;
        }
        ExpectedDocument::Unchecked => return,
    }
    let document: Value = serde_json::from_str(&ours.out)
        .unwrap_or_else(|error| panic!("{name}: one document: {error}: {}", ours.out));
    let recorded = file(&format!("{name}.json"));
    if let Some(theirs) = recorded.filter(|_| case.document == ExpectedDocument::Recorded) {
        let theirs = serde_json::from_str(&theirs).unwrap();
        contains_all(&document, &theirs, ours.work.path())
            .unwrap_or_else(|difference| panic!("{name}: {difference}"));
    }
}

/// Checks that the error message contains the expected texts, and the status and message of the
/// server's response.
fn check_error_message(capture: &Capture, case: &ReplayCase, ours: &ReplayOutput) {
    let name = &capture.name;
    let mut expected: Vec<String> = case.messages.iter().map(|&text| text.to_owned()).collect();
    if let Some((status, message)) = capture.error_response().filter(|_| case.has_server_message) {
        expected.push(status.to_string());
        expected.extend(message.map(|message| message.trim().to_owned()));
    }
    for text in expected {
        assert!(ours.err.contains(&text), "{name}: {text:?} is not in {}", ours.err);
    }
}

/// Checks that standard error is one JSON document with all fields of an error.
fn check_error_document(capture: &Capture, case: &ReplayCase, ours: &ReplayOutput) {
    let name = &capture.name;
    let lines: Vec<&str> = ours.err.lines().collect();
    // At a terminal, a prompt may precede the document.
    assert!(case.at_terminal || lines.len() == 1, "{name}: one document: {}", ours.err);
    let error: Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    for key in ["kind", "message", "status", "detail", "hint", "request"] {
        assert!(error["error"].get(key).is_some(), "{name}: {key}");
    }
}

/// Covers T7.1.1, T7.1.2, T7.1.3, T7.2.1.
#[tokio::test(start_paused = true)]
async fn recorded_commands_behave_like_the_python_cli() {
    let mut unused: BTreeSet<&str> = CASES.iter().map(|case| case.name).collect();
    assert_eq!(unused.len(), CASES.len(), "a name occurs twice in CASES");
    let mut printed = String::new();
    let mut failed = Vec::new();
    for capture in capture::all().iter().filter(|capture| !is_replayed_elsewhere(capture)) {
        let name = capture.name.as_str();
        let is_listed = unused.remove(name);
        assert!(is_listed || capture.exit() == 0, "{name} fails and is missing from CASES");
        for json in [false, true] {
            // Catch panics to report all failing recordings, not only the first.
            match AssertUnwindSafe(replay(capture, json)).catch_unwind().await {
                Ok(output) => printed += &output,
                Err(_) => {
                    failed.push(if json { format!("{name} --json") } else { name.to_owned() });
                }
            }
        }
    }
    assert_eq!(failed, Vec::<String>::new());
    assert_eq!(unused, BTreeSet::new(), "CASES without a recording");
    // API keys of the recordings, and the start of every token.
    let keys = ["tml-test-0000", "tml-pasted-key", "tml-bad", "tml-minted", "tml-fromcmd", "eyJ"];
    for key in keys {
        assert!(!printed.contains(key), "the secret {key} was printed");
    }
}

/// Runs one recording, checks the result, and returns everything it printed.
async fn replay(capture: &Capture, json: bool) -> String {
    let case = ReplayCase::of(&capture.name);
    let case = if json { case.with_json() } else { *case };
    let ours = run(capture, json, case.at_terminal).await;
    let ReplayOutput { exit, out, err, .. } = &ours;
    assert_eq!(*exit, case.exit, "{}: {out}{err}", capture.name);
    check_requests(capture, &case, &ours);
    if json {
        check_document(capture, &case, &ours);
    } else {
        check_table(capture, &case, &ours);
    }
    match (*exit, json) {
        (0, _) => {}
        (_, false) => check_error_message(capture, &case, &ours),
        (_, true) => check_error_document(capture, &case, &ours),
    }
    check_files(capture, &ours);
    format!("{out}{err}")
}

/// Returns the rows of the Python CLI's result, without prompts and links before it.
fn result_rows(text: &str) -> Vec<Vec<String>> {
    let result = text.rfind("[y/N]: ").map_or(text, |at| &text[at + "[y/N]: ".len()..]);
    let link = |row: &Vec<String>| row[0].starts_with("Create an API Key");
    rows(result, None).into_iter().filter(|row| !link(row)).collect()
}

#[tokio::test(start_paused = true)]
async fn confirmation_without_a_terminal_fails_and_deletes_nothing() {
    for capture in capture::all() {
        if !capture.name.starts_with("checkpoint-delete-prompt") {
            continue;
        }
        let ours = run(&capture, false, false).await;
        assert_eq!(ours.exit, 2, "{}", capture.name);
        assert!(ours.err.contains("--yes"), "{}", ours.err);
        assert!(!ours.requests.iter().any(|request| request["method"] == "DELETE"));
    }
}
