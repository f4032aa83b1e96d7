//! `tinkex serve` as a child process, and commands that use it.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Sandbox;

/// Running `tinkex serve`. Dropping it kills the process.
pub(crate) struct ServeProcess {
    /// Base URL of the server.
    pub(crate) url: String,
    child: Child,
    err: Option<BufReader<ChildStderr>>,
}

impl ServeProcess {
    /// Starts `tinkex serve` in the sandbox and waits until it prints its URL.
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
        let is_local = ["http://127.0.0.1:", "https://"].iter().any(|start| url.starts_with(start));
        assert!(is_local, "{url}");
        let err = child.stderr.take().map(BufReader::new);
        Self { url: url.trim_end().to_owned(), child, err }
    }

    /// Returns the rest of the first line of standard error that starts with `start`.
    pub(crate) fn line_of_log(&mut self, start: &str) -> String {
        let mut lines = self.err.as_mut().unwrap().lines();
        let found = lines.find_map(|line| Some(line.unwrap().strip_prefix(start)?.to_owned()));
        found.unwrap_or_else(|| panic!("no line starts with {start:?}"))
    }

    /// Sends SIGTERM, waits for the process to end, and returns its standard error.
    pub(crate) fn end(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let mut log = String::new();
        self.err.take().unwrap().read_to_string(&mut log).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{log}");
        log
    }

    /// Sends SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        // The process has already ended unless the test failed.
        let _ = self.child.kill();
    }
}

/// `tinkex serve` without a key that is killed and started again on the same port once standard error
/// of a command contains a text.
pub(crate) struct RestartedServer {
    pub(crate) url: String,
    serving: Arc<Mutex<Option<ServeProcess>>>,
}

impl RestartedServer {
    /// Starts the server. The next command in the sandbox that prints `trigger` restarts it.
    pub(crate) fn start(sandbox: &mut Sandbox, trigger: &'static str) -> Self {
        let serving = ServeProcess::start(sandbox, &["--port", "0", "--no-key"]);
        let url = serving.url.clone();
        let serving = Arc::new(Mutex::new(Some(serving)));
        let restarted = Arc::clone(&serving);
        let port = url.rsplit(':').next().unwrap().to_owned();
        let shared = sandbox.share_folder();
        let restart = move || {
            restarted.lock().unwrap().take().unwrap().kill();
            let restarted = Arc::clone(&restarted);
            let port = port.clone();
            let shared = shared.share_folder();
            std::thread::spawn(move || {
                *restarted.lock().unwrap() =
                    Some(ServeProcess::start(&shared, &["--port", &port, "--no-key"]));
            });
        };
        sandbox.on_stderr = Some((trigger, Arc::new(restart)));
        Self { url, serving }
    }

    /// Stops the server and returns its standard error.
    pub(crate) fn end(self) -> String {
        let serving = self.serving.lock().unwrap().take().unwrap();
        serving.end()
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

pub(crate) const ANY_PORT: &[&str] = &["--port", "0"];
pub(crate) const SAMPLE: &str = "sample --local -p The -t 0 --max-tokens 3";

#[tokio::test]
async fn serve_logs_one_line_per_finished_request() {
    let sandbox = Sandbox::new();
    sandbox.write("data.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    sandbox.run(SAMPLE).await.ok();
    sandbox.run("train data.jsonl --local --steps 2 --save-every 0").await.ok();
    let log = serving.end();
    let count = |operation: &str| {
        let field = format!("operation=\"{operation}\"");
        log.lines().filter(|line| line.contains(&field)).count()
    };
    assert_eq!(count("sample"), 1, "{log}");
    assert_eq!(count("forward_backward"), 2, "{log}");
    assert_eq!(count("optim_step"), 2, "{log}");
    for line in log.lines().filter(|line| line.contains("operation=")) {
        assert!(line.contains(" INFO ") && line.contains("seconds="), "{line:?}");
        assert!(!line.contains('\u{1b}'), "{line:?}");
    }
    let quiet = ServeProcess::start(&sandbox, &["--port", "0", "--quiet"]);
    sandbox.run(SAMPLE).await.ok();
    assert_eq!(quiet.end(), "");
}

#[tokio::test]
async fn a_json_log_has_one_object_per_line() {
    let sandbox = Sandbox::new();
    let options = ["--port", "0", "--log-format", "json", "--log-level", "debug"];
    let serving = ServeProcess::start(&sandbox, &options);
    sandbox.run(SAMPLE).await.ok();
    let log = serving.end();
    let events: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let has = |field: &str, value: &str| events.iter().any(|event| event[field] == value);
    assert!(has("operation", "sample") && has("level", "INFO"), "{log}");
    assert!(events.iter().all(|event| event["timestamp"].is_string()), "{log}");
    assert!(log.contains("serving tinkex/tiny from "), "{log}");
}

/// Requests are sent by background tasks on other threads; their events must be logged too.
#[test]
fn verbose_log_includes_events_of_all_threads() {
    let sandbox = Sandbox::new();
    let ran = program(&sandbox).args(SAMPLE.split(' ')).arg("-vv").output().unwrap();
    let log = String::from_utf8(ran.stderr).unwrap();
    for route in ["/api/v1/create_session", "/api/v1/asample", "/api/v1/retrieve_future"] {
        assert!(log.contains(route), "no {route} in {log}");
    }
    let quiet = program(&sandbox).args(SAMPLE.split(' ')).output().unwrap();
    let log = String::from_utf8(quiet.stderr).unwrap();
    assert!(log.lines().all(|line| line.starts_with("dashboard: ")), "{log}");
}

#[tokio::test]
async fn local_commands_use_a_running_server_or_start_one() {
    let sandbox = Sandbox::new();
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    let pid = format!("(process {})", serving.child.id());
    let saved = "checkpoint save --local --base-model tinkex/tiny --rank 4 --json";
    let saved = sandbox.run(saved).await.ok().json();
    let run = saved["model_id"].as_str().unwrap();
    let listed = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(
        listed["runs"][0]["training_run_id"], run,
        "both commands must use the running server"
    );
    let found = sandbox.run("doctor --local").await.ok();
    assert!(found.out.contains(&pid), "{}", found.out);

    // A killed server leaves server.json behind.
    serving.kill();
    let server_file = sandbox.data().join("server.json");
    let stale = std::fs::read_to_string(&server_file).unwrap();
    let listed = sandbox.run("run list --local --json").await.ok().json();
    assert_eq!(
        listed["runs"][0]["training_run_id"], run,
        "the next server must open the same data"
    );
    assert!(!server_file.exists(), "the stale server.json was not removed");

    // A stale server.json is ignored, even if another program now listens on its port.
    std::fs::write(&server_file, &stale).unwrap();
    sandbox.run(SAMPLE).await.ok();
    assert!(!server_file.exists());
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = serde_json::json!({
        "url": format!("http://{}", other.local_addr().unwrap()),
        "address": other.local_addr().unwrap(), "pid": 1, "permanent": true, "key_file": null,
    });
    std::fs::write(&server_file, elsewhere.to_string()).unwrap();
    sandbox.run(SAMPLE).await.ok();
    std::fs::write(&server_file, "not JSON").unwrap();
    sandbox.run(SAMPLE).await.ok();
}

#[tokio::test]
async fn rejected_key_of_the_local_server_is_explained() {
    let sandbox = Sandbox::new();
    sandbox.write("key", "tml-0123456789abcdef0123");
    let serving = ServeProcess::start(&sandbox, &["--port", "0", "--api-key-file", "key"]);
    sandbox.run(SAMPLE).await.ok();
    sandbox.write("key", "tml-another-0123456789abcdef");
    let rejected = sandbox.run(SAMPLE).await;
    let rejected =
        rejected.fails(3, &["rejected the API key in", "hint: Restore the server's key"]);
    assert!(!rejected.err.contains("0123456789"), "{}", rejected.err);
    sandbox.write("key", "");
    sandbox.run(SAMPLE).await.fails(3, &["rejected the API key in"]);
    std::fs::remove_file(sandbox.path("key")).unwrap();
    sandbox.run(SAMPLE).await.fails(1, &["cannot read ", "requires the API key in it"]);
    sandbox.write("key", "tml-0123456789abcdef0123");
    sandbox.run(SAMPLE).await.ok();
    let log = serving.end();
    assert!(log.contains("stopped: "), "{log}");
}

/// Runs a printed `curl` command, or sends the same request if the program does not exist. The
/// variable `TINKER_API_KEY` has the key that the server has created, if any.
fn run_curl(sandbox: &Sandbox, line: &str) -> String {
    #[expect(clippy::disallowed_methods, reason = "the programs of the machine, not the sandbox")]
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has_curl = std::env::split_paths(&path).any(|folder| folder.join("curl").exists());
    let created = std::fs::read_to_string(sandbox.data().join("key")).ok();
    let variables = created.iter().map(|key| ("TINKER_API_KEY", key.trim()));
    if has_curl {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{line} --silent")]).current_dir(sandbox.path(""));
        shell.env_clear().envs(variables).env("PATH", path);
        String::from_utf8(shell.output().unwrap().stdout).unwrap()
    } else {
        let (url, rest) = line.strip_prefix("curl http://").unwrap().split_once(' ').unwrap();
        let (host, path) = url.split_once('/').unwrap();
        let body = rest.split(" -d ").nth(1).unwrap().trim_matches('\'').replace("'\\''", "'");
        let file = rest.split_once("$(cat ").and_then(|(_, rest)| rest.split_once(')'));
        let key = match file {
            Some((file, _)) => std::fs::read_to_string(sandbox.path(file)).unwrap(),
            None => created.unwrap_or_default(),
        };
        let request = format!(
            "POST /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\nauthorization: Bearer \
             {}\r\ncontent-length: {}\r\n\r\n{body}",
            key.trim(),
            body.len()
        );
        let mut stream = std::net::TcpStream::connect(host).unwrap();
        std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response.split("\r\n\r\n").nth(1).unwrap().to_owned()
    }
}

/// As [`run_curl`], for a response that is one JSON document.
fn run_curl_json(sandbox: &Sandbox, line: &str) -> serde_json::Value {
    let body = run_curl(sandbox, line);
    serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {line}: {body}"))
}

/// Runs the requests of the guide, with the server of the test.
#[test]
fn the_documented_requests_work() {
    let guide = include_str!("../../../../docs/inference.md");
    let (_, block) = guide.split_once("```sh\ncurl ").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    let sandbox = Sandbox::new();
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    let requests: Vec<String> = format!("curl {block}")
        .split("\n\n")
        .map(|line| line.trim().replace("http://127.0.0.1:8080", &serving.url))
        .collect();
    assert_eq!(requests.len(), 4);
    for line in requests {
        // The last line of a stream is the end; the first has the first token.
        let body = run_curl(&sandbox, &line);
        let first = body.lines().next().unwrap_or_default();
        let json: serde_json::Value =
            serde_json::from_str(first.strip_prefix("data: ").unwrap_or(first)).unwrap();
        let is_answer = ["choices", "content", "data"].iter().any(|field| json[field].is_array());
        assert!(is_answer, "{line}\n{body}");
    }
    serving.kill();
}

#[test]
fn the_printed_request_works_when_pasted() {
    let sandbox = Sandbox::new();
    let mut serving = ServeProcess::start(&sandbox, ANY_PORT);
    let urls = serving.line_of_log("base URL for OpenAI clients: ");
    assert_eq!(urls, format!("{0}/v1; for Anthropic: {0}", serving.url));
    let line = serving.line_of_log("to try it: ");
    let answer = run_curl_json(&sandbox, &line);
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
    assert!(text.contains("cow"), "{line}\n{answer}");
    serving.kill();

    sandbox.write("key", "tml-key-of-this-test\n");
    let alias = ["--port", "0", "--api-key-file", "key", "--alias", "story teller=tinkex/tiny"];
    let mut serving = ServeProcess::start(&sandbox, &alias);
    let line = serving.line_of_log("to try it: ");
    assert!(!line.contains("tml-key"), "the key is not printed: {line}");
    let answer = run_curl_json(&sandbox, &line);
    assert_eq!(answer["model"], "story teller", "{line}\n{answer}");
    assert!(answer["choices"][0]["text"].is_string(), "{answer}");
    serving.kill();
}

#[tokio::test]
async fn the_request_that_quickstart_prints_works() {
    let sandbox = Sandbox::new();
    let printed = sandbox.run("quickstart --steps 2").await.ok().out;
    let line = |start: &str| {
        let lines = printed.lines().map(str::trim);
        lines.clone().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{printed}"))
    };
    let serve = line("tinkex serve ").strip_prefix("tinkex serve ").unwrap();
    let options: Vec<&str> = serve.split(' ').chain(ANY_PORT.iter().copied()).collect();
    let serving = ServeProcess::start(&sandbox, &options);
    let request = line("curl ").replace("http://127.0.0.1:8080", &serving.url);
    let answer = run_curl_json(&sandbox, &request);
    assert_eq!(answer["model"], "pirate", "{answer}");
    assert!(answer["choices"][0]["message"]["content"].is_string(), "{answer}");
    serving.kill();
}

#[tokio::test]
async fn options_for_a_network_are_checked_and_used() {
    let sandbox = Sandbox::new();
    let missing = sandbox.run("serve --port 0 --tls-cert cert.pem").await;
    missing.fails(2, &["--tls-key"]);
    let unknown = sandbox.run("serve --port 0 --tls-cert cert.pem --tls-key key.pem").await;
    unknown.fails(1, &["cannot use TLS", "cert.pem: No such file", "hint: Pass PEM files"]);
    sandbox.run("serve --public-url tinkex.example.com").await.fails(2, &["expected a URL"]);
    sandbox.run("serve --public-url https://a.example/b").await.fails(2, &["must not have a path"]);
    sandbox.run("serve --trusted-proxy example.com").await.fails(2, &["expected an IP address"]);
    let options = ["--port", "0", "--public-url", "https://tinkex.example.com"];
    let mut serving = ServeProcess::start(&sandbox, &options);
    let dashboard = serving.line_of_log("dashboard: ");
    assert!(dashboard.starts_with("https://tinkex.example.com/?code="), "{dashboard}");
    let export = serving.line_of_log("to use it: ");
    assert!(export.contains("TINKER_BASE_URL=https://tinkex.example.com "), "{export}");
    // Commands on this machine do not need the proxy.
    sandbox.run(SAMPLE).await.ok();
    serving.end();
}

#[cfg(unix)]
#[tokio::test]
async fn the_key_of_an_upstream_must_not_be_readable_by_others() {
    use std::os::unix::fs::PermissionsExt as _;

    let sandbox = Sandbox::new();
    sandbox.write("upstream.key", "tml-of-the-upstream\n");
    let mode = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(sandbox.path("upstream.key"), permissions).unwrap();
    };
    // The upstream does not respond, which does not prevent the start.
    let upstream = "http://127.0.0.1:9";
    let line = format!("serve --port 0 --upstream {upstream} --upstream-key-file upstream.key");
    for readable in [0o644, 0o640, 0o604] {
        mode(readable);
        let failed = sandbox.run(&line).await;
        let failed =
            failed.fails(2, &["--upstream-key-file", "other users can access", "chmod 600"]);
        assert!(!failed.err.contains("of-the-upstream"), "{}", failed.err);
    }
    mode(0o600);
    let options = ["--port", "0", "--upstream", upstream, "--upstream-key-file", "upstream.key"];
    ServeProcess::start(&sandbox, &options).end();
}

/// Commands on this machine use a server with TLS by its public URL.
#[tokio::test]
async fn a_server_with_tls_is_used_by_other_commands() {
    let sandbox = Sandbox::new();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    sandbox.write("cert.pem", &made.cert.pem());
    let key = tinkex_files::AtomicWrite::new(sandbox.path("key.pem")).owner_only();
    key.write(made.signing_key.serialize_pem()).unwrap();
    // The public URL has the port, so choose a port that is free now.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let port = free.to_string();
    let url = format!("https://localhost:{port}");
    let tls = ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--public-url", &url];
    let options = [&["--port", &port][..], &tls].concat();
    let serving = ServeProcess::start(&sandbox, &options);
    assert_eq!(serving.url, url);
    // The authority of the certificate is in the environment of the process.
    let ran = |arguments: &[&str]| {
        let mut command = program(&sandbox);
        let ran = command.args(arguments).env("SSL_CERT_FILE", sandbox.path("cert.pem"));
        let output = ran.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{error}");
        String::from_utf8(output.stdout).unwrap()
    };
    let dashboard = ran(&["dashboard", "--no-open"]);
    assert!(dashboard.starts_with(&format!("{url}/?code=")), "{dashboard}");
    ran(&SAMPLE.split(' ').collect::<Vec<_>>());
    serving.end();
}
