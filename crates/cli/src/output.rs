//! [`Shell`]: results on standard output, everything else on standard error.

use std::io::{self, BufRead as _, Write as _};

use serde::Serialize;
use tinkex::ServiceClient;

use crate::args::{Format, Globals};
use crate::failure::{Exit, Failure};
use crate::settings::{self, Patience};
use crate::table::{Style, Table};
use crate::world::World;

/// The world as a command sees it, and how it was told to speak.
pub(crate) struct Shell<'w> {
    pub(crate) world: &'w mut World,
    pub(crate) globals: Globals,
    format: Format,
    style: Style,
}

impl<'w> Shell<'w> {
    pub(crate) fn new(world: &'w mut World, globals: Globals) -> Self {
        let style = Style { colours: settings::colours(world, &globals), width: world.width };
        Self { format: globals.format(), style, world, globals }
    }

    /// A client as the flags and the environment want it.
    pub(crate) fn client(&self, patience: Patience) -> Result<ServiceClient, Failure> {
        settings::client(self.world, &self.globals, patience)
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

    /// Something was done that has no result: programs get a document, people a notice.
    pub(crate) fn done(&mut self, notice: &str, json: &impl Serialize) -> Result<(), Failure> {
        if self.format == Format::Json {
            return self.write(&document(json)?);
        }
        self.notice(notice);
        Ok(())
    }

    /// Writes to standard output as it is.
    pub(crate) fn write(&mut self, text: &str) -> Result<(), Failure> {
        self.world.out.write_all(text.as_bytes())?;
        Ok(self.world.out.flush()?)
    }

    /// Tells a person something that is no result.
    pub(crate) fn notice(&mut self, text: &str) {
        if !self.globals.quiet {
            // A notice that nobody can read is not worth a failure.
            let _ = writeln!(self.world.err, "{text}");
        }
    }

    /// Asks a question that needs an answer; `None` if there is none to be had.
    pub(crate) fn ask(&mut self, question: &str) -> io::Result<Option<String>> {
        write!(self.world.err, "{question}")?;
        self.world.err.flush()?;
        self.read_line()
    }

    /// A line of standard input, without its end; `None` if there is none left.
    pub(crate) fn read_line(&mut self) -> io::Result<Option<String>> {
        let mut line = String::new();
        let read = self.world.input.read_line(&mut line)?;
        Ok((read > 0).then(|| line.trim().to_owned()))
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
