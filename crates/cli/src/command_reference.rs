//! The reference of the command line, `docs/commands.md`, which is generated from the help texts.
//!
//! Flags are described in one place, their help; other documents link to the reference.
//! `cargo xtask reference --fix` writes it.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, ArgAction, Command};

use crate::args::Args;

const HEADER: &str = "\
# Command reference

Generated from the help of the program by `cargo xtask reference --fix`; do not edit. `tinkex COMMAND --help` prints the
same texts. [cli.md](cli.md) explains the commands with examples, [configuration.md](configuration.md) the settings and
environment variables.
";

/// Heading of options that have none.
const OTHER: &str = "Options";

/// Returns the reference of all visible commands.
fn reference() -> String {
    let definition = Args::definition();
    let mut page = HEADER.to_owned();
    write_command(&mut page, &definition, "tinkex");
    page
}

/// Writes the section of a command, which a user types as `line`, and of its subcommands.
fn write_command(page: &mut String, command: &Command, line: &str) {
    let subcommands: Vec<&Command> =
        command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()).collect();
    let about = command.get_long_about().or_else(|| command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let _ = write!(page, "\n## {line}\n\n{about}\n");
    let arguments: Vec<&Arg> =
        command.get_arguments().filter(|argument| !argument.is_hide_set()).collect();
    let mut headings: Vec<&str> = Vec::new();
    for heading in arguments.iter().map(|argument| heading(argument)) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    for name in headings {
        let _ = write!(page, "\n| {name} | Description |\n|---|---|\n");
        for argument in arguments.iter().filter(|argument| heading(argument) == name) {
            let _ = writeln!(page, "| `{}` | {} |", cell(&syntax(argument)), description(argument));
        }
    }
    if let Some(text) = command.get_after_help().filter(|_| line != "tinkex") {
        let text = text.to_string();
        let _ = write!(page, "\n```text\n{}\n```\n", text.trim());
    }
    for subcommand in subcommands {
        write_command(page, subcommand, &format!("{line} {}", subcommand.get_name()));
    }
}

fn heading(argument: &Arg) -> &str {
    let positional = if argument.is_positional() { "Arguments" } else { OTHER };
    argument.get_help_heading().unwrap_or(positional)
}

/// Returns how an argument is typed: `-m, --model <NAME>`.
fn syntax(argument: &Arg) -> String {
    let takes_value = matches!(argument.get_action(), ArgAction::Set | ArgAction::Append);
    let mut values: Vec<String> = match argument.get_value_names() {
        Some(names) if takes_value => names.iter().map(|name| format!("<{name}>")).collect(),
        _ => Vec::new(),
    };
    if argument.is_positional() {
        if values.is_empty() {
            values.push(format!("<{}>", argument.get_id().as_str().to_uppercase()));
        }
        let many = matches!(argument.get_action(), ArgAction::Append);
        let list = values.join(" ");
        return format!("{list}{}", if many { "..." } else { "" });
    }
    let short = argument.get_short().map(|name| format!("-{name}"));
    let long = argument.get_long().map(|name| format!("--{name}"));
    let names: Vec<String> = short.into_iter().chain(long).collect();
    let optional = argument.get_num_args().is_some_and(|range| range.min_values() == 0);
    let list = values.join(" ");
    match (list.is_empty() || !takes_value, optional) {
        (true, _) => names.join(", "),
        (false, true) => format!("{}[={list}]", names.join(", ")),
        (false, false) => format!("{} {list}", names.join(", ")),
    }
}

/// Returns the help of an argument with its default and its possible values.
fn description(argument: &Arg) -> String {
    let help = argument.get_long_help().or_else(|| argument.get_help());
    let mut text = help.map(ToString::to_string).unwrap_or_default().replace('\n', " ");
    let defaults = argument.get_default_values();
    let is_flag = !matches!(argument.get_action(), ArgAction::Set | ArgAction::Append);
    if !defaults.is_empty() && !is_flag && !argument.is_hide_default_value_set() {
        let values: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
        let _ = write!(text, " [default: {}]", values.join(" "));
    }
    let possible = argument.get_possible_values();
    if !possible.is_empty() && !is_flag && !argument.is_hide_possible_values_set() {
        let names = possible.iter().filter(|value| !value.is_hide_set());
        let names: Vec<&str> = names.map(clap::builder::PossibleValue::get_name).collect();
        let _ = write!(text, " [possible values: {}]", names.join(", "));
    }
    cell(&text)
}

/// Escapes text for a cell of a Markdown table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[test]
fn the_reference_equals_the_help() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/commands.md");
    let generated = reference();
    #[expect(clippy::disallowed_methods, reason = "set by `cargo xtask reference --fix`")]
    let update = std::env::var_os("TINKEX_UPDATE_REFERENCE").is_some();
    if update {
        std::fs::write(&path, &generated).unwrap();
    }
    let document = std::fs::read_to_string(&path).unwrap_or_default();
    let difference = document.lines().zip(generated.lines()).find(|(old, new)| old != new);
    assert!(
        document == generated,
        "docs/commands.md is out of date at {difference:?}; run `cargo xtask reference --fix`"
    );
}
