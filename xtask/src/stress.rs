//! `cargo xtask attack` and `cargo xtask load`: build the server and run the program `tinkex-stress`
//! against it.

use clap::Args;

use crate::step::{Step, XtaskError, cargo, target, tool};

/// Arguments of `cargo xtask attack`; the program `tinkex-stress` has the defaults.
#[derive(Args)]
pub(crate) struct AttackArgs {
    /// Duration of each attack [default: 15]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Run one attack, such as slow-bodies
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Arguments of `cargo xtask load`; the program `tinkex-stress` has the defaults.
#[derive(Args)]
pub(crate) struct LoadArgs {
    /// Number of clients [default: 200]
    #[arg(long, value_name = "N")]
    clients: Option<u64>,
    /// Number of users [default: 20]
    #[arg(long, value_name = "N")]
    users: Option<u64>,
    /// Duration of the measurement [default: 600]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
}

pub(crate) fn load(args: &LoadArgs) -> Result<(), XtaskError> {
    let mut step = stress("load", "load")?;
    let numbers =
        [("--clients", args.clients), ("--users", args.users), ("--seconds", args.seconds)];
    for (name, number) in numbers {
        if let Some(number) = number {
            step = step.arguments(&[name, &number.to_string()]);
        }
    }
    step.run()
}

pub(crate) fn attack(args: &AttackArgs) -> Result<(), XtaskError> {
    let mut step = stress("attacks", "attack")?;
    if let Some(seconds) = args.seconds {
        step = step.arguments(&["--seconds", &seconds.to_string()]);
    }
    if let Some(only) = &args.only {
        step = step.arguments(&["--only", only]);
    }
    step.run()
}

/// Builds the server and `tinkex-stress`, and returns a step that runs a command of `tinkex-stress`
/// against the server.
fn stress(title: &str, command: &str) -> Result<Step, XtaskError> {
    let build = ["build", "--release", "--locked", "--package", "tinkex-cli"];
    cargo("programs", &build).arguments(&["--package", "tinkex-stress"]).run()?;
    let folder = target().join("release");
    let step = tool(title, folder.join("tinkex-stress"), &[command]);
    Ok(step.argument("--program").argument(folder.join("tinkex")))
}
