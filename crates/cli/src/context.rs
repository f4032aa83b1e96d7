//! [`CommandContext`]: settings, client and output of a running command.

use std::io::Write as _;
use std::path::Path;
use std::pin::pin;

use futures_util::future::select;
use parking_lot::Mutex;
use serde::Serialize;
use tinkex::{BaseUrl, ServiceClient};

use crate::args::{Globals, OutputFormat};
use crate::console::Console;
use crate::environment::Environment;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::local::LocalServer;
use crate::local_models::model_path;
use crate::output::{hyperlink, to_json};
use crate::settings::CommandSettings;
use crate::style::Style;
use crate::table::Table;

/// Context of a running command: its environment, its settings, and the local server it uses.
pub(crate) struct CommandContext<'e> {
    pub(crate) environment: &'e mut Environment,
    pub(crate) globals: Globals,
    pub(crate) settings: CommandSettings,
    console: Console,
    local: Option<LocalServer>,
    style: Style,
}

impl<'e> CommandContext<'e> {
    pub(crate) fn new(
        environment: &'e mut Environment,
        console: Console,
        globals: Globals,
        settings: CommandSettings,
    ) -> Self {
        let style = Style { colors: settings.colors, width: environment.terminals.out };
        Self { style, environment, console, globals, settings, local: None }
    }

    /// Prints tables without truncating cells to the width of the terminal.
    pub(crate) fn widen(&mut self) {
        self.style.width = None;
    }

    /// Returns the colors and the width of results.
    pub(crate) fn style(&self) -> Style {
        self.style
    }

    /// Builds a client from the settings. With `--local`, finds or starts the server first.
    pub(crate) async fn client(&mut self) -> Result<ServiceClient, CommandError> {
        self.start_local().await?;
        self.settings.client(self.environment)
    }

    /// Returns the flags with which another command line uses the same server, each preceded by a
    /// space. Omits `--api-key`: a secret must not be printed.
    pub(crate) fn server_flags(&self) -> String {
        let globals = &self.globals;
        let mut flags = String::new();
        let mut add =
            |flag: &str, value: &str| flags += &format!(" {flag} {}", format::shell_quote(value));
        if let Some(profile) = &globals.profile {
            add("--profile", profile);
        }
        if let Some(project) = &globals.project_id {
            add("--project-id", project);
        }
        if self.settings.local {
            return flags + " --local";
        }
        if let Some(url) = &globals.base_url {
            add("--base-url", url.as_str());
        }
        if let Some(file) = &globals.api_key_file {
            add("--api-key-file", &self.environment.path(file).display().to_string());
        }
        flags
    }

    /// Returns the name under which the local server serves the model folder or GGUF file `text`, or
    /// `None` if `text` is the name of a model. Call it before [`client`](Self::client): it starts
    /// the server with the model.
    pub(crate) async fn serve_model(&mut self, text: &str) -> Result<Option<String>, CommandError> {
        let is_hosted = self.settings.server(self.environment) == BaseUrl::production().to_string();
        if !self.settings.local && !is_hosted {
            // Some servers, such as SkyRL, name their models by paths.
            return Ok(None);
        }
        let Some(path) = model_path(self.environment, text)? else { return Ok(None) };
        if !self.settings.local {
            let message = format!("{text} is a model on this machine, not of the hosted service");
            return Err(CommandError::usage(message).hint(
                "Pass --local to use the server on this machine, or the name of a model of the \
                 service (see `tinkex model list`).",
            ));
        }
        self.start_local_with(Some(&path)).await?;
        self.local.as_ref().map(|local| local.model_name(&path)).transpose()
    }

    /// Finds or starts the server on this machine, if the settings ask for it.
    pub(crate) async fn start_local(&mut self) -> Result<(), CommandError> {
        self.start_local_with(None).await
    }

    async fn start_local_with(&mut self, model: Option<&Path>) -> Result<(), CommandError> {
        if self.settings.local && self.local.is_none() {
            // Boxed: every command contains this future.
            let local = Box::pin(LocalServer::open(&self.environment.variables, model)).await?;
            self.settings.use_server(local.url()?, local.key()?);
            self.local = Some(local);
        }
        Ok(())
    }

    /// Prints the URL of the dashboard, if this process runs the server.
    pub(crate) fn announce_dashboard(&mut self) {
        if let Some(url) = self.local.as_ref().and_then(LocalServer::dashboard_url) {
            let dim = self.settings.redraws;
            let (start, end) = if dim { ("\u{1b}[2m", "\u{1b}[0m") } else { ("", "") };
            self.styled_notice(&format!("{start}dashboard: {url}{end}"));
        }
    }

    /// Stops the local server, if this process runs it. A second Ctrl-C skips the wait.
    pub(crate) async fn close(self) {
        let Some(local) = self.local else { return };
        // Tasks that still use the server would log connection errors.
        self.console.close_log();
        let interrupt = self.environment.interrupt.clone();
        let _ = select(pin!(local.stop()), pin!(interrupt.pressed(2))).await;
    }

    /// Prints a result in the chosen format: the table, or the JSON document.
    pub(crate) fn table(
        &mut self,
        table: &Table,
        json: &impl Serialize,
    ) -> Result<(), CommandError> {
        let text = match self.settings.format {
            OutputFormat::Json => to_json(json)?,
            OutputFormat::Table => table.render(self.style),
            OutputFormat::Csv => table.csv(),
            OutputFormat::Plain => table.plain(),
        };
        self.write(&text)
    }

    /// Prints a result: the text, or with `--json` the JSON document. Terminal controls in the text
    /// are escaped if standard output is a terminal.
    pub(crate) fn text(&mut self, text: &str, json: &impl Serialize) -> Result<(), CommandError> {
        if self.is_json() {
            return self.write(&to_json(json)?);
        }
        self.write_text(&format!("{text}\n"))
    }

    /// Prints a result like [`text`](Self::text), from text with escape sequences of this program.
    /// The caller has escaped the parts that are not its own.
    pub(crate) fn styled_text(
        &mut self,
        text: &str,
        json: &impl Serialize,
    ) -> Result<(), CommandError> {
        if self.is_json() {
            return self.write(&to_json(json)?);
        }
        self.write(&format!("{text}\n"))
    }

    /// Confirms a change: a notice on standard error, or a JSON document on standard output.
    pub(crate) fn confirm_change(
        &mut self,
        text: &str,
        json: &impl Serialize,
    ) -> Result<(), CommandError> {
        if self.is_json() {
            return self.write(&to_json(json)?);
        }
        self.notice(text);
        Ok(())
    }

    /// Prints a line on standard error, unless `--quiet` or `--json` is given. Terminal controls are
    /// escaped.
    pub(crate) fn notice(&mut self, text: &str) {
        self.styled_notice(&format::escape_controls_in_lines(text));
    }

    /// Prints a line like [`notice`](Self::notice), from text with escape sequences of this program.
    fn styled_notice(&mut self, text: &str) {
        if !self.globals.quiet && !self.is_json() {
            let text = self.console.style().message(text);
            self.styled_prompt(&format!("{text}\n"));
        }
    }

    /// Returns whether the result is one JSON document.
    pub(crate) fn is_json(&self) -> bool {
        self.settings.format == OutputFormat::Json
    }

    /// Returns the width for progress bars, or `None` if none are shown.
    pub(crate) fn progress_width(&self) -> Option<usize> {
        let wanted = !self.globals.quiet && !self.globals.no_progress && self.settings.redraws;
        self.environment.terminals.err.filter(|_| wanted)
    }

    pub(crate) fn console(&self) -> &Console {
        &self.console
    }

    /// Asks a yes-or-no question. An empty line means no.
    ///
    /// # Errors
    ///
    /// Returns a usage error that names `flag` if standard input is not a terminal, and an error if
    /// the input ends.
    pub(crate) async fn confirm(
        &mut self,
        question: &str,
        flag: &str,
    ) -> Result<bool, CommandError> {
        if !self.environment.terminals.input {
            let message = format!("confirmation required: {question}");
            let hint = format!("Pass {flag} to confirm without a prompt.");
            return Err(CommandError::usage(message).hint(hint));
        }
        loop {
            self.prompt(&format!("{question} [y/N]: "));
            let Some(answer) = self.environment.input.clone().line().await? else {
                self.prompt("\n");
                return Err(CommandError::new(Exit::Failed, "no answer; nothing was changed"));
            };
            match answer.trim().to_ascii_lowercase().as_str() {
                "y" | "yes" => return Ok(true),
                "" | "n" | "no" => return Ok(false),
                _ => self.prompt("Answer y or n.\n"),
            }
        }
    }

    /// Writes a prompt or its explanation to standard error, even with `--quiet` or `--json`.
    /// Terminal controls are escaped.
    pub(crate) fn prompt(&mut self, text: &str) {
        self.styled_prompt(&format::escape_controls_in_lines(text));
    }

    /// Writes a prompt like [`prompt`](Self::prompt), with escape sequences of this program.
    pub(crate) fn styled_prompt(&mut self, text: &str) {
        let err = &mut self.environment.err;
        let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
    }

    /// Returns a function like [`styled_prompt`](Self::styled_prompt) that does not borrow the
    /// context.
    pub(crate) fn prompt_writer(&self) -> impl FnMut(&str) + Send + use<> {
        let mut console = self.console.clone();
        move |text| {
            let _ = console.write_all(text.as_bytes()).and_then(|()| console.flush());
        }
    }

    /// Returns a function that writes the lines of another program to standard error, each after
    /// `label`.
    pub(crate) fn line_writer(&self, label: &'static str) -> impl Fn(&str) + Send + Sync + use<> {
        let writer = Mutex::new(self.prompt_writer());
        move |line| {
            let mut write = writer.lock();
            write(&format!("{label}: {}\n", format::escape_controls(line)));
        }
    }

    /// Returns a URL for standard error, as a hyperlink if escapes are allowed there.
    pub(crate) fn link(&self, url: &str) -> String {
        hyperlink(url, self.settings.colors && self.environment.terminals.err.is_some())
    }

    /// Returns a URL for standard output, as a hyperlink if escapes are allowed there.
    pub(crate) fn link_in_result(&self, url: &str) -> String {
        hyperlink(url, self.settings.colors && self.environment.terminals.out.is_some())
    }

    /// Writes text to standard output. Terminal controls are escaped if it is a terminal; files and
    /// pipes get the text unchanged.
    pub(crate) fn write_text(&mut self, text: &str) -> Result<(), CommandError> {
        if self.environment.terminals.out.is_some() {
            self.write(&format::escape_controls_in_lines(text))
        } else {
            self.write(text)
        }
    }

    /// Writes to standard output unchanged: text of this program, or text with escaped controls.
    pub(crate) fn write(&mut self, text: &str) -> Result<(), CommandError> {
        self.environment.out.write_all(text.as_bytes())?;
        Ok(self.environment.out.flush()?)
    }
}
