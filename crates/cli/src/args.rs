//! What can be typed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as Group, Parser, ValueEnum};
use tinkex::BaseUrl;

use crate::commands::Command;

/// Fine-tune and sample language models through the Tinker API.
#[derive(Debug, Parser)]
#[command(
    name = "tinkex",
    version,
    arg_required_else_help = true,
    infer_long_args = false,
    after_help = "Examples:
  tinkex run list --limit 5             the newest runs
  tinkex run list --json                for a program

Exit codes: 0 done, 1 failed, 2 usage, 3 credentials, 4 not found, 5 try again later."
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) globals: Globals,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command understands, before or after its name.
#[derive(Clone, Debug, Group)]
pub(crate) struct Globals {
    /// How results are written
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table, help_heading = "Global options")]
    format: Format,
    /// The same as --format json
    #[arg(long, global = true, conflicts_with = "format", help_heading = "Global options")]
    json: bool,
    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t = Colour::Auto, value_name = "WHEN", help_heading = "Global options")]
    pub(crate) color: Colour,
    /// The same as --color never
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) no_color: bool,
    /// Only results and errors
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// No progress bars; they are only ever shown on a terminal
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) no_progress: bool,
    /// The server; without it TINKER_BASE_URL, or the hosted service
    #[arg(long, global = true, value_name = "URL", help_heading = "Global options")]
    pub(crate) base_url: Option<BaseUrl>,
    /// The server on this machine, which needs no key: the one that runs, or one for this command
    #[arg(long, global = true, conflicts_with_all = ["base_url", "api_key", "api_key_file"], help_heading = "Global options")]
    pub(crate) local: bool,
    /// A file that holds the API key
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// The API key. Others on this machine can see it: prefer the file, or TINKER_API_KEY
    #[arg(long, global = true, value_name = "KEY", conflicts_with = "api_key_file", hide = true)]
    pub(crate) api_key: Option<String>,
    /// How long to go on after failures that pass, such as 90s or 5m; 0 tries once
    #[arg(long, global = true, value_name = "TIME", value_parser = duration, default_value = "60s", help_heading = "Global options")]
    pub(crate) retry_for: Duration,
}

impl Globals {
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { self.format }
    }
}

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A table for people
    Table,
    /// One document for programs
    Json,
    /// Values with commas
    Csv,
    /// Values with tabs, without headers
    Plain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Colour {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    Always,
    Never,
}

/// Which part of a list.
#[derive(Clone, Copy, Debug, Group)]
pub(crate) struct Page {
    /// How many at most; 0 for all
    #[arg(long, value_name = "N", default_value_t = 20, allow_negative_numbers = true)]
    limit: i64,
    /// How many to skip
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) offset: u64,
}

impl Page {
    /// How many at most; all if `None`.
    pub(crate) fn limit(&self) -> Option<u64> {
        u64::try_from(self.limit).ok().filter(|limit| *limit > 0)
    }
}

/// A time such as `90s`, `5m`, `1h`, `250ms`; a bare number is seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let wrong = || "give a time such as 90s, 5m or 1h".to_owned();
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit.trim() {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// Whether a command line that could not be understood wants its errors as a document.
pub(crate) fn wants_json(line: &[OsString]) -> bool {
    let words: Vec<_> = line.iter().filter_map(|word| word.to_str()).collect();
    words.iter().any(|word| matches!(*word, "--json" | "--format=json" | "-fjson" | "-f=json"))
        || words.windows(2).any(|pair| matches!(pair, ["-f" | "--format", "json"]))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definitions_agree_with_each_other() {
        Args::command().debug_assert();
    }

    #[test]
    fn times_have_units() {
        for (text, seconds) in [("0", 0.0), ("90s", 90.0), ("1.5m", 90.0), ("250ms", 0.25)] {
            assert_eq!(duration(text).unwrap(), Duration::from_secs_f64(seconds));
        }
        for wrong in ["", "s", "5 weeks", "-1s", "1e999"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
