//! [`Sandbox`]: runs commands in process, with their own folders, streams and local server.

use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tempfile::TempDir;
use tinkex::Env;
use tinkex_cli::{Environment, Input, Interrupt, LogScope, Terminals};

use crate::sink::Sink;

/// Temporary folder in which commands run: home, working directory and data of the local server.
pub(crate) struct Sandbox {
    folder: Arc<TempDir>,
    pub(crate) input: String,
    /// Presses Ctrl-C this many times once standard error contains the text.
    pub(crate) interrupt_at: Option<(&'static str, u32)>,
    /// Calls the function once standard error contains the text.
    pub(crate) on_stderr: Option<StderrHook>,
    /// `TINKER_API_KEY`, unset by default.
    pub(crate) key: Option<&'static str>,
    /// Ctrl-C signal to use, so that the test can press it.
    pub(crate) interrupt: Option<Interrupt>,
}

type StderrHook = (&'static str, Arc<dyn Fn() + Send + Sync>);

/// Exit code and output of a command.
pub(crate) struct CommandOutput {
    pub(crate) code: u8,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let folder = Arc::new(TempDir::new().unwrap());
        Self {
            folder,
            input: String::new(),
            interrupt_at: None,
            on_stderr: None,
            key: None,
            interrupt: None,
        }
    }

    /// Creates a sandbox with the same folder and default settings.
    pub(crate) fn share_folder(&self) -> Self {
        Self { folder: Arc::clone(&self.folder), ..Self::new() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path("data")
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Returns the environment variables of a command in this sandbox.
    pub(crate) fn variables(&self) -> Vec<(&'static str, String)> {
        let folder = self.folder.path().to_str().unwrap().to_owned();
        let data = self.data().to_str().unwrap().to_owned();
        let mut variables = vec![("HOME", folder), ("TINKEX_DATA_DIR", data)];
        variables.extend(self.key.map(|key| ("TINKER_API_KEY", key.to_owned())));
        variables
    }

    /// Runs a command whose arguments are separated by spaces.
    pub(crate) async fn run(&self, line: &str) -> CommandOutput {
        self.run_args(line.split_whitespace()).await
    }

    /// Runs a command.
    pub(crate) async fn run_args(&self, args: impl IntoIterator<Item = &str>) -> CommandOutput {
        let out = Sink::default();
        let err = Sink::default();
        let interrupt = self.interrupt.clone().unwrap_or_default();
        let watcher = StderrWatcher {
            sink: err.clone(),
            interrupt: interrupt.clone(),
            interrupt_at: self.interrupt_at,
            on_stderr: self.on_stderr.clone(),
        };
        let variables = self.variables();
        let pairs = variables.iter().map(|(name, value)| (*name, value.as_str()));
        let mut environment = Environment {
            variables: Env::from_pairs(pairs),
            folder: self.folder.path().to_owned(),
            out: Box::new(out.clone()),
            err: Box::new(watcher),
            input: Input::new(Cursor::new(self.input.clone())),
            terminals: Terminals::default(),
            interrupt,
            log_scope: LogScope::ThisThread,
            prepare: Box::new(|client| client),
        };
        let line = std::iter::once("tinkex").chain(args).map(Into::into).collect();
        let exit = tinkex_cli::run(&mut environment, line).await;
        drop(environment);
        CommandOutput { code: exit.code(), out: out.text(), err: err.text() }
    }
}

impl CommandOutput {
    /// Asserts that the command succeeded.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}\n{}", self.out, self.err);
        self
    }

    /// Asserts that the command ended with `code` and that standard error contains all of `messages`.
    #[track_caller]
    pub(crate) fn fails(self, code: u8, messages: &[&str]) -> Self {
        assert_eq!(self.code, code, "{}\n{}", self.out, self.err);
        for text in messages {
            assert!(self.err.contains(text), "no {text:?} in {}", self.err);
        }
        self
    }

    /// Parses standard output.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }
}

/// Standard error that triggers actions when a text appears.
struct StderrWatcher {
    sink: Sink,
    interrupt: Interrupt,
    interrupt_at: Option<(&'static str, u32)>,
    on_stderr: Option<StderrHook>,
}

impl Write for StderrWatcher {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.sink.write(bytes)?;
        let text = self.sink.text();
        if let Some((_, times)) = self.interrupt_at.take_if(|(trigger, _)| text.contains(*trigger))
        {
            (0..times).for_each(|_| self.interrupt.press());
        }
        if let Some((_, then)) = self.on_stderr.take_if(|(trigger, _)| text.contains(*trigger)) {
            then();
        }
        Ok(written)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Parses a JSON Lines file.
pub(crate) fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
