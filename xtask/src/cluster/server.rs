//! [`SkyrlServer`]: a running SkyRL server.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::python::{self, Packages};
use crate::step::{XtaskError, root, target};

use super::http;

/// Time for the server to load its model and to respond to a request.
const START_TIMEOUT: Duration = Duration::from_secs(180);
/// Time between SIGTERM and SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Packages that SkyRL's server imports with its JAX backend. SkyRL's own requirements also contain
/// the packages of the GPU backends, which take several gigabytes.
const PACKAGES: &[&str] = &[
    "jax>=0.8,<1.0",
    "flax>=0.12.10",
    "optax>=0.2.5",
    "tinker>=0.25.0,<0.26.0",
    "fastapi[standard]",
    "sqlmodel",
    "sqlalchemy[asyncio]",
    "aiosqlite",
    "psycopg2-binary",
    "asyncpg",
    "safetensors>=0.6.2",
    "transformers>=5.6.1,<=5.16.1",
    "tokenizers>=0.23.1",
    "cloudpathlib>=0.23.0",
    "zstandard>=0.23.0",
    "xxhash>=3.0.0",
    "pillow",
    "rich",
    "typer",
    "datasets",
    "aiohttp",
];

/// Settings of a server.
#[derive(Clone)]
pub(super) struct SkyrlSettings {
    /// Release of SkyRL.
    pub(super) version: &'static str,
    pub(super) port: u16,
    /// Folder of the base model. Its path is the name of the model.
    pub(super) model: PathBuf,
}

impl SkyrlSettings {
    /// Returns the folder of the data and of the log, which depends on the port.
    fn folder(&self) -> PathBuf {
        target().join("cluster").join(self.version).join(self.port.to_string())
    }
}

/// Server process on a loopback address. Stopped when dropped.
pub(super) struct SkyrlServer {
    settings: SkyrlSettings,
    python: PathBuf,
    process: Child,
    url: String,
}

impl SkyrlServer {
    /// Installs SkyRL if needed, and starts it with an empty database.
    pub(super) fn start(settings: SkyrlSettings) -> Result<Self, XtaskError> {
        let python = install(settings.version)?;
        let folder = settings.folder();
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(folder.join("data")).map_err(|error| start_error(&error))?;
        let process = spawn(&settings, &python)?;
        let url = format!("http://127.0.0.1:{}", settings.port);
        let mut server = Self { settings, python, process, url };
        server.wait_until_ready()?;
        Ok(server)
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Returns the name of the base model.
    pub(super) fn model(&self) -> String {
        self.settings.model.display().to_string()
    }

    pub(super) fn log_path(&self) -> String {
        self.settings.folder().join("server.log").display().to_string()
    }

    /// Kills the server and its engine with SIGKILL. Database and checkpoints remain.
    pub(super) fn kill(&mut self) {
        stop_group(&mut self.process, "-KILL");
        let _ = self.process.wait();
    }

    /// Starts the server again after [`kill`](Self::kill), with its database and checkpoints.
    pub(super) fn start_again(&mut self) -> Result<(), XtaskError> {
        self.process = spawn(&self.settings, &self.python)?;
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<(), XtaskError> {
        let start = Instant::now();
        while start.elapsed() < START_TIMEOUT {
            if let Ok(Some(status)) = self.process.try_wait() {
                let log = self.log_path();
                return Err(XtaskError::new(format!("SkyRL ended: {status}\n  log: {log}")));
            }
            if http::get(self.settings.port, "/api/v1/healthz").is_some() {
                println!("    SkyRL is ready after {:.0} s", start.elapsed().as_secs_f64());
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        let seconds = START_TIMEOUT.as_secs();
        let log = self.log_path();
        Err(XtaskError::new(format!("SkyRL did not start within {seconds} s\n  log: {log}")))
    }
}

/// Installs a release of SkyRL, if it is not installed yet. Returns its Python interpreter.
fn install(version: &str) -> Result<PathBuf, XtaskError> {
    let skyrl = format!("skyrl=={version}");
    #[expect(clippy::disallowed_methods, reason = "an option of this command")]
    let interpreter = std::env::var("PYTHON312").unwrap_or_else(|_| "python3.12".to_owned());
    let packages = Packages {
        interpreter: &interpreter,
        without_dependencies: &[&skyrl],
        ..Packages::wheels(PACKAGES)
    };
    python::environment(&Path::new("cluster").join(version).join("python"), &packages)
}

fn start_error(error: &std::io::Error) -> XtaskError {
    XtaskError::new(format!("cannot start SkyRL: {error}"))
}

/// Starts the process. It appends to the log of an earlier process.
fn spawn(settings: &SkyrlSettings, python: &Path) -> Result<Child, XtaskError> {
    let folder = settings.folder();
    let scripts = root().join("xtask/skyrl");
    let data = folder.join("data");
    let log = folder.join("server.log");
    let output = File::options().create(true).append(true).open(&log);
    let output = output.map_err(|error| start_error(&error))?;
    let SkyrlSettings { version, port, model } = settings;
    println!("\n==> SkyRL {version}: starting on port {port}, log {}", log.display());
    let mut command = Command::new(python);
    command
        .arg(scripts.join("serve.py"))
        .arg(port.to_string())
        .args(["--backend", "jax", "--base-model"])
        .arg(model)
        .arg("--checkpoints-base")
        .arg(data.join("checkpoints"))
        .arg("--database-url")
        .arg(format!("sqlite:///{}", data.join("tinker.db").display()))
        .args(["--backend-config", r#"{"max_lora_adapters": 64, "max_lora_rank": 32}"#])
        .env("PYTHONPATH", scripts.join("stand_in"))
        .env("HF_HUB_OFFLINE", "1")
        .env("JAX_PLATFORMS", "cpu")
        .current_dir(&data)
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(|error| start_error(&error))?)
        .stderr(output);
    start_group(&mut command);
    command.spawn().map_err(|error| start_error(&error))
}

impl Drop for SkyrlServer {
    fn drop(&mut self) {
        stop_group(&mut self.process, "-TERM");
        let start = Instant::now();
        while start.elapsed() < STOP_TIMEOUT {
            if matches!(self.process.try_wait(), Ok(Some(_))) {
                break;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        stop_group(&mut self.process, "-KILL");
        let _ = self.process.wait();
    }
}

/// Starts the server in a process group of its own. The server runs its engine as another process,
/// and a signal to the group reaches both.
#[cfg(unix)]
fn start_group(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

/// Starts the server without a process group.
#[cfg(not(unix))]
fn start_group(_command: &mut Command) {}

/// Sends a signal to the server and its engine.
#[cfg(unix)]
fn stop_group(server: &mut Child, signal: &str) {
    let group = format!("-{}", server.id());
    let _ = crate::step::tool("stop", "kill", &[signal, "--", &group]).output();
}

/// Kills the server. Its engine keeps running: there is no group to signal.
#[cfg(not(unix))]
fn stop_group(server: &mut Child, _signal: &str) {
    let _ = server.kill();
}
