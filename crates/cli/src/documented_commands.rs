//! Tests that every `tinkex` command in the documentation and in the help parses.

use std::fs;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;

use crate::{alias, args::Args};

/// Kinds of errors for a command whose values are missing or placeholders.
const WITHOUT_VALUES: [ErrorKind; 4] = [
    ErrorKind::MissingRequiredArgument,
    ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
    ErrorKind::InvalidValue,
    ErrorKind::ValueValidation,
];

/// A command line, and where it is documented.
struct DocumentedCommand {
    source: String,
    /// Whether it is inline code in a sentence, where values may be missing.
    inline: bool,
    line: String,
}

impl DocumentedCommand {
    /// Returns the words of the command: up to a comment, a pipe or a redirection, without quotes.
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut word: Option<String> = None;
        let mut quote = None;
        for c in self.line.chars() {
            match (quote, c) {
                (Some(open), _) if c == open => quote = None,
                (None, '\'' | '"') => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                (None, '#' | '|' | '>' | '<' | '&' | ')') if word.is_none() || c == ')' => break,
                (None, ' ') => words.extend(word.take()),
                _ => word.get_or_insert_default().push(c),
            }
        }
        words.extend(word);
        words
    }

    fn parse(&self) -> Result<(), String> {
        let line = self.words().into_iter().map(Into::into).collect();
        match Args::parse_line(alias::translate(line)) {
            Ok(_) => Ok(()),
            Err(help) if !help.use_stderr() => Ok(()),
            // Sentences name commands and flags without values, or with placeholders.
            Err(error) if self.inline && WITHOUT_VALUES.contains(&error.kind()) => Ok(()),
            Err(error) => Err(format!("{}: {}\n{error}", self.source, self.line)),
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the Markdown files that describe the command line. Decision records (`docs/adr`) are not
/// included: they may describe earlier versions.
fn pages() -> Vec<PathBuf> {
    let markdown = |folder: &str| {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"))
    };
    markdown(".").chain(markdown("docs")).chain(markdown("crates/cli")).collect()
}

/// Returns the commands in the shell blocks of a page, and those in its inline code.
fn commands_of_page(path: &Path) -> Vec<DocumentedCommand> {
    let text = fs::read_to_string(path).unwrap().replace("\\\n", " ");
    let mut lines = Vec::new();
    for (index, section) in text.split("```").enumerate() {
        let is_block = index % 2 == 1;
        if is_block && (section.starts_with("sh\n") || section.starts_with("console\n")) {
            lines.extend(section.lines().map(|line| (false, line.trim_start_matches("$ "))));
        } else if !is_block {
            lines.extend(section.split('`').skip(1).step_by(2).map(|code| (true, code)));
        }
    }
    let source = path.file_name().unwrap().to_string_lossy();
    // `[OPTIONS]`, `…` and `COMMAND` stand for arguments that cannot be parsed.
    let is_template = |line: &str| line.contains(['…', '[']) || line.contains("COMMAND");
    let is_complete = |line: &str| line.starts_with("tinkex ") && !is_template(line);
    let commands = lines.into_iter().filter(|(_, line)| is_complete(line));
    let command = |(inline, line): (bool, &str)| DocumentedCommand {
        source: source.to_string(),
        inline,
        line: line.to_owned(),
    };
    commands.map(command).collect()
}

/// Returns the examples in the help of a command and its subcommands.
fn examples_of_help(command: &clap::Command) -> Vec<DocumentedCommand> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    // An explanation is separated from its example by at least two spaces.
    let lines = help.lines().map(|line| line.trim_start().split("  ").next().unwrap_or_default());
    let source = format!("help of {}", command.get_name());
    let mut examples: Vec<_> = lines
        .filter(|line| line.starts_with("tinkex "))
        .map(|line| DocumentedCommand {
            source: source.clone(),
            inline: false,
            line: line.to_owned(),
        })
        .collect();
    examples.extend(command.get_subcommands().flat_map(examples_of_help));
    examples
}

/// Asserts that all commands parse, and that at least `min` were found.
fn assert_all_parse(commands: &[DocumentedCommand], min: usize) {
    assert!(commands.len() >= min, "only {} commands were found", commands.len());
    let errors: Vec<_> = commands.iter().filter_map(|command| command.parse().err()).collect();
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

#[test]
fn every_command_in_the_documentation_parses() {
    let commands: Vec<_> = pages().iter().flat_map(|page| commands_of_page(page)).collect();
    assert_all_parse(&commands, 50);
}

#[test]
fn every_example_in_the_help_parses() {
    assert_all_parse(&examples_of_help(&Args::definition()), 40);
}
