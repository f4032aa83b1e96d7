//! One step of a command: a tool that is run, shown, and must succeed.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Why a command did not succeed.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A run of a tool, not yet started.
pub(crate) struct Step {
    what: &'static str,
    tool: String,
    command: Command,
}

/// What `cargo run` tells xtask about xtask. A build script that reads such a variable (ring's does)
/// would run again, and all above it be compiled again, whenever cargo is called the other way.
const OF_XTASK: [&str; 7] = [
    "CARGO_MANIFEST_DIR",
    "CARGO_MANIFEST_LINKS",
    "CARGO_PKG_NAME",
    "CARGO_PKG_VERSION_MAJOR",
    "CARGO_PKG_VERSION_MINOR",
    "CARGO_PKG_VERSION_PATCH",
    "CARGO_PKG_VERSION_PRE",
];

/// Cargo, in the workspace's root.
pub(crate) fn cargo(what: &'static str, arguments: &[&str]) -> Step {
    #[expect(clippy::disallowed_methods, reason = "cargo tells its children where it is")]
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut step = Step { tool: "cargo".to_owned(), ..tool(what, cargo, arguments) };
    for name in OF_XTASK {
        step.command.env_remove(name);
    }
    step
}

/// Another tool, in the workspace's root.
pub(crate) fn tool(what: &'static str, tool: impl AsRef<OsStr>, arguments: &[&str]) -> Step {
    let mut command = Command::new(tool.as_ref());
    command.args(arguments).current_dir(root());
    Step { what, tool: tool.as_ref().to_string_lossy().into_owned(), command }
}

/// The workspace's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Where cargo builds, and where what it does not build is put.
pub(crate) fn target() -> PathBuf {
    #[expect(clippy::disallowed_methods, reason = "cargo reads it too")]
    let elsewhere = std::env::var_os("CARGO_TARGET_DIR");
    root().join(elsewhere.unwrap_or_else(|| "target".into()))
}

impl Step {
    pub(crate) fn arguments(mut self, more: &[&str]) -> Self {
        self.command.args(more);
        self
    }

    pub(crate) fn argument(mut self, more: impl AsRef<OsStr>) -> Self {
        self.command.arg(more);
        self
    }

    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// The command as one would type it.
    fn line(&self) -> String {
        let words = self.command.get_args().map(|word| word.to_string_lossy());
        format!("{} {}", self.tool, words.collect::<Vec<_>>().join(" "))
    }

    /// Runs it, with its output where ours goes.
    pub(crate) fn run(mut self) -> Result<(), Failure> {
        println!("\n==> {}: {}", self.what, self.line());
        let start = Instant::now();
        let status = self.command.status();
        match status {
            Ok(status) if status.success() => {
                println!("    {} took {:.1} s", self.what, start.elapsed().as_secs_f64());
                Ok(())
            }
            Ok(status) => Err(self.failed(&status.to_string())),
            Err(why) => Err(self.failed(&why.to_string())),
        }
    }

    /// Runs it and returns what it printed.
    pub(crate) fn output(mut self) -> Result<String, Failure> {
        let output = self.command.output().map_err(|why| self.failed(&why.to_string()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(self.failed(&format!("{}\n{said}", output.status)));
        }
        String::from_utf8(output.stdout).map_err(|why| self.failed(&why.to_string()))
    }

    fn failed(&self, why: &str) -> Failure {
        Failure::new(format!("{} failed ({why})\n  to see it again: {}", self.what, self.line()))
    }
}
