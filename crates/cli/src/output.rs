//! [`Shell`]: results on standard output, everything else on standard error.

use serde::Serialize;
use tinkex::ServiceClient;

use crate::args::{Format, Globals};
use crate::failure::{Exit, Failure};
use crate::settings;
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
    pub(crate) fn client(&self) -> Result<ServiceClient, Failure> {
        settings::client(self.world, &self.globals)
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
