//! The promises that a program relies on, against any server.

use crate::step::{Failure, cargo};

pub(crate) fn run(options: &[&str]) -> Result<(), Failure> {
    let mut step = cargo(
        "the promises of a server",
        &["test", "--locked", "--package", "tinkex-server", "--test", "it"],
    )
    .arguments(&[
        "contract::another_server_keeps_every_promise",
        "--",
        "--ignored",
        "--nocapture",
    ]);
    let mut rest = options.iter();
    let mut named = false;
    while let Some(option) = rest.next() {
        let variable = match *option {
            "--base-url" => "TINKEX_CONTRACT_URL",
            "--api-key-file" | "--key-file" => "TINKEX_CONTRACT_KEY_FILE",
            "--model" => "TINKEX_CONTRACT_MODEL",
            other => return Err(Failure::new(format!("contract: no such option: {other}"))),
        };
        let Some(value) = rest.next() else {
            return Err(Failure::new(format!("contract: {option} needs a value")));
        };
        named |= *option == "--base-url";
        step = match *option {
            // The tests run in a folder of their own.
            "--api-key-file" | "--key-file" => {
                let path = std::path::absolute(value);
                let path = path.map_err(|why| Failure::new(format!("{value}: {why}")))?;
                step.variable(variable, &path.to_string_lossy())
            }
            _ => step.variable(variable, value),
        };
    }
    if !named {
        return Err(Failure::new("contract: which server? --base-url URL [--api-key-file FILE]"));
    }
    step.run()
}
