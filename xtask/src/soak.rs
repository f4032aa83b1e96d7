//! `cargo xtask soak`: runs client programs against two servers, of which the first is killed at
//! random moments. Fails if the use of memory, file handles, threads or disk grows.

use clap::Args;

use crate::step::{XtaskError, ignored_test};

/// Arguments of `cargo xtask soak`.
#[derive(Args)]
pub(crate) struct SoakArgs {
    /// Duration
    #[arg(long, value_name = "MINUTES", default_value_t = 30)]
    minutes: u64,
    /// Seed of the programs and of the kills
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(args: &SoakArgs) -> Result<(), XtaskError> {
    let test = "soak::resources_stay_flat_while_a_server_is_killed";
    ignored_test("soak test", "tinkex-server", test, &[])?
        .variable("TINKEX_SOAK_SECONDS", args.minutes.saturating_mul(60).to_string())
        .variable("TINKEX_SOAK_SEED", args.seed.to_string())
        .run()
}
