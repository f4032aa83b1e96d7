//! `cargo xtask fuzz`: runs the fuzz tests for a given time.
//!
//! `cargo xtask test` runs the same fuzz tests briefly. Environment variables set the duration, the
//! seed and the target of a long run. `cargo xtask fuzz guided` runs libFuzzer instead, which finds
//! new inputs by the coverage of the code.

use crate::guided_fuzz;
use crate::step::{XtaskError, ignored_test};

pub(crate) fn run(options: &[&str]) -> Result<(), XtaskError> {
    let (package, options) = match options {
        ["guided", options @ ..] => return guided_fuzz::run(options),
        ["server", options @ ..] => ("tinkex-server", options),
        ["weights", options @ ..] => ("tinkex-weights", options),
        options => ("tinkex-wire", options),
    };
    let mut variables = vec![("TINKEX_FUZZ_SECONDS", "60")];
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let variable = match *option {
            "--seconds" => "TINKEX_FUZZ_SECONDS",
            "--seed" => "TINKEX_FUZZ_SEED",
            "--target" => "TINKEX_FUZZ_TARGET",
            other => return Err(XtaskError::new(format!("fuzz: unknown option {other}"))),
        };
        let Some(value) = options.next() else {
            return Err(XtaskError::new(format!("fuzz: {option} needs a value")));
        };
        if variable != "TINKEX_FUZZ_TARGET" && value.parse::<u64>().is_err() {
            return Err(XtaskError::new(format!("fuzz: {option} needs a number, found {value:?}")));
        }
        variables.push((variable, value));
    }
    let test = match package {
        "tinkex-weights" => "gguf::a_long_run_finds_nothing",
        _ => "fuzz::a_long_run_finds_nothing",
    };
    let step = ignored_test("fuzzing", package, test, &["--profile", "fuzz"])?;
    variables.into_iter().fold(step, |step, (name, value)| step.variable(name, value)).run()
}
