//! [`Shell`]: results on standard output, everything else on standard error.

use std::io::Write as _;
use std::pin::pin;

use futures_util::future::select;
use serde::Serialize;
use tinkex::ServiceClient;

use crate::args::{Format, Globals};
use crate::environment::Environment;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::local::LocalServer;
use crate::log::Console;
use crate::settings::Settings;
use crate::table::{Style, Table};

/// The environment as a command sees it, and how it was told to speak.
pub(crate) struct Shell<'w> {
    pub(crate) environment: &'w mut Environment,
    pub(crate) globals: Globals,
    pub(crate) settings: Settings,
    /// Standard error, which the log writes to as well.
    err: Console,
    local: Option<LocalServer>,
    style: Style,
}

impl<'w> Shell<'w> {
    pub(crate) fn new(
        environment: &'w mut Environment,
        err: Console,
        globals: Globals,
        settings: Settings,
    ) -> Self {
        let style = Style { colours: settings.colours, width: environment.terminals.out };
        Self { style, environment, err, globals, settings, local: None }
    }

    /// From now on tables are as wide as they like, whatever the terminal.
    pub(crate) fn widen(&mut self) {
        self.style.width = None;
    }

    /// A client as the flags and the environment want it. With `--local` the server is started or
    /// found first.
    pub(crate) async fn client(&mut self) -> Result<ServiceClient, CommandError> {
        self.start_local().await?;
        self.settings.client(self.environment)
    }

    /// What another command line needs to use the same server, each flag after a space. A key among
    /// the arguments is not repeated.
    pub(crate) fn server_flags(&self) -> String {
        let globals = &self.globals;
        let mut flags = String::new();
        let mut add =
            |flag: &str, value: &str| flags += &format!(" {flag} {}", format::word(value));
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

    /// Starts or finds the server on this machine, if that is wanted.
    pub(crate) async fn start_local(&mut self) -> Result<(), CommandError> {
        if self.settings.local && self.local.is_none() {
            let local = LocalServer::open(&self.environment.variables).await?;
            self.settings.use_server(local.url()?, local.key()?);
            self.local = Some(local);
        }
        Ok(())
    }

    /// Stops the local server, if this program runs it. Ctrl-C twice does not wait for that.
    pub(crate) async fn end(self) {
        let Some(local) = self.local else { return };
        // Whoever still waits for it is left behind, and would complain that it is gone.
        self.err.close_log();
        let hurry = self.environment.interrupt.clone();
        let _ = select(pin!(local.stop()), pin!(hurry.pressed(2))).await;
    }

    /// A result that people read as a table.
    pub(crate) fn table(
        &mut self,
        table: &Table,
        json: &impl Serialize,
    ) -> Result<(), CommandError> {
        let text = match self.settings.format {
            Format::Json => document(json)?,
            Format::Table => table.render(self.style),
            Format::Csv => table.csv(),
            Format::Plain => table.plain(),
        };
        self.write(&text)
    }

    /// A result that people read as text.
    pub(crate) fn text(&mut self, text: &str, json: &impl Serialize) -> Result<(), CommandError> {
        let text = match self.settings.format {
            Format::Json => document(json)?,
            Format::Table | Format::Csv | Format::Plain => format!("{text}\n"),
        };
        self.write(&text)
    }

    /// That something was done: a line on standard error for people, a document for programs.
    pub(crate) fn done(&mut self, text: &str, json: &impl Serialize) -> Result<(), CommandError> {
        if self.is_json() {
            return self.write(&document(json)?);
        }
        self.notice(text);
        Ok(())
    }

    /// A line for people that is no result. Not with `--quiet`, nor beside a document.
    pub(crate) fn notice(&mut self, text: &str) {
        if !self.globals.quiet && !self.is_json() {
            // In one piece: a server in this program writes lines of its own.
            let _ = self.environment.err.write_all(format!("{text}\n").as_bytes());
        }
    }

    /// Whether results are for a program that reads one document.
    pub(crate) fn is_json(&self) -> bool {
        self.settings.format == Format::Json
    }

    /// How wide progress may be, where somebody watches and a line can be drawn over itself.
    pub(crate) fn progress_width(&self) -> Option<usize> {
        let wanted = !self.globals.quiet && !self.globals.no_progress && self.settings.redraws;
        self.environment.terminals.err.filter(|_| wanted)
    }

    /// Takes away what progress left on the line, if it did.
    pub(crate) fn clear_line(&self) {
        self.err.clear();
    }

    /// Asks a question that is answered with yes or no; no answer is no.
    ///
    /// Where nobody can answer, it fails and names the flag that answers beforehand.
    pub(crate) async fn confirm(
        &mut self,
        question: &str,
        flag: &str,
    ) -> Result<bool, CommandError> {
        if !self.environment.terminals.input {
            return Err(CommandError::usage(format!("{question} Nobody is there to answer"))
                .hint(format!("say {flag} to go ahead without a question")));
        }
        loop {
            self.say(&format!("{question} [y/N]: "));
            let Some(answer) = self.environment.input.clone().line().await? else {
                self.say("\n");
                return Err(CommandError::new(
                    Exit::Failed,
                    "there was no answer; nothing was done",
                ));
            };
            match answer.trim().to_ascii_lowercase().as_str() {
                "y" | "yes" => return Ok(true),
                "" | "n" | "no" => return Ok(false),
                _ => self.say("say y or n\n"),
            }
        }
    }

    /// Text on standard error as it is, whatever the format: questions and what belongs to them.
    pub(crate) fn say(&mut self, text: &str) {
        let _ = self.environment.err.write_all(text.as_bytes());
        let _ = self.environment.err.flush();
    }

    /// The same, for whoever outlives this call.
    pub(crate) fn stderr(&self) -> impl FnMut(&str) + Send + use<> {
        let mut err = self.err.clone();
        move |text| {
            let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
        }
    }

    /// An address that can be clicked, where standard error is a terminal that may be coloured.
    pub(crate) fn link(&self, url: &str) -> String {
        link(url, self.settings.colours && self.environment.terminals.err.is_some())
    }

    /// The same for standard output.
    pub(crate) fn link_in_result(&self, url: &str) -> String {
        link(url, self.settings.colours && self.environment.terminals.out.is_some())
    }

    /// Writes to standard output as it is.
    pub(crate) fn write(&mut self, text: &str) -> Result<(), CommandError> {
        self.environment.out.write_all(text.as_bytes())?;
        Ok(self.environment.out.flush()?)
    }
}

fn link(url: &str, clickable: bool) -> String {
    if clickable {
        format!("\u{1b}]8;;{url}\u{1b}\\{url}\u{1b}]8;;\u{1b}\\")
    } else {
        url.to_owned()
    }
}

pub(crate) fn document(json: &impl Serialize) -> Result<String, CommandError> {
    let wrong =
        |why| CommandError::new(Exit::Failed, format!("the result cannot be written: {why}"));
    serde_json::to_string_pretty(json).map(|text| text + "\n").map_err(wrong)
}

/// Help that was asked for.
pub(crate) fn help(environment: &mut Environment, text: &str) -> Exit {
    match environment.out.write_all(text.as_bytes()).map_err(CommandError::from) {
        Ok(()) => Exit::Success,
        Err(failure) => failure.exit(),
    }
}
