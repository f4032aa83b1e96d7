//! Steps of a command: each prints the command line of an external tool, runs it and requires
//! success. [`times`] has the durations of the steps that ended.

use std::ffi::OsStr;
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Error of an xtask command: a message for the user.
#[derive(Debug)]
pub(crate) struct XtaskError(String);

impl XtaskError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for XtaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Duration of a step that succeeded, or of a part of a step.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    pub(crate) name: String,
    pub(crate) duration: Duration,
}

/// Durations of the steps that succeeded, in the order of their ends.
static TIMES: Mutex<Vec<Timing>> = Mutex::new(Vec::new());

/// Returns the durations of all steps of this process that succeeded.
pub(crate) fn times() -> Vec<Timing> {
    TIMES.lock().clone()
}

/// Prints and records the duration of a step.
fn record_time(name: String, duration: Duration) {
    println!("    {name} took {:.1} s", duration.as_secs_f64());
    TIMES.lock().push(Timing { name, duration });
}

/// Runs a step that is not a single command.
pub(crate) fn timed<T>(
    name: &str,
    run: impl FnOnce() -> Result<T, XtaskError>,
) -> Result<T, XtaskError> {
    let start = Instant::now();
    let result = run()?;
    record_time(name.to_owned(), start.elapsed());
    Ok(result)
}

/// External command that has not been started.
pub(crate) struct Step {
    title: String,
    /// Name of the tool for messages.
    tool: String,
    command: Command,
}

/// Variables that `cargo run` sets for xtask itself.
///
/// They are removed for the cargo processes that xtask starts: a build script that reads such a
/// variable (ring's does) would otherwise run again, and its dependents be compiled again, on every
/// switch between `cargo xtask` and plain cargo.
const XTASK_VARIABLES: [&str; 7] = [
    "CARGO_MANIFEST_DIR",
    "CARGO_MANIFEST_LINKS",
    "CARGO_PKG_NAME",
    "CARGO_PKG_VERSION_MAJOR",
    "CARGO_PKG_VERSION_MINOR",
    "CARGO_PKG_VERSION_PATCH",
    "CARGO_PKG_VERSION_PRE",
];

/// Creates a step that runs cargo in the workspace root.
pub(crate) fn cargo(title: &str, arguments: &[&str]) -> Step {
    #[expect(clippy::disallowed_methods, reason = "cargo passes its own path to its children")]
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut step = Step { tool: "cargo".to_owned(), ..tool(title, cargo, arguments) };
    for name in XTASK_VARIABLES {
        step.command.env_remove(name);
    }
    step
}

/// Creates a step that runs `tool` in the workspace root.
pub(crate) fn tool(title: &str, tool: impl AsRef<OsStr>, arguments: &[&str]) -> Step {
    let mut command = Command::new(tool.as_ref());
    command.args(arguments).current_dir(root());
    Step { title: title.to_owned(), tool: tool.as_ref().to_string_lossy().into_owned(), command }
}

/// Creates a step that runs one `#[ignore]`d integration test of `package`.
///
/// # Errors
/// If the test does not exist: cargo would otherwise run no test and report success.
pub(crate) fn ignored_test(
    title: &str,
    package: &str,
    test: &str,
    cargo_options: &[&str],
) -> Result<Step, XtaskError> {
    let step = || {
        cargo(title, &["test", "--locked", "--package", package, "--test", "it"])
            .arguments(cargo_options)
            .arguments(&[test, "--", "--exact", "--ignored"])
    };
    println!("\n==> {title}: building");
    let listed = step().arguments(&["--list"]).output()?;
    if !listed.lines().any(|line| line.strip_suffix(": test") == Some(test)) {
        return Err(XtaskError::new(format!("{package} has no ignored test {test}")));
    }
    Ok(step().arguments(&["--nocapture"]))
}

/// Returns the workspace root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the workspace")
}

/// Returns cargo's target folder, which also holds Python environments and benchmark models.
pub(crate) fn target() -> PathBuf {
    #[expect(clippy::disallowed_methods, reason = "cargo reads the same variable")]
    let configured = std::env::var_os("CARGO_TARGET_DIR");
    root().join(configured.unwrap_or_else(|| "target".into()))
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

    /// Runs the command in `folder` instead of the workspace root.
    pub(crate) fn folder(mut self, folder: impl AsRef<Path>) -> Self {
        self.command.current_dir(folder);
        self
    }

    pub(crate) fn variable(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Returns the command line as a user would type it.
    fn command_line(&self) -> String {
        let words = self.command.get_args().map(|word| word.to_string_lossy());
        format!("{} {}", self.tool, words.collect::<Vec<_>>().join(" "))
    }

    /// Returns the name under which the duration of the step is recorded.
    fn timing_name(&self) -> String {
        if self.tool != "cargo" {
            return self.title.clone();
        }
        let mut command = self.command_line();
        if let Some((end, _)) = command.char_indices().nth(60) {
            command.truncate(end);
            command.push('…');
        }
        format!("{} ({command})", self.title)
    }

    /// Runs the command with inherited standard streams.
    pub(crate) fn run(mut self) -> Result<(), XtaskError> {
        println!("\n==> {}: {}", self.title, self.command_line());
        let start = Instant::now();
        match self.command.status() {
            Ok(status) if status.success() => {
                record_time(self.timing_name(), start.elapsed());
                Ok(())
            }
            Ok(status) => Err(self.failed(&status.to_string())),
            Err(error) => Err(self.failed(&error.to_string())),
        }
    }

    /// Runs the command with inherited standard streams, and ends it after `limit`.
    pub(crate) fn run_within(mut self, limit: Duration) -> Result<(), XtaskError> {
        println!("\n==> {}: {}", self.title, self.command_line());
        let start = Instant::now();
        let mut child = self.command.spawn().map_err(|error| self.failed(&error.to_string()))?;
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => {
                    record_time(self.timing_name(), start.elapsed());
                    return Ok(());
                }
                Ok(Some(status)) => return Err(self.failed(&status.to_string())),
                Ok(None) if start.elapsed() < limit => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Ok(None) => {
                    // Fails if the process has just ended.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(self.failed(&format!("not finished within {limit:?}")));
                }
                Err(error) => return Err(self.failed(&error.to_string())),
            }
        }
    }

    /// Runs the command, prints its standard output, and calls `read` with each line of it.
    pub(crate) fn run_with_lines(mut self, mut read: impl FnMut(&str)) -> Result<(), XtaskError> {
        println!("\n==> {}: {}", self.title, self.command_line());
        let start = Instant::now();
        let spawned = self.command.stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| self.failed(&error.to_string()))?;
        for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
            let line = line.map_err(|error| self.failed(&error.to_string()))?;
            println!("{line}");
            read(&line);
        }
        match child.wait() {
            Ok(status) if status.success() => {
                record_time(self.timing_name(), start.elapsed());
                Ok(())
            }
            Ok(status) => Err(self.failed(&status.to_string())),
            Err(error) => Err(self.failed(&error.to_string())),
        }
    }

    /// Starts the command without waiting for it.
    pub(crate) fn spawn(mut self) -> Result<Child, XtaskError> {
        println!("\n==> {}: {}", self.title, self.command_line());
        self.command.spawn().map_err(|error| self.failed(&error.to_string()))
    }

    /// Runs the command with inherited standard error and returns its standard output.
    pub(crate) fn output_with_inherited_errors(mut self) -> Result<String, XtaskError> {
        self.command.stderr(Stdio::inherit());
        self.output()
    }

    /// Runs the command and returns its standard output.
    pub(crate) fn output(mut self) -> Result<String, XtaskError> {
        let output = self.command.output().map_err(|error| self.failed(&error.to_string()))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(self.failed(&format!("{}\n{stderr}", output.status)));
        }
        String::from_utf8(output.stdout).map_err(|error| self.failed(&error.to_string()))
    }

    fn failed(&self, cause: &str) -> XtaskError {
        let command = self.command_line();
        XtaskError::new(format!("{} failed: {cause}\n  command: {command}", self.title))
    }
}
