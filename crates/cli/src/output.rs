//! [`Shell`]: results on standard output, everything else on standard error.

use serde::Serialize;
use tinkex::ServiceClient;

use crate::args::{Format, Globals};
use crate::failure::{Exit, Failure};
use crate::settings::Settings;
use crate::table::{Style, Table};
use crate::world::World;

/// The world as a command sees it, and how it was told to speak.
pub(crate) struct Shell<'w> {
    pub(crate) world: &'w mut World,
    pub(crate) globals: Globals,
    pub(crate) settings: Settings,
    style: Style,
}

impl<'w> Shell<'w> {
    pub(crate) fn new(world: &'w mut World, globals: Globals, settings: Settings) -> Self {
        let style = Style { colours: settings.colours, width: world.terminals.out };
        Self { style, world, globals, settings }
    }

    /// From now on tables are as wide as they like, whatever the terminal.
    pub(crate) fn widen(&mut self) {
        self.style.width = None;
    }

    /// A client as the flags and the environment want it.
    #[expect(clippy::unused_async, reason = "a local server may have to start first")]
    pub(crate) async fn client(&self) -> Result<ServiceClient, Failure> {
        self.settings.client(self.world)
    }

    /// A result that people read as a table.
    pub(crate) fn table(&mut self, table: &Table, json: &impl Serialize) -> Result<(), Failure> {
        let text = match self.settings.format {
            Format::Json => document(json)?,
            Format::Table => table.render(self.style),
            Format::Csv => table.csv(),
            Format::Plain => table.plain(),
        };
        self.write(&text)
    }

    /// A result that people read as text.
    pub(crate) fn text(&mut self, text: &str, json: &impl Serialize) -> Result<(), Failure> {
        let text = match self.settings.format {
            Format::Json => document(json)?,
            Format::Table | Format::Csv | Format::Plain => format!("{text}\n"),
        };
        self.write(&text)
    }

    /// That something was done: a line on standard error for people, a document for programs.
    pub(crate) fn done(&mut self, text: &str, json: &impl Serialize) -> Result<(), Failure> {
        if self.is_json() {
            return self.write(&document(json)?);
        }
        self.notice(text);
        Ok(())
    }

    /// A line for people that is no result. Not with `--quiet`, nor beside a document.
    pub(crate) fn notice(&mut self, text: &str) {
        if !self.globals.quiet && !self.is_json() {
            let _ = writeln!(self.world.err, "{text}");
        }
    }

    /// Whether results are for a program that reads one document.
    pub(crate) fn is_json(&self) -> bool {
        self.settings.format == Format::Json
    }

    /// How wide progress may be, where somebody watches.
    pub(crate) fn progress_width(&self) -> Option<usize> {
        let wanted = !self.globals.quiet && !self.globals.no_progress;
        self.world.terminals.err.filter(|_| wanted)
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

pub(crate) fn document(json: &impl Serialize) -> Result<String, Failure> {
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
