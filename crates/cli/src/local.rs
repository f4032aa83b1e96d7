//! [`LocalServer`]: the server on this machine, found or started by `--local`.
//!
//! A data folder is used by one server at a time; the server's lock enforces this. The process that
//! runs the server writes a [`ServerInfo`] file into the folder, by which other commands find it.
//!
//! The server that a command starts ends with the command, although another command may still use
//! it. The other command then takes over: it starts a server on the same folder and port, and its
//! client retries through the short outage.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tinkex::{BaseUrl, CallOptions, Env, ServiceClient};
use tinkex_files::{AtomicWrite, HubCache};
use tinkex_server::{
    Server, ServerLimits, ServerOptions, ShutdownSummary, StartError, api_key_file,
};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{CommandError, Exit};
use crate::local_models::{LocalModels, StartedServer, start_server};
use crate::port_owner::belongs_to_another_user;
use crate::startup_error::{Starter, startup_error};

/// API key for servers without a key (`tinkex serve --no-key`): the SDK always sends one.
pub(crate) const PLACEHOLDER_KEY: &str = "tml-local";
/// Maximum time that another process may take to start or stop its server.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a data folder in use is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum time that a running server may take to respond to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Contents of `server.json` in the data folder, by which other processes find the running server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ServerInfo {
    /// Base URL for clients on this machine.
    pub(crate) url: String,
    /// Address of the listening socket, for a process that takes over.
    address: SocketAddr,
    pub(crate) pid: u32,
    /// Whether the server runs until it is stopped (`tinkex serve`), not only during a command.
    permanent: bool,
    /// File with the API key that the server requires.
    key_file: Option<PathBuf>,
    /// Whether the server has created the file, which therefore only its owner may access.
    #[serde(default)]
    key_created: bool,
    /// Models that the server serves from paths, by name.
    #[serde(default)]
    models: Vec<(String, PathBuf)>,
}

/// File with the API key that a server requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyFile {
    /// The user's file, of `--api-key-file`.
    Given(PathBuf),
    /// The file that the server creates in its data folder.
    Created(PathBuf),
}

impl KeyFile {
    /// Returns the file that a server with this data folder creates.
    pub(crate) fn created(data: &Path) -> Self {
        Self::Created(api_key_file(data))
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Given(path) | Self::Created(path) => path,
        }
    }
}

/// Result of probing the URL of a [`ServerInfo`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// A Tinker server responds and accepts the key.
    Available,
    /// A server responds and rejects the key, or the key file is invalid.
    KeyRejected,
    /// No Tinker server responds.
    Unavailable,
}

impl ServerInfo {
    pub(crate) fn new(server: &Server, permanent: bool, key_file: Option<KeyFile>) -> Self {
        Self {
            url: server.base_url(),
            address: server.address(),
            pid: std::process::id(),
            permanent,
            key_created: matches!(key_file, Some(KeyFile::Created(_))),
            key_file: key_file.map(|file| file.path().to_owned()),
            models: Vec::new(),
        }
    }

    /// Adds the models that the server serves from paths.
    pub(crate) fn with_models(self, models: Vec<(String, PathBuf)>) -> Self {
        let absolute = |path: PathBuf| std::fs::canonicalize(&path).unwrap_or(path);
        let models = models.into_iter().map(|(name, path)| (name, absolute(path))).collect();
        Self { models, ..self }
    }

    fn path(data: &Path) -> PathBuf {
        data.join("server.json")
    }

    /// Reads the file of a data folder. It may be outdated: a killed server does not remove it.
    pub(crate) fn read(data: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(Self::path(data)).ok()?).ok()
    }

    /// Writes the file. Only the process that holds the folder's lock may call this.
    pub(crate) fn write(&self, data: &Path) -> Result<(), CommandError> {
        let path = Self::path(data);
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = AtomicWrite::new(&path).single_writer().write(text);
        written.map_err(|error| CommandError::file("write", path.display(), &error))
    }

    /// Removes the file, unless another process has replaced it.
    pub(crate) fn remove(&self, data: &Path) {
        if Self::read(data).is_some_and(|info| info.pid == self.pid) {
            let _ = std::fs::remove_file(Self::path(data));
        }
    }

    /// Returns whether the server requires an API key.
    pub(crate) fn needs_key(&self) -> bool {
        self.key_file.is_some()
    }

    /// Reads the API key that the server requires.
    pub(crate) fn key(&self) -> Result<String, CommandError> {
        let Some(path) = &self.key_file else { return Ok(PLACEHOLDER_KEY.to_owned()) };
        let key = if self.key_created {
            tinkex_server::read_api_key(path).map(|key| key.expose().to_owned())
        } else {
            std::fs::read_to_string(path).map(|text| text.trim().to_owned())
        };
        key.map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::PermissionDenied if self.key_created => format!(
                    "Stop the server and remove the file to get a new key; or, if no other user has \
                     read it, run `chmod 600 {}`.",
                    path.display()
                ),
                _ => "Restore the file: the running local server requires the API key in it."
                    .to_owned(),
            };
            CommandError::file("read", format!("API key file {}", path.display()), &error)
                .hint(hint)
        })
    }

    /// Checks whether a server responds at the URL and accepts the key.
    pub(crate) async fn probe(&self) -> ProbeResult {
        let Ok(url) = self.url.parse::<BaseUrl>() else { return ProbeResult::Unavailable };
        // The information may be outdated: do not send the key to a program of another user.
        let key_file = self.key_file.as_deref();
        if key_file.is_some_and(|file| belongs_to_another_user(self.address.port(), file)) {
            return ProbeResult::Unavailable;
        }
        let client = ServiceClient::builder()
            .env(Env::empty())
            .base_url(url)
            .api_key(self.key().unwrap_or_else(|_| PLACEHOLDER_KEY.to_owned()))
            .options(CallOptions::without_retries())
            .without_telemetry()
            .build();
        // The builder refuses a malformed key.
        let Ok(client) = client else { return ProbeResult::KeyRejected };
        match timeout(PROBE_TIMEOUT, client.server_capabilities()).await {
            Ok(Ok(_)) => ProbeResult::Available,
            Ok(Err(error)) => match error.status() {
                Some(401 | 403) => ProbeResult::KeyRejected,
                // The server runs; the command retries its errors.
                Some(500..) => ProbeResult::Available,
                _ => ProbeResult::Unavailable,
            },
            Err(_) => ProbeResult::Unavailable,
        }
    }

    /// Returns the error message for [`ProbeResult::KeyRejected`].
    pub(crate) fn key_rejected(&self) -> String {
        let reason = match &self.key_file {
            Some(file) => format!("rejected the API key in {}", file.display()),
            None => "requires an API key".to_owned(),
        };
        format!("the local server at {} (process {}) {reason}", self.url, self.pid)
    }
}

/// Hint for [`ProbeResult::KeyRejected`].
pub(crate) const KEY_REJECTED_HINT: &str = "Restore the server's key in the file or restart the server; or use the server with --base-url \
     and TINKER_API_KEY instead of --local.";

/// Server of the user's data folder, run by this process or by another one.
#[derive(Debug)]
pub(crate) struct LocalServer {
    info: ServerInfo,
    data: PathBuf,
    /// The server, if this process runs it.
    own: Arc<Mutex<Option<Server>>>,
    /// Task that starts a server here once the other process's temporary server ends.
    takeover: Option<tokio::task::JoinHandle<()>>,
}

impl LocalServer {
    /// Connects to the server of the user's data folder, or starts one. A server that is started
    /// serves the model at `model`, if it is given, and the models of earlier commands.
    pub(crate) async fn open(variables: &Env, model: Option<&Path>) -> Result<Self, CommandError> {
        let data = data_folder(variables)?;
        let known = LocalModels::read(&data);
        let mut options = ServerOptions::new(&data);
        options.limits = ServerLimits::for_this_process();
        options.hub_cache = hub_cache(variables);
        options.create_api_key = true;
        options.models =
            model.map(|path| (known.name_for(path), path.to_owned())).into_iter().collect();
        let deadline = Instant::now() + HANDOVER_TIMEOUT;
        loop {
            match start_server(&options, known.existing()).await {
                Ok(StartedServer { server, models, .. }) => {
                    let key_file = Some(KeyFile::created(&data));
                    let info = ServerInfo::new(&server, false, key_file).with_models(models);
                    info.write(&data)?;
                    if model.is_some() {
                        LocalModels::store(&data, &options.models)?;
                    }
                    let own = Arc::new(Mutex::new(Some(server)));
                    return Ok(Self { info, data, own, takeover: None });
                }
                Err(StartError::DataDirInUse(_)) => {}
                Err(error) => return Err(startup_error(&error, Starter::Local)),
            }
            if let Some(info) = ServerInfo::read(&data) {
                match info.probe().await {
                    ProbeResult::Available => {
                        let own = Arc::default();
                        let takeover = (!info.permanent)
                            .then(|| spawn_takeover(options, &info, Arc::clone(&own)));
                        return Ok(Self { info, data, own, takeover });
                    }
                    ProbeResult::KeyRejected => {
                        // If the key file cannot be read, report that error instead.
                        info.key()?;
                        let error = CommandError::new(Exit::Credentials, info.key_rejected());
                        return Err(error.hint(KEY_REJECTED_HINT));
                    }
                    ProbeResult::Unavailable => {}
                }
            }
            if Instant::now() > deadline {
                let message =
                    format!("data folder {} is in use, but no server responds", data.display());
                let hint = "Wait for the other process to end, or set TINKEX_DATA_DIR to another \
                            folder.";
                return Err(CommandError::new(Exit::Temporary, message).hint(hint));
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    pub(crate) fn url(&self) -> Result<BaseUrl, CommandError> {
        Ok(self.info.url.parse()?)
    }

    pub(crate) fn key(&self) -> Result<String, CommandError> {
        self.info.key()
    }

    /// Returns the name under which the server serves the model at a path.
    ///
    /// # Errors
    ///
    /// Returns an error if it does not serve the model. The hint has the command that serves it.
    pub(crate) fn model_name(&self, path: &Path) -> Result<String, CommandError> {
        let served = self.info.models.iter().find(|(_, known)| known == path);
        if let Some((name, _)) = served {
            return Ok(name.clone());
        }
        let ServerInfo { url, pid, permanent, .. } = &self.info;
        let shown = path.display();
        let message =
            format!("the local server at {url} (process {pid}) does not serve the model {shown}");
        let name = LocalModels::read(&self.data).name_for(path);
        let model = crate::format::shell_quote(&format!("{name}={shown}"));
        let is_own = *pid == std::process::id();
        let hint = match (permanent, is_own) {
            (true, _) => format!("Stop the server, and start: tinkex serve --model {model}"),
            (false, true) => format!(
                "End this command and run it again with the model; or, to serve several models, \
                 first start: tinkex serve --model {model}"
            ),
            (false, false) => format!(
                "Wait until the command that runs the server ends; or, to share one server between \
                 commands, first start: tinkex serve --model {model}"
            ),
        };
        Err(CommandError::new(Exit::Failed, message).hint(hint))
    }

    /// Returns the URL of the dashboard with a one-time code, if this process runs the server.
    pub(crate) fn dashboard_url(&self) -> Option<String> {
        let own = self.own.lock();
        own.as_ref().map(Server::dashboard_url)
    }

    /// Stops the server, if this process runs it.
    pub(crate) async fn stop(self) -> Option<ShutdownSummary> {
        if let Some(takeover) = &self.takeover {
            takeover.abort();
        }
        let server = self.own.lock().take()?;
        let own_info = ServerInfo { pid: std::process::id(), ..self.info };
        own_info.remove(&self.data);
        Some(server.stop().await)
    }
}

/// Starts a server on the same folder and port once the process that uses them ends.
#[expect(clippy::disallowed_methods, reason = "`LocalServer` owns the task and aborts it")]
fn spawn_takeover(
    mut options: ServerOptions,
    info: &ServerInfo,
    own: Arc<Mutex<Option<Server>>>,
) -> tokio::task::JoinHandle<()> {
    options.address = info.address;
    // The client of this command goes on with the key of the other server, which an older version
    // may have started without one.
    options.create_api_key = info.key_created;
    options.models.clear();
    tokio::spawn(async move {
        loop {
            sleep(RETRY_INTERVAL).await;
            let kept = LocalModels::read(&options.data_dir).existing();
            if let Ok(started) = start_server(&options, kept).await {
                let StartedServer { server, models, .. } = started;
                // Without the file, other commands wait until this one ends.
                let key = options.create_api_key.then(|| KeyFile::created(&options.data_dir));
                let info = ServerInfo::new(&server, false, key).with_models(models);
                let _ = info.write(&options.data_dir);
                *own.lock() = Some(server);
                return;
            }
        }
    })
}

/// Returns the default data folder of the local server: `TINKEX_DATA_DIR`, or `server` below
/// [`data_home`].
pub(crate) fn data_folder(variables: &Env) -> Result<PathBuf, CommandError> {
    if let Some(folder) = variables.get("TINKEX_DATA_DIR") {
        return Ok(folder.into());
    }
    Ok(data_home(variables)?.join("server"))
}

/// Returns the folder for the program's persistent data.
pub(crate) fn data_home(variables: &Env) -> Result<PathBuf, CommandError> {
    let base = match (
        variables.get("XDG_DATA_HOME"),
        variables.get("LOCALAPPDATA"),
        variables.get("HOME"),
    ) {
        // The XDG specification says to ignore relative paths.
        (Some(folder), _, _) if Path::new(folder).is_absolute() => PathBuf::from(folder),
        (_, Some(folder), None) => PathBuf::from(folder),
        (_, _, Some(home)) => PathBuf::from(home).join(".local/share"),
        _ => {
            return Err(CommandError::usage("cannot locate the data folder: HOME is not set")
                .hint("Set TINKEX_DATA_DIR to a folder."));
        }
    };
    Ok(base.join("tinkex"))
}

/// Returns the user's Hugging Face hub cache, if it exists.
pub(crate) fn hub_cache(variables: &Env) -> Option<PathBuf> {
    let cache = HubCache::locate(|name| variables.get(name).map(Into::into))?;
    cache.folder().is_dir().then(|| cache.folder().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_stored_url_is_the_one_that_the_server_reports() {
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let data = tempfile::tempdir().unwrap();
            let mut options = ServerOptions::new(data.path()).api_key("tml-0123456789");
            options.address = address.parse().unwrap();
            // Machines without IPv6 cannot listen on its addresses.
            let Ok(server) = Server::start(options).await else { continue };
            ServerInfo::new(&server, true, None).write(data.path()).unwrap();
            let info = ServerInfo::read(data.path()).unwrap();
            assert_eq!(info.url, server.base_url());
            // The server was reached: it rejected the placeholder key.
            assert_eq!(info.probe().await, ProbeResult::KeyRejected, "{address}");
            server.stop().await;
        }
    }
}
