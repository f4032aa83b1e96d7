//! What can be typed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as Group, CommandFactory as _, FromArgMatches as _, Parser, ValueEnum};
use tinkex::{BaseUrl, Env, Secret};

use crate::commands::{CliCommand, GROUPS};

/// Fine-tune and sample language models through the Tinker API.
#[derive(Debug, Parser)]
#[command(
    name = "tinkex",
    version,
    arg_required_else_help = true,
    infer_long_args = false,
    after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 credentials, 4 not found, 5 try again later,
6 partly done, 130 interrupted.

Examples:
  tinkex quickstart                     all of it in under a minute, without a key
  tinkex train talks.jsonl --local      teach the built-in model, on this machine
  tinkex chat --run RUN --local         talk to what came of it
  tinkex auth login                     store a key of the hosted service
  tinkex run list --limit 5             the newest runs
  tinkex checkpoint gc --keep-last 3    what could be freed"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) globals: Globals,
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

impl Args {
    /// All that can be typed, and help that lists the commands as somebody new needs them: the parser
    /// itself knows one list only.
    pub(crate) fn definition() -> clap::Command {
        let command = Self::command();
        let mut about: Vec<(&str, String)> = command
            .get_subcommands()
            .map(|one| (one.get_name(), one.get_about().map(ToString::to_string)))
            .map(|(name, about)| (name, about.unwrap_or_default()))
            .collect();
        about.push(("help", "This, or the help of a command".to_owned()));
        let widest = about.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let mut list = String::new();
        for (heading, names) in GROUPS {
            list += &format!("{heading}:\n");
            for name in *names {
                let about = about.iter().find(|(known, _)| known == name);
                list += &format!("  {name:widest$}  {}\n", about.map_or("", |(_, about)| about));
            }
            list.push('\n');
        }
        let template = format!(
            "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Global options:\n\
             {{options}}{{after-help}}"
        );
        command.help_template(template)
    }

    /// Reads a command line, the program's name first.
    pub(crate) fn read(line: Vec<OsString>) -> Result<Self, clap::Error> {
        let mut definition = Self::definition();
        let matches = definition.try_get_matches_from_mut(line)?;
        Self::from_arg_matches(&matches).map_err(|why| why.format(&mut definition))
    }
}

/// What every command understands, before or after its name.
#[derive(Clone, Debug, Default, Group)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Globals {
    /// How results are written: table, json, csv, or plain with tabs [env: TINKEX_FORMAT] [default:
    /// table]
    #[arg(short, long, global = true, value_enum, hide_possible_values = true)]
    pub(crate) format: Option<Format>,
    /// The same as --format json
    #[arg(long, global = true, conflicts_with = "format")]
    pub(crate) json: bool,
    /// When to use colours: auto, always or never [env: NO_COLOR, CLICOLOR_FORCE] [default: auto]
    #[arg(long, global = true, value_enum, value_name = "WHEN", hide_possible_values = true)]
    pub(crate) color: Option<ColorChoice>,
    /// The same as --color never
    #[arg(long, global = true, conflicts_with = "color")]
    pub(crate) no_color: bool,
    /// Only results and errors
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// Tell more on standard error; twice for every request [env: TINKER_LOG]
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// No progress bars; they are only ever shown on a terminal
    #[arg(long, global = true)]
    pub(crate) no_progress: bool,
    /// Settings to use, see `tinkex config` [env: TINKEX_PROFILE]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) profile: Option<String>,
    /// The server [env: TINKER_BASE_URL] [default: the hosted service]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) base_url: Option<BaseUrl>,
    /// The server on this machine, which needs no key: the one that runs, or one for this command
    #[arg(long, global = true, conflicts_with_all = ["base_url", "api_key", "api_key_file"])]
    pub(crate) local: bool,
    /// A file that holds the API key [env: TINKER_API_KEY, the key itself]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// The API key. Others on this machine can see it: prefer the file, or TINKER_API_KEY
    #[arg(long, global = true, value_name = "KEY", conflicts_with = "api_key_file", hide = true)]
    pub(crate) api_key: Option<Secret>,
    /// The project that new things belong to, or that is asked about [env: TINKER_PROJECT_ID]
    #[arg(long, global = true, value_name = "ID")]
    pub(crate) project_id: Option<String>,
    /// How long one request may take, such as 30s; a bare number is seconds [default: 60s]
    #[arg(long, global = true, value_name = "TIME", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
    /// How long to go on after failures that pass, such as 90s or 5m; 0 tries once [default: 60s]
    #[arg(long, global = true, value_name = "TIME", value_parser = duration)]
    pub(crate) retry_for: Option<Duration>,
    /// Wait until the account is settled (402) instead of giving up
    #[arg(long, global = true)]
    pub(crate) wait_for_billing: bool,
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

/// When to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    Always,
    Never,
}

/// A time such as `90s`, `5m`, `1h`, `30d`, `250ms`; a bare number is seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let wrong = || "give a time such as 90s, 5m or 1h".to_owned();
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit.trim() {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        "d" => number * 86_400.0,
        "w" => number * 604_800.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// Whether a command line that could not be understood wants its errors as a document.
pub(crate) fn wants_json(line: &[OsString], env: &Env) -> bool {
    let words: Vec<_> = line.iter().filter_map(|word| word.to_str()).collect();
    let said = words.iter().find_map(|word| word.strip_prefix("--format="));
    let pair = || words.windows(2).find(|pair| matches!(pair[0], "-f" | "--format")).map(|p| p[1]);
    words.iter().any(|word| matches!(*word, "--json" | "-fjson" | "-f=json"))
        || said.or_else(pair).or(env.get("TINKEX_FORMAT")) == Some("json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_agree_with_each_other() {
        Args::definition().debug_assert();
    }

    #[test]
    fn help_lists_every_command_once() {
        let command = Args::command();
        let mut known: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
        known.push("help");
        let listed: Vec<_> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        assert_eq!(listed.first(), Some(&"quickstart"));
        assert_eq!(listed, known, "both in the same order");
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
