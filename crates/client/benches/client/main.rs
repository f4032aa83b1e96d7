//! What the client costs, against the Python SDK and against the bare HTTP requests, in one run.
//!
//! Run it with `cargo xtask bench client`. One program plays all parts, each in a process of its
//! own: the [`server`] with canned answers, the client under test ([`ours`]), and the [`floor`],
//! which sends the same requests with no logic around them. `peer.py` is the same program for the
//! Python SDK. [`compare`] lets them take turns and judges.

#![expect(clippy::print_stdout, reason = "the table is the point")]

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
        Err(why) => {
            eprintln!("bench client: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Outcome<bool> {
    match arguments {
        ["server"] => server::run()?,
        ["ours", work @ ..] => several_threads()?.block_on(ours::run(&Work::parse(work)?))?,
        ["floor", work @ ..] => several_threads()?.block_on(floor::run(&Work::parse(work)?))?,
        options => return compare::run(options),
    }
    Ok(true)
}

/// What `#[tokio::main]` makes, which is what programs use.
fn several_threads() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}
