//! Makes the built-in model `tinkex/tiny` of `tinkex-engine`; see `docs/corpus.md`.
//!
//! ```text
//! cargo run --release -p tinkex-builtin-model -- train [STEPS] [FOLDER]
//! cargo run --release -p tinkex-builtin-model -- tokenizer FILE
//! cargo run --release -p tinkex-builtin-model -- corpus [SEED] [COUNT]
//! ```
//!
//! `train` writes the files of the model, `tokenizer` only `tokenizer.json`, and `corpus` prints
//! documents of the training text. All results are the same on every machine.
//!
//! [`corpus`] generates the text, [`tokenizer`] trains the tokenizer and [`model`] the weights. The
//! program is not published: users of the engine need its results, not the tools that made them.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the program prints documents and progress")]

mod corpus;
mod model;
mod tokenizer;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const USAGE: &str = "usage: tinkex-builtin-model train [STEPS] [FOLDER] | tokenizer FILE | \
                     corpus [SEED] [COUNT]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        ["train", options @ ..] if options.len() <= 2 => {
            let steps = number(options.first(), model::DEFAULT_STEPS)?;
            let folder = options.get(1).map_or_else(engine_folder, PathBuf::from);
            model::make(steps, &folder)
        }
        ["tokenizer", file] => {
            let documents: Vec<String> = corpus::documents(tokenizer::DOCUMENTS).collect();
            tokenizer::builtin(&documents)?.write(Path::new(file))
        }
        ["corpus", options @ ..] if options.len() <= 2 => {
            let seed = number(options.first(), corpus::SEED)?;
            let count = number(options.get(1), 10)?;
            for index in 0..count {
                println!("{}{}", corpus::document(seed, index), corpus::END_OF_TEXT);
            }
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

/// Parses an optional argument.
fn number<N>(argument: Option<&&str>, default: N) -> Result<N>
where
    N: std::str::FromStr<Err = std::num::ParseIntError>,
{
    argument.map_or(Ok(default), |text| text.parse()).map_err(|error| {
        let text = argument.copied().unwrap_or_default();
        format!("invalid number {text:?}: {error}; {USAGE}").into()
    })
}

/// Returns the folder from which the engine embeds the model.
fn engine_folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "engine", "models", "tiny"].iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_commands_and_invalid_numbers_are_refused() {
        for arguments in [&[][..], &["bake"], &["tokenizer"], &["corpus", "1", "2", "3"]] {
            assert_eq!(run(arguments).unwrap_err().to_string(), USAGE);
        }
        let error = run(&["train", "many"]).unwrap_err().to_string();
        assert!(error.starts_with("invalid number \"many\": "), "{error}");
        run(&["corpus", "1", "0"]).unwrap();
    }
}
