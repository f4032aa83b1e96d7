//! Attacks a `tinkex serve` process, or measures it under load: `cargo xtask attack`, `cargo xtask
//! load`.
//!
//! * `attack`: the attacks, and what must hold beside each of them
//! * `load`: many clients of several users
//! * `statistics`: quantiles and fairness
//! * `honest`: the requests of an honest user beside an attack
//! * `server`: the server process
//! * `api`, `http`: clients of the server

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool prints to standard output")]

mod api;
mod attack;
mod honest;
mod http;
mod load;
mod server;
mod statistics;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use attack::AttackArgs;
use load::LoadArgs;

/// Attack or measure a server process
#[derive(Parser)]
#[command(name = "tinkex-stress", max_term_width = 100)]
struct Stress {
    #[command(subcommand)]
    command: StressCommand,
}

#[derive(Subcommand)]
enum StressCommand {
    /// Attack a server in 1 GiB of memory, and check that it serves an honest user
    Attack(AttackArgs),
    /// Measure many clients of several users, compared with one client
    Load(LoadArgs),
}

fn main() -> ExitCode {
    let command = Stress::parse().command;
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            println!("cannot create a runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = match command {
        StressCommand::Attack(args) => runtime.block_on(attack::run(&args)),
        StressCommand::Load(args) => runtime.block_on(load::run(&args)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("\n{error}");
            ExitCode::FAILURE
        }
    }
}
