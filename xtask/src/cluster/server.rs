//! [`SkyrlServer`]: a running SkyRL server.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::python::{self, Packages};
use crate::step::{XtaskError, root, target};

use super::model;

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

/// Server process on a loopback address. Stopped when dropped.
pub(super) struct SkyrlServer {
    process: Child,
    url: String,
    log: PathBuf,
}

impl SkyrlServer {
    /// Installs SkyRL if needed, and starts it with an empty database.
    pub(super) fn start(version: &str, port: u16) -> Result<Self, XtaskError> {
        let folder = Path::new("cluster").join(version);
        let skyrl = format!("skyrl=={version}");
        #[expect(clippy::disallowed_methods, reason = "an option of this command")]
        let interpreter = std::env::var("PYTHON312").unwrap_or_else(|_| "python3.12".to_owned());
        let packages = Packages {
            interpreter: &interpreter,
            without_dependencies: &[&skyrl],
            ..Packages::wheels(PACKAGES)
        };
        let python = python::environment(&folder.join("python"), &packages)?;
        let data = target().join(&folder).join("data");
        let _ = std::fs::remove_dir_all(&data);
        let failed = |error: std::io::Error| {
            XtaskError::new(format!("cannot start SkyRL {version}: {error}"))
        };
        std::fs::create_dir_all(&data).map_err(failed)?;
        let log = target().join(&folder).join("server.log");
        let output = File::create(&log).map_err(failed)?;
        let scripts = root().join("xtask/skyrl");
        println!("\n==> SkyRL {version}: starting on port {port}, log {}", log.display());
        let mut command = Command::new(python);
        command
            .arg(scripts.join("serve.py"))
            .arg(port.to_string())
            .args(["--backend", "jax", "--base-model"])
            .arg(model())
            .arg("--checkpoints-base")
            .arg(data.join("checkpoints"))
            .arg("--database-url")
            .arg(format!("sqlite:///{}", data.join("tinker.db").display()))
            .args(["--backend-config", r#"{"max_lora_adapters": 32, "max_lora_rank": 32}"#])
            .env("PYTHONPATH", scripts.join("stand_in"))
            .env("HF_HUB_OFFLINE", "1")
            .env("JAX_PLATFORMS", "cpu")
            .current_dir(&data)
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_err(failed)?)
            .stderr(output);
        start_group(&mut command);
        let process = command.spawn().map_err(failed)?;
        let mut server = Self { process, url: format!("http://127.0.0.1:{port}"), log };
        server.wait_until_ready(port)?;
        Ok(server)
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn log_path(&self) -> String {
        self.log.display().to_string()
    }

    fn wait_until_ready(&mut self, port: u16) -> Result<(), XtaskError> {
        let start = Instant::now();
        while start.elapsed() < START_TIMEOUT {
            if let Ok(Some(status)) = self.process.try_wait() {
                let log = self.log_path();
                return Err(XtaskError::new(format!("SkyRL ended: {status}\n  log: {log}")));
            }
            if is_healthy(port) {
                println!("    ready after {:.0} s", start.elapsed().as_secs_f64());
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        let (seconds, log) = (START_TIMEOUT.as_secs(), self.log_path());
        Err(XtaskError::new(format!("SkyRL did not start within {seconds} s\n  log: {log}")))
    }
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

/// Returns whether the server on `port` responds with status 200.
fn is_healthy(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let request = || {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET /api/v1/healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok::<_, std::io::Error>(response)
    };
    request()
        .is_ok_and(|response| response.lines().next().is_some_and(|line| line.contains(" 200 ")))
}
