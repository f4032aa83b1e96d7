//! Compatibility with the command line of the Elixir client: its `run` without a subcommand becomes
//! `sample`, and its `checkpoint` without a subcommand becomes `checkpoint save`.

use std::ffi::OsString;

/// Options that only sampling has.
const SAMPLE_OPTIONS: [&str; 5] =
    ["--prompt", "--prompt-file", "--tokens", "--base-model", "--model-path"];

/// Translates a command line of the Elixir tool. Other command lines are returned unchanged.
pub(crate) fn translate(mut line: Vec<OsString>) -> Vec<OsString> {
    let words: Vec<&str> = line.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    let has_option = |options: &[&str], after: usize| {
        let is_one = |word: &&str| options.contains(&word.split('=').next().unwrap_or_default());
        words.get(after..).unwrap_or_default().iter().any(is_one)
    };
    // The command is the first word that is neither an option nor the value of an option. A word
    // after an option is its value, unless the option is a flag or contains its value (`--a=b`).
    let is_option = |at: usize| words[at].starts_with('-');
    let takes_value = |at: usize| {
        is_option(at) && !words[at].contains('=') && !matches!(words[at], "--json" | "-q" | "-v")
    };
    let command = (1..words.len()).find(|at| !is_option(*at) && !takes_value(*at - 1));
    // Position of the command `name`, if an option follows it instead of a subcommand.
    let without_subcommand = |name: &str| {
        let at = command.filter(|at| words[*at] == name)?;
        words.get(at + 1).is_some_and(|next| next.starts_with('-')).then_some(at)
    };
    if let Some(at) = without_subcommand("run").filter(|at| has_option(&SAMPLE_OPTIONS, *at)) {
        line[at] = "sample".into();
    } else if let Some(at) =
        without_subcommand("checkpoint").filter(|at| has_option(&["--base-model"], *at))
    {
        line.insert(at + 1, "save".into());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elixir_command_lines_are_translated_and_others_are_unchanged() {
        for (line, ours) in [
            ("tinkex run --base-model m --prompt x", "tinkex sample --base-model m --prompt x"),
            ("tinkex --json run --prompt=run", "tinkex --json sample --prompt=run"),
            ("tinkex --format=json run --prompt x", "tinkex --format=json sample --prompt x"),
            ("tinkex --profile run run list", "tinkex --profile run run list"),
            ("tinkex checkpoint --base-model m", "tinkex checkpoint save --base-model m"),
            ("tinkex run list --limit 3", "tinkex run list --limit 3"),
            ("tinkex run --help", "tinkex run --help"),
            ("tinkex sample --prompt run --tokens 1", "tinkex sample --prompt run --tokens 1"),
            ("tinkex checkpoint save --base-model m", "tinkex checkpoint save --base-model m"),
            ("tinkex", "tinkex"),
        ] {
            let words = line.split(' ').map(OsString::from).collect();
            let ours: Vec<OsString> = ours.split(' ').map(OsString::from).collect();
            assert_eq!(translate(words), ours, "{line}");
        }
    }
}
