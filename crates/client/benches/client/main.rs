//! Benchmark of the client against the Python SDK and against bare HTTP requests.
//!
//! Run it with `cargo xtask bench client`. The program starts itself once per role, each in a
//! process of its own: the [`server`] with prepared responses, the client under test ([`ours`]),
//! and the [`floor`], which sends the same requests without client logic. `peer.py` does the same
//! work with the Python SDK. [`compare`] runs these contenders in alternation and checks the
//! targets.

#![expect(clippy::print_stdout, reason = "the program prints a table")]

mod compare;
mod floor;
mod ours;
mod server;
mod table;
mod usage;
mod work;

use std::error::Error;
use std::process::ExitCode;

use work::Work;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench client: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Outcome<bool> {
    match arguments {
        ["server"] => server::run()?,
        ["ours", work @ ..] => multi_thread_runtime()?.block_on(ours::run(&Work::parse(work)?))?,
        ["floor", work @ ..] => {
            multi_thread_runtime()?.block_on(floor::run(&Work::parse(work)?))?;
        }
        options => return compare::run(options),
    }
    Ok(true)
}

/// Creates a runtime as `#[tokio::main]` does.
fn multi_thread_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}
