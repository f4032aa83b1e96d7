//! [`SdkPrograms`]: the official SDK and the package `openai`, with the programs in `xtask/gateway`.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::python::{self, Packages};
use crate::step::{XtaskError, root, target};

const VERSION: &str = "0.36.0";
/// Time for one program.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Time for a program that fails. The SDK repeats failed requests for longer.
const FAILURE_TIMEOUT: Duration = Duration::from_secs(240);
/// Checks of the official SDK; `cargo xtask conformance` runs them against our own engine.
const CONFORMANCE: &str = "crates/server/tests/python/conformance.py";

/// Python environment for the programs.
pub(super) struct SdkPrograms {
    python: PathBuf,
}

/// A program that has ended.
struct Ended {
    succeeded: bool,
    stdout: String,
    stderr: String,
}

impl Ended {
    /// Returns the last line of the errors.
    fn error(&self) -> &str {
        self.stderr
            .lines()
            .map(str::trim)
            .rfind(|line| !line.is_empty())
            .unwrap_or("it repeats its requests")
    }
}

impl SdkPrograms {
    /// Installs the packages, if they are not installed yet.
    pub(super) fn install() -> Result<Self, XtaskError> {
        let sdk = format!("tinker=={VERSION}");
        let packages = [&*sdk, "numpy", "openai"];
        let python = python::environment(Path::new("cluster/sdk"), &Packages::wheels(&packages))?;
        Ok(Self { python })
    }

    /// Trains, saves, samples and resumes.
    pub(super) fn lifecycle(&self, url: &str, model: &str) -> Result<String, XtaskError> {
        let ended = self.run("lifecycle", url, model, TIMEOUT)?;
        if !ended.succeeded {
            let message = format!("the official SDK failed:\n{}{}", ended.stdout, ended.stderr);
            return Err(XtaskError::new(message));
        }
        Ok(format!("SDK {VERSION}: {}", stages(&ended.stdout)))
    }

    /// Requires that the program of [`lifecycle`](Self::lifecycle) fails after the stages
    /// `completes`, and reports the error.
    pub(super) fn lifecycle_fails(
        &self,
        url: &str,
        model: &str,
        completes: &str,
    ) -> Result<String, XtaskError> {
        let ended = self.run("lifecycle", url, model, FAILURE_TIMEOUT)?;
        if ended.succeeded {
            let message = "the official SDK completes directly against SkyRL; the documentation \
                           says that it fails";
            return Err(XtaskError::new(message));
        }
        let error: String = ended.error().chars().take(90).collect();
        let completed = stages(&ended.stdout);
        if completed != completes {
            let message = format!(
                "the official SDK fails after other stages than the documentation says: \
                 {completed:?} instead of {completes:?}\n{}",
                ended.stderr
            );
            return Err(XtaskError::new(message));
        }
        let after = if completed.is_empty() { "nothing" } else { &completed };
        Ok(format!("SDK {VERSION} fails as documented after {after}: {error}"))
    }

    /// Chats with the package `openai`.
    pub(super) fn chat(&self, url: &str, model: &str) -> Result<String, XtaskError> {
        let ended = self.run("chat", url, model, TIMEOUT)?;
        if ended.succeeded {
            Ok(ended.stdout.trim().to_owned())
        } else {
            Err(XtaskError::new(format!("chat failed:\n{}", ended.stderr)))
        }
    }

    /// Runs the conformance suite. `differences` names the checks that must fail.
    pub(super) fn conformance(
        &self,
        url: &str,
        model: &str,
        differences: &[&str],
    ) -> Result<String, XtaskError> {
        let numbers = target().join("cluster/numbers.json");
        let mut process = Command::new(&self.python)
            .arg(root().join(CONFORMANCE))
            .args([url, model])
            .arg(numbers)
            .env("TINKEX_EXPECTED_FAILURES", differences.join(","))
            // SkyRL cannot cancel a sample.
            .env("TINKEX_CANCELLED_SAMPLES", "4")
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| self.cannot_run(&error))?;
        let mut passed = 0;
        let mut differ = 0;
        for line in process.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
            let line = line.map_err(|error| self.cannot_run(&error))?;
            println!("{line}");
            passed += usize::from(line.starts_with("ok "));
            differ += usize::from(line.starts_with("differs "));
        }
        let status = process.wait().map_err(|error| self.cannot_run(&error))?;
        if !status.success() {
            return Err(XtaskError::new(format!("conformance failed: {status}")));
        }
        Ok(format!("SDK {VERSION}: {passed} passed, {differ} differ"))
    }

    /// Starts the program that trains and prints exact losses to the file `output`.
    pub(super) fn start_steps(
        &self,
        url: &str,
        model: &str,
        steps: usize,
        output: &Path,
    ) -> Result<Child, XtaskError> {
        let stdout = File::create(output).map_err(|error| self.cannot_run(&error))?;
        let stderr = stdout.try_clone().map_err(|error| self.cannot_run(&error))?;
        self.command("steps", url, model)
            .arg(steps.to_string())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .map_err(|error| self.cannot_run(&error))
    }

    fn command(&self, program: &str, url: &str, model: &str) -> Command {
        let mut command = Command::new(&self.python);
        let path = root().join("xtask/gateway").join(program).with_extension("py");
        command.arg(path).args([url, model]).env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::null());
        command
    }

    /// Runs a program to its end and captures its output in files.
    fn run(
        &self,
        program: &str,
        url: &str,
        model: &str,
        timeout: Duration,
    ) -> Result<Ended, XtaskError> {
        println!("\n==> {program}.py {url}");
        let folder = target().join("cluster");
        let stdout = folder.join(program).with_extension("out");
        let stderr = folder.join(program).with_extension("err");
        let file = |path| File::create(path).map_err(|error| self.cannot_run(&error));
        let mut command = self.command(program, url, model);
        command.stdout(file(&stdout)?).stderr(file(&stderr)?);
        let mut process = command.spawn().map_err(|error| self.cannot_run(&error))?;
        let succeeded = wait(&mut process, timeout);
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Ok(Ended { succeeded, stdout: read(stdout), stderr: read(stderr) })
    }

    fn cannot_run(&self, error: &std::io::Error) -> XtaskError {
        XtaskError::new(format!("cannot run {}: {error}", self.python.display()))
    }
}

/// Returns the completed stages, separated by arrows.
fn stages(stdout: &str) -> String {
    stdout.lines().collect::<Vec<_>>().join(" → ")
}

/// Waits for the end of a process and returns whether it succeeded. Kills it after `timeout`.
pub(super) fn wait(process: &mut Child, timeout: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < timeout {
        if let Ok(Some(status)) = process.try_wait() {
            return status.success();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = process.kill();
    let _ = process.wait();
    false
}
