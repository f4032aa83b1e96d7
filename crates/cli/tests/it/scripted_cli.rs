//! [`ScriptedCli`]: runs commands in process against scripted responses.

use serde_json::{Value, json};
use tinkex::Env;
use tinkex_cli::{Environment, Input, Interrupt, LogScope, Terminals};

use crate::scripted_server::ScriptedServer;
use crate::sink::Sink;

/// Runs commands against a [`ScriptedServer`], with a temporary home folder.
pub(crate) struct ScriptedCli {
    pub(crate) server: ScriptedServer,
    pub(crate) home: tempfile::TempDir,
    env: Vec<(String, String)>,
    /// Pressed by the server when it receives a request whose response is delayed.
    interrupt: Interrupt,
}

/// Exit code and output of a command.
pub(crate) struct ScriptedOutput {
    pub(crate) exit: u8,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl ScriptedOutput {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap()
    }
}

impl ScriptedCli {
    /// Creates a home and a server with these responses: method and path of the request, and body
    /// of the response.
    ///
    /// Some keys of the body are instructions: `status` is the HTTP status (default 200), `page` is
    /// sent as text in place of the body, and `sleep` is the delay in seconds.
    pub(crate) fn new(responses: &[(&str, &str, Value)]) -> Self {
        let routes: Vec<Value> = responses
            .iter()
            .map(|(method, path, body)| {
                let status = body["status"].as_u64().unwrap_or(200);
                let text = body.get("page");
                let kind = if text.is_some() { "text" } else { "body" };
                json!({ "method": method, "path": path, "status": status,
                    kind: text.unwrap_or(body), "sleep": body["sleep"] })
            })
            .collect();
        let script = json!({ "base_url": "http://a.test", "replies": routes }).to_string();
        let home = tempfile::tempdir().unwrap();
        let env = [
            ("HOME", home.path().to_str().unwrap()),
            ("TINKER_BASE_URL", "http://a.test"),
            ("TINKER_API_KEY", "tml-env"),
        ];
        let env =
            env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let interrupt = Interrupt::default();
        Self { server: ScriptedServer::new(&script, Some(interrupt.clone())), home, env, interrupt }
    }

    /// Sets an environment variable.
    pub(crate) fn with_variable(mut self, name: &str, value: &str) -> Self {
        self = self.without_variable(name);
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn without_variable(mut self, name: &str) -> Self {
        self.env.retain(|(known, _)| known != name);
        self
    }

    /// Runs a command whose arguments are separated by spaces.
    pub(crate) async fn run(&self, line: &str) -> ScriptedOutput {
        let out = Sink::default();
        let err = Sink::default();
        let http = self.server.clone();
        let mut environment = Environment {
            variables: Env::from_pairs(self.env.iter().map(|(n, v)| (n.as_str(), v.as_str()))),
            folder: self.home.path().to_owned(),
            out: Box::new(out.clone()),
            err: Box::new(err.clone()),
            input: Input::new(std::io::empty()),
            terminals: Terminals::default(),
            interrupt: self.interrupt.clone(),
            log_scope: LogScope::ThisThread,
            prepare: Box::new(move |client| client.http(http.clone())),
        };
        let args = ["tinkex"].into_iter().chain(line.split_whitespace());
        let exit = tinkex_cli::run(&mut environment, args.map(Into::into).collect()).await;
        ScriptedOutput { exit: exit.code(), out: out.text(), err: err.text() }
    }

    /// Returns host and API key of the last request.
    pub(crate) fn last_request(&self) -> (String, String) {
        let requests = self.server.requests();
        let last = requests.last().unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&last["host"]), text(&last["headers"]["x-api-key"]))
    }
}
