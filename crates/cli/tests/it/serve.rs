//! `tinkex serve`, and commands that use what it serves.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Sandbox;

/// A server that stays until it is ended.
pub(crate) struct ServeProcess {
    /// Where it is.
    pub(crate) url: String,
    child: Child,
    err: Option<ChildStderr>,
}

impl ServeProcess {
    /// Starts `tinkex serve` at sandbox, and waits until it serves.
    pub(crate) fn start(sandbox: &Sandbox, options: &[&str]) -> Self {
        let mut child = program(sandbox)
            .arg("serve")
            .args(options)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        assert!(url.starts_with("http://127.0.0.1:"), "{url}");
        let err = child.stderr.take();
        Self { url: url.trim_end().to_owned(), child, err }
    }

    /// Ends it as a system does, and gives what it said.
    pub(crate) fn end(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let mut said = String::new();
        self.err.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{said}");
        said
    }

    /// Ends it as a system does that has no memory left.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        // It has ended, unless the test failed.
        let _ = self.child.kill();
    }
}

fn program(sandbox: &Sandbox) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_tinkex"));
    program
        .current_dir(sandbox.path(""))
        .env_clear()
        .envs(sandbox.variables())
        .stdin(Stdio::null());
    program
}

const ANY_PORT: &[&str] = &["--port", "0"];
const ASK: &str = "sample --local -p The -t 0 --max-tokens 3";

#[tokio::test]
async fn a_server_tells_every_finished_job_in_one_line() {
    let sandbox = Sandbox::new();
    sandbox.write("talks.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    sandbox.run(ASK).await.ok();
    sandbox.run("train talks.jsonl --local --steps 2 --save-every 0").await.ok();
    let said = serving.end();
    let count = |start: &str| said.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(count("sample "), 1, "{said}");
    assert_eq!(count("forward_backward "), 2, "{said}");
    assert_eq!(count("optim_step "), 2, "{said}");
    assert_eq!(count("save "), 2, "{said}");
    let known = ["sample ", "forward_backward ", "optim_step ", "save ", "create_model "];
    for line in said.lines().filter(|line| known.iter().any(|start| line.starts_with(start))) {
        assert!(line.contains(" in 0.") || line.contains(" in 1."), "how long it took: {line:?}");
        assert!(!line.contains('\u{1b}') && line.len() < 160, "{line:?}");
    }
    let quiet = ServeProcess::start(&sandbox, &["--port", "0", "--quiet"]);
    sandbox.run(ASK).await.ok();
    assert_eq!(quiet.end(), "");
}

/// The requests of a sample are sent by tasks, which run on threads of their own.
#[test]
fn events_of_all_threads_are_told() {
    let sandbox = Sandbox::new();
    let ran = program(&sandbox).args(ASK.split(' ')).arg("-vv").output().unwrap();
    let said = String::from_utf8(ran.stderr).unwrap();
    for route in ["/api/v1/create_session", "/api/v1/asample", "/api/v1/retrieve_future"] {
        assert!(said.contains(route), "no {route} in {said}");
    }
    let calm = program(&sandbox).args(ASK.split(' ')).output().unwrap();
    assert_eq!(String::from_utf8(calm.stderr).unwrap(), "");
}

#[tokio::test]
async fn commands_use_the_server_that_runs_and_start_one_when_it_is_gone() {
    let sandbox = Sandbox::new();
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    let pid = format!("(process {})", serving.child.id());
    let saved = "checkpoint save --local --base-model tinkex/tiny --rank 4 --json";
    let saved = sandbox.run(saved).await.ok().json();
    let run = saved["model_id"].as_str().unwrap();
    let listed = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(listed["runs"][0]["training_run_id"], run, "both asked the same server");
    let found = sandbox.run("doctor --local").await.ok();
    assert!(found.out.contains(&pid), "{}", found.out);

    // It ends without a word and leaves its note.
    serving.kill();
    let note = sandbox.data().join("server.json");
    let stale = std::fs::read_to_string(&note).unwrap();
    let listed = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(
        listed["runs"][0]["training_run_id"], run,
        "the next server goes on with the folder"
    );
    assert!(!note.exists(), "and takes the note away");

    // A note of a server that is long gone misleads nobody, whoever listens there by now.
    std::fs::write(&note, &stale).unwrap();
    sandbox.run(ASK).await.ok();
    assert!(!note.exists());
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = serde_json::json!({
        "address": other.local_addr().unwrap(), "pid": 1, "stays": true, "key_file": null,
    });
    std::fs::write(&note, elsewhere.to_string()).unwrap();
    sandbox.run(ASK).await.ok();
    std::fs::write(&note, "no note at all").unwrap();
    sandbox.run(ASK).await.ok();
}

#[tokio::test]
async fn a_server_that_takes_another_key_says_so() {
    let sandbox = Sandbox::new();
    sandbox.write("key", "tml-0123456789abcdef0123");
    let serving = ServeProcess::start(&sandbox, &["--port", "0", "--api-key-file", "key"]);
    sandbox.run(ASK).await.ok();
    sandbox.write("key", "tml-another-0123456789abcdef");
    let refused = sandbox.run(ASK).await;
    let refused = refused.fails(3, &["does not take the key in", "hint: put its key back"]);
    assert!(!refused.err.contains("0123456789"), "{}", refused.err);
    sandbox.write("key", "");
    sandbox.run(ASK).await.fails(3, &["does not take the key in"]);
    std::fs::remove_file(sandbox.path("key")).unwrap();
    sandbox.run(ASK).await.fails(1, &["key cannot be read", "asks for the key in that file"]);
    sandbox.write("key", "tml-0123456789abcdef0123");
    sandbox.run(ASK).await.ok();
    let said = serving.end();
    assert!(said.contains("stopped; "), "{said}");
}
