//! [`Shell`]: results on standard output, everything else on standard error.

use std::pin::pin;

use futures_util::future::select;
use serde::Serialize;
use tinkex::ServiceClient;

use crate::args::{Format, Globals};
use crate::failure::{Exit, Failure};
use crate::local::Local;
use crate::settings;
use crate::table::{Style, Table};
use crate::world::World;

/// The world as a command sees it, and how it was told to speak.
pub(crate) struct Shell<'w> {
    pub(crate) world: &'w mut World,
    pub(crate) globals: Globals,
    local: Option<Local>,
    format: Format,
    style: Style,
}

impl<'w> Shell<'w> {
    pub(crate) fn new(world: &'w mut World, globals: Globals) -> Self {
        let style =
            Style { colours: settings::colours(world, &globals), width: world.terminals.out };
        Self { format: globals.format(), style, world, globals, local: None }
    }

    /// A client as the flags and the environment want it. With `--local` the server is started or
    /// found first.
    pub(crate) async fn client(&mut self) -> Result<ServiceClient, Failure> {
        if self.globals.local && self.local.is_none() {
            let local = Local::open(&self.world.env).await?;
            self.globals.base_url = Some(local.url()?);
            self.globals.api_key = Some(local.key()?);
            self.globals.api_key_file = None;
            self.local = Some(local);
        }
        settings::client(self.world, &self.globals)
    }

    /// Stops the local server, if this program runs it. Ctrl-C twice does not wait for that.
    pub(crate) async fn end(self) {
        let Some(local) = self.local else { return };
        let hurry = self.world.interrupt.clone();
        let _ = select(pin!(local.stop()), pin!(hurry.pressed(2))).await;
    }

    /// A result that people read as a table.
    pub(crate) fn table(&mut self, table: &Table, json: &impl Serialize) -> Result<(), Failure> {
        let text = match self.format {
            Format::Json => document(json)?,
            Format::Table => table.render(self.style),
            Format::Csv => table.csv(),
            Format::Plain => table.plain(),
        };
        self.write(&text)
    }

    /// A result that people read as text.
    pub(crate) fn text(&mut self, text: &str, json: &impl Serialize) -> Result<(), Failure> {
        let text = match self.format {
            Format::Json => document(json)?,
            Format::Table | Format::Csv | Format::Plain => format!("{text}\n"),
        };
        self.write(&text)
    }

    /// A line for people that is no result. Not with `--quiet`, nor beside a document.
    pub(crate) fn notice(&mut self, text: &str) {
        if !self.globals.quiet && self.format != Format::Json {
            let _ = writeln!(self.world.err, "{text}");
        }
    }

    /// Whether results are for a program that reads one document.
    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// How wide progress may be, where somebody watches.
    pub(crate) fn progress_width(&self) -> Option<usize> {
        let wanted = !self.globals.quiet && !self.globals.no_progress;
        self.world.terminals.err.filter(|_| wanted)
    }

    /// Takes away what progress left on the line.
    pub(crate) fn clear_line(&mut self) {
        if self.progress_width().is_some() {
            let _ = write!(self.world.err, "\r\u{1b}[K");
        }
    }

    /// Asks a question that is answered with yes or no; no answer is no.
    ///
    /// Where nobody can answer, it fails and names the flag that answers beforehand.
    pub(crate) async fn confirm(&mut self, question: &str, flag: &str) -> Result<bool, Failure> {
        if !self.world.terminals.input {
            return Err(Failure::usage(format!("{question} Nobody is there to answer"))
                .hint(format!("say {flag} to go ahead without a question")));
        }
        loop {
            let _ = write!(self.world.err, "{question} [y/N]: ");
            let _ = self.world.err.flush();
            let answer = self.world.input.clone().line().await?;
            match answer.unwrap_or_default().trim().to_ascii_lowercase().as_str() {
                "y" | "yes" => return Ok(true),
                "" | "n" | "no" => return Ok(false),
                _ => self.notice("say y or n"),
            }
        }
    }

    /// Writes to standard output as it is.
    pub(crate) fn write(&mut self, text: &str) -> Result<(), Failure> {
        self.world.out.write_all(text.as_bytes())?;
        Ok(self.world.out.flush()?)
    }
}

fn document(json: &impl Serialize) -> Result<String, Failure> {
    let wrong = |why| Failure::new(Exit::Failed, format!("the result cannot be written: {why}"));
    serde_json::to_string_pretty(json).map(|text| text + "\n").map_err(wrong)
}

/// Help that was asked for.
pub(crate) fn help(world: &mut World, text: &str) -> Exit {
    match world.out.write_all(text.as_bytes()).map_err(Failure::from) {
        Ok(()) => Exit::Done,
        Err(failure) => failure.exit(),
    }
}
