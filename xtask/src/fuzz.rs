//! The long fuzzing run: the same code as the short one in the tests, told how long by variables.

use crate::step::{Failure, cargo};

pub(crate) fn run(options: &[&str]) -> Result<(), Failure> {
    let (package, options) = match options {
        ["server", options @ ..] => ("tinkex-server", options),
        options => ("tinkex-wire", options),
    };
    let mut step = cargo(
        "fuzzing",
        &["test", "--locked", "--profile", "fuzz", "--package", package, "--test", "it"],
    )
    .arguments(&["fuzz::a_long_run_finds_nothing", "--", "--ignored", "--nocapture"])
    .variable("TINKEX_FUZZ_SECONDS", "60");
    let mut rest = options.iter();
    while let Some(option) = rest.next() {
        let variable = match *option {
            "--seconds" => "TINKEX_FUZZ_SECONDS",
            "--seed" => "TINKEX_FUZZ_SEED",
            "--target" => "TINKEX_FUZZ_TARGET",
            other => return Err(Failure::new(format!("fuzz: no such option: {other}"))),
        };
        let Some(value) = rest.next() else {
            return Err(Failure::new(format!("fuzz: {option} needs a value")));
        };
        if variable != "TINKEX_FUZZ_TARGET" && value.parse::<u64>().is_err() {
            return Err(Failure::new(format!("fuzz: {option} needs a number, not {value:?}")));
        }
        step = step.variable(variable, value);
    }
    step.run()
}
