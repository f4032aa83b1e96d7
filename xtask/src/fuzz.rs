//! `cargo xtask fuzz`: runs the fuzz tests for a given time.
//!
//! `cargo xtask test` runs the same fuzz tests briefly. Environment variables set the duration, the
//! seed and the target of a long run. `cargo xtask fuzz guided` runs libFuzzer instead, which finds
//! new inputs by the coverage of the code.

use clap::{Args, Subcommand};

use crate::guided_fuzz::{self, GuidedFuzzArgs};
use crate::step::{XtaskError, ignored_test};

/// Arguments of `cargo xtask fuzz`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct FuzzArgs {
    #[command(subcommand)]
    subject: Option<FuzzSubject>,
    #[command(flatten)]
    wire: RandomFuzzArgs,
}

/// Code to fuzz instead of the decoders of the wire crate.
#[derive(Subcommand)]
enum FuzzSubject {
    /// Fuzz all routes of a server
    Server(RandomFuzzArgs),
    /// Fuzz the reader of GGUF files
    Weights(RandomFuzzArgs),
    /// Fuzz readers with libFuzzer, guided by coverage (needs Linux and a C++ compiler)
    Guided(GuidedFuzzArgs),
}

/// Arguments of a run with random inputs.
#[derive(Args)]
struct RandomFuzzArgs {
    /// Duration of the run
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Seed of the run to repeat
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Decoder to fuzz [default: all]
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
}

pub(crate) fn run(args: &FuzzArgs) -> Result<(), XtaskError> {
    match &args.subject {
        None => args.wire.run("tinkex-wire", "fuzz::a_long_run_finds_nothing"),
        Some(FuzzSubject::Server(args)) => {
            args.run("tinkex-server", "fuzz::a_long_run_finds_nothing")
        }
        Some(FuzzSubject::Weights(args)) => {
            args.run("tinkex-weights", "gguf::a_long_run_finds_nothing")
        }
        Some(FuzzSubject::Guided(args)) => guided_fuzz::run(args),
    }
}

impl RandomFuzzArgs {
    /// Runs the fuzz test `test` of `package`.
    fn run(&self, package: &str, test: &str) -> Result<(), XtaskError> {
        let mut step = ignored_test("fuzzing", package, test, &["--profile", "fuzz"])?
            .variable("TINKEX_FUZZ_SECONDS", self.seconds.to_string());
        if let Some(seed) = self.seed {
            step = step.variable("TINKEX_FUZZ_SEED", seed.to_string());
        }
        if let Some(target) = &self.target {
            step = step.variable("TINKEX_FUZZ_TARGET", target);
        }
        step.run()
    }
}
