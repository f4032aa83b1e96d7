//! Arguments of the command line: the global options and their values.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args as ArgGroup, CommandFactory as _, FromArgMatches as _, Parser, ValueEnum};
use tinkex::{BaseUrl, Env, ExportFormat, Secret, Timestamp};

use crate::commands::{CliCommand, GROUPS};

/// Fine-tune and sample language models through the Tinker API
#[derive(Debug, Parser)]
#[command(
    name = "tinkex",
    version,
    arg_required_else_help = true,
    infer_long_args = false,
    after_help = "Exit codes:
  0  success                3  missing or rejected credential   6  partial success
  1  failure                4  not found                        7  rejected by the server
  2  invalid command line   5  temporary failure, retry later   130  interrupted

Examples:
  tinkex quickstart                         fine-tune the built-in model, without a key
  tinkex train examples.jsonl --local       fine-tune on your own data, on this machine
  tinkex chat examples --local              chat with the fine-tuned model
  tinkex auth login                         store an API key for the hosted service
  tinkex run list --limit 5                 list the latest training runs
  tinkex checkpoint gc --keep-last 3        list old checkpoints that could be deleted"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) globals: Globals,
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

impl Args {
    /// Returns the definition of the command line, with the commands of the main help grouped by
    /// [`GROUPS`]: clap itself can print only one list.
    pub(crate) fn definition() -> clap::Command {
        let command = Self::command();
        let mut about: Vec<(&str, String)> = command
            .get_subcommands()
            .map(|one| (one.get_name(), one.get_about().map(ToString::to_string)))
            .map(|(name, about)| (name, about.unwrap_or_default()))
            .collect();
        about.push(("help", "Print this help or the help of a command".to_owned()));
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
        accept_negative_numbers(command.help_template(template))
    }

    /// Parses a command line, program name first.
    pub(crate) fn parse_line(line: Vec<OsString>) -> Result<Self, clap::Error> {
        let mut definition = Self::definition();
        let matches = definition.try_get_matches_from_mut(line)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut definition))
    }
}

/// Lets every value start with a minus sign and a digit, so that the parser of the value rejects `-1`
/// with what it expects. The argument parser would call `-1` an unknown option.
fn accept_negative_numbers(command: clap::Command) -> clap::Command {
    let with_numbers = command.mut_args(|arg| {
        if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg }
    });
    with_numbers.mut_subcommands(accept_negative_numbers)
}

/// Options that every command accepts, before or after its name.
#[derive(Clone, Debug, Default, ArgGroup)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Globals {
    /// Output format: table, json, csv or plain (tab-separated) [env: TINKEX_FORMAT] [default:
    /// table]
    #[arg(short, long, global = true, value_parser = output_format(), hide_possible_values = true)]
    pub(crate) format: Option<FormatOption>,
    /// Print JSON; same as --format json
    #[arg(long, global = true, conflicts_with = "format")]
    pub(crate) json: bool,
    /// Use colors: auto, always or never [env: NO_COLOR, CLICOLOR_FORCE] [default: auto]
    #[arg(long, global = true, value_enum, value_name = "WHEN", hide_possible_values = true)]
    pub(crate) color: Option<ColorChoice>,
    /// Disable colors; same as --color never
    #[arg(long, global = true, conflicts_with = "color")]
    pub(crate) no_color: bool,
    /// Print only results and errors
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// Log more to standard error; -vv logs every request [env: TINKER_LOG]
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Hide progress bars
    #[arg(long, global = true)]
    pub(crate) no_progress: bool,
    /// Profile of the configuration file, see `tinkex config` [env: TINKEX_PROFILE]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) profile: Option<String>,
    /// Base URL of the API [env: TINKER_BASE_URL] [default: the hosted service]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) base_url: Option<BaseUrl>,
    /// Use the server on this machine, starting one for this command if none runs; needs no key
    #[arg(long, global = true, conflicts_with_all = ["base_url", "api_key", "api_key_file"])]
    pub(crate) local: bool,
    /// File that contains the API key [env: TINKER_API_KEY, the key itself]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// API key; visible to other users of this machine, so prefer --api-key-file
    #[arg(long, global = true, value_name = "KEY", conflicts_with = "api_key_file", hide = true)]
    pub(crate) api_key: Option<Secret>,
    /// Project to create resources in or to report on [env: TINKER_PROJECT_ID]
    #[arg(long, global = true, value_name = "ID")]
    pub(crate) project_id: Option<String>,
    /// Timeout of one request, such as 30s; a bare number is seconds [default: 60s]
    #[arg(long, global = true, value_name = "DURATION", value_parser = timeout)]
    pub(crate) timeout: Option<Duration>,
    /// Retry temporary failures for this long, such as 90s or 5m; 0 disables [default: 60s, for train and rl 5m]
    #[arg(long, global = true, value_name = "DURATION", value_parser = duration)]
    pub(crate) retry_for: Option<Duration>,
    /// On a billing error (402), wait until the account is settled instead of failing
    #[arg(long, global = true)]
    pub(crate) wait_for_billing: bool,
}

/// Format of results on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Table with borders
    Table,
    /// One JSON document
    Json,
    /// Comma-separated values with a header
    Csv,
    /// Tab-separated values without a header
    Plain,
}

/// Value of `--format`. One option with two meanings needs one type: clap passes the value of a
/// command's option to the global option of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormatOption {
    /// Format of results on standard output.
    Output(OutputFormat),
    /// Format of the files that `tinkex export` writes.
    Export(ExportFormat),
}

impl FormatOption {
    fn parse(name: &str) -> Result<Self, String> {
        match OutputFormat::from_str(name, false) {
            Ok(format) => Ok(Self::Output(format)),
            Err(_) => name.parse().map(Self::Export),
        }
    }
}

/// Parses the formats of results.
fn output_format() -> impl TypedValueParser<Value = FormatOption> {
    let values = OutputFormat::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    PossibleValuesParser::new(values).try_map(|name| FormatOption::parse(&name))
}

/// Parses the formats of exports and of results.
pub(crate) fn export_or_output_format() -> impl TypedValueParser<Value = FormatOption> {
    let output = OutputFormat::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    let export = ExportFormat::ALL.map(|format| PossibleValue::new(format.as_str()));
    let values = export.into_iter().chain(output.map(|value| value.hide(true)));
    PossibleValuesParser::new(values).try_map(|name| FormatOption::parse(&name))
}

/// When to use colors and other terminal escapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    Always,
    Never,
}

/// Parses a duration such as `250ms`, `90s`, `5m`, `1h`, `30d` or `2w`. A number without a unit is
/// in seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let invalid = || "expected a duration such as 90s, 5m or 1h".to_owned();
    let number: f64 = number.parse().map_err(|_| invalid())?;
    let seconds = match unit.trim() {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        "d" => number * 86_400.0,
        "w" => number * 604_800.0,
        _ => return Err(invalid()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| invalid())
}

/// Parses the timeout of a request or of a reward: a [`duration`] above 0.
pub(crate) fn timeout(text: &str) -> Result<Duration, String> {
    match duration(text) {
        Ok(Duration::ZERO) => {
            Err("a timeout of 0 would fail every request; pass a duration such as \
                                   30s, or omit the option for the default of 60s"
                .to_owned())
        }
        parsed => parsed,
    }
}

/// Parses a whole number. Unlike the standard library's, the error says what is expected.
pub(crate) fn whole_number<N: TryFrom<i128>>(text: &str) -> Result<N, String> {
    number(text, "expected a whole number", |_| true)
}

/// Parses a whole number above 0.
pub(crate) fn positive<N: TryFrom<i128>>(text: &str) -> Result<N, String> {
    number(text, "expected a whole number above 0", |number| number > 0)
}

/// Parses a whole number from `MIN` to `MAX`.
pub(crate) fn number_between<const MIN: u16, const MAX: u16>(text: &str) -> Result<u16, String> {
    let range = i128::from(MIN)..=i128::from(MAX);
    let expected = format!("expected a whole number from {MIN} to {MAX}");
    number(text, &expected, |number| range.contains(&number))
}

/// Parses a whole number that `is_valid` accepts. `expected` is the error for any other text.
fn number<N: TryFrom<i128>>(
    text: &str,
    expected: &str,
    is_valid: impl Fn(i128) -> bool,
) -> Result<N, String> {
    let number = text.parse().ok().filter(|number| is_valid(*number)).ok_or(expected)?;
    N::try_from(number).map_err(|_| match number {
        ..0 => "the number must not be negative".to_owned(),
        _ => "the number is too large".to_owned(),
    })
}

/// Parses a time such as `2026-07-13` or `2026-07-13T12:00:00Z`, in UTC unless it has an offset.
pub(crate) fn timestamp(text: &str) -> Result<Timestamp, String> {
    let expected = "expected a time such as 2026-07-13 or 2026-07-13T12:00:00Z";
    text.parse().map_err(|_| expected.to_owned())
}

/// Returns the color options of a command line that cannot be parsed.
pub(crate) fn color_flags(line: &[OsString]) -> Globals {
    let words: Vec<_> = line.iter().filter_map(|word| word.to_str()).collect();
    let joined = words.iter().find_map(|word| word.strip_prefix("--color="));
    let pair = || words.windows(2).find(|pair| pair[0] == "--color").map(|pair| pair[1]);
    let color = joined.or_else(pair).and_then(|word| ColorChoice::from_str(word, false).ok());
    Globals { color, no_color: words.contains(&"--no-color"), ..Globals::default() }
}

/// Returns whether a command line that cannot be parsed asks for JSON errors.
pub(crate) fn wants_json(line: &[OsString], variables: &Env) -> bool {
    let words: Vec<_> = line.iter().filter_map(|word| word.to_str()).collect();
    let joined = words.iter().find_map(|word| word.strip_prefix("--format="));
    let pair = || words.windows(2).find(|pair| matches!(pair[0], "-f" | "--format")).map(|p| p[1]);
    words.iter().any(|word| matches!(*word, "--json" | "-fjson" | "-f=json"))
        || joined.or_else(pair).or(variables.get("TINKEX_FORMAT")) == Some("json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::definition().debug_assert();
    }

    #[test]
    fn the_main_help_lists_every_command_once() {
        let command = Args::command();
        let mut known: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
        known.push("help");
        let listed: Vec<_> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        assert_eq!(listed.first(), Some(&"quickstart"));
        assert_eq!(listed, known, "both in the same order");
    }

    #[test]
    fn invalid_numbers_name_what_is_expected() {
        assert_eq!(whole_number::<u64>("0"), Ok(0));
        assert_eq!(whole_number::<i64>("-1"), Ok(-1));
        assert_eq!(whole_number::<u32>("abc").unwrap_err(), "expected a whole number");
        assert_eq!(whole_number::<u64>("-1").unwrap_err(), "the number must not be negative");
        assert_eq!(whole_number::<u32>("4294967296").unwrap_err(), "the number is too large");
        assert_eq!(positive::<u32>("4294967296").unwrap_err(), "the number is too large");
        assert_eq!(number_between::<0, 65535>("65535"), Ok(65535));
        for wrong in ["65536", "-1", "http"] {
            let error = number_between::<0, 65535>(wrong).unwrap_err();
            assert_eq!(error, "expected a whole number from 0 to 65535");
        }
        assert_eq!(positive::<usize>("3"), Ok(3));
        for wrong in ["0", "abc", "1.5", ""] {
            assert_eq!(positive::<u32>(wrong).unwrap_err(), "expected a whole number above 0");
        }
    }

    #[test]
    fn durations_have_units() {
        for (text, seconds) in [("0", 0.0), ("90s", 90.0), ("1.5m", 90.0), ("250ms", 0.25)] {
            assert_eq!(duration(text).unwrap(), Duration::from_secs_f64(seconds));
        }
        for wrong in ["", "s", "5 weeks", "-1s", "1e999"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
