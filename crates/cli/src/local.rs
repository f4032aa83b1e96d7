//! [`LocalServer`]: the server on this machine, started or found.
//!
//! A data folder belongs to one server at a time, which the server's own lock sees to. Whoever runs
//! one leaves a note in the folder, so that others find it. A server that lives only as long as a
//! command may end while another command still uses it; the other then goes on with the same folder
//! on the same port, and its client notices nothing but a short wait.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tinkex::{BaseUrl, Env, RetryPolicy, ServiceClient};
use tinkex_files::{AtomicWrite, HubCache};
use tinkex_server::{Server, ServerOptions, ShutdownSummary, StartError};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{CommandError, Exit};
use crate::startup_error::{Starter, startup_error};

/// What a server that asks for no key is sent all the same.
const ANY_KEY: &str = "tml-local";
/// How long another program may take to start its server, or to end it.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a folder that another program uses is tried.
const RHYTHM: Duration = Duration::from_millis(200);

/// What a running server leaves in its data folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ServerInfo {
    pub(crate) address: SocketAddr,
    pub(crate) pid: u32,
    /// Whether it runs until somebody stops it; otherwise it ends with its command.
    pub(crate) stays: bool,
    /// Where the key is that it asks for.
    pub(crate) key_file: Option<PathBuf>,
}

/// A server on this machine.
#[derive(Debug)]
pub(crate) struct LocalServer {
    note: ServerInfo,
    data: PathBuf,
    /// The server, if this program runs it.
    own: Arc<Mutex<Option<Server>>>,
    /// Waits for the other program to end, if this one does not.
    heir: Option<tokio::task::JoinHandle<()>>,
}

impl ServerInfo {
    pub(crate) fn of(server: &Server, stays: bool, key_file: Option<PathBuf>) -> Self {
        Self { address: server.address(), pid: std::process::id(), stays, key_file }
    }

    fn path(data: &Path) -> PathBuf {
        data.join("server.json")
    }

    /// The note in a folder, true or not.
    pub(crate) fn read(data: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(Self::path(data)).ok()?).ok()
    }

    /// Leaves the note; only for who has the folder.
    pub(crate) fn leave(&self, data: &Path) -> Result<(), CommandError> {
        let path = Self::path(data);
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = AtomicWrite::new(&path).single_writer().write(text);
        written.map_err(|why| CommandError::file("written", &path.display().to_string(), &why))
    }

    /// Takes it away again, unless another program has left its own by now.
    pub(crate) fn remove(&self, data: &Path) {
        if Self::read(data).is_some_and(|note| note.pid == self.pid) {
            let _ = std::fs::remove_file(Self::path(data));
        }
    }

    pub(crate) fn url(&self) -> String {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        format!("http://{address}")
    }

    fn key(&self) -> Result<String, CommandError> {
        match &self.key_file {
            None => Ok(ANY_KEY.to_owned()),
            Some(path) => match std::fs::read_to_string(path) {
                Ok(text) => Ok(text.trim().to_owned()),
                Err(why) => Err(CommandError::file("read", &path.display().to_string(), &why)
                    .hint("the server that runs on this machine asks for the key in that file")),
            },
        }
    }

    /// Who answers there.
    pub(crate) async fn ask(&self) -> ProbeResult {
        let Ok(url) = self.url().parse::<BaseUrl>() else { return ProbeResult::Nobody };
        let client = ServiceClient::builder()
            .env(Env::empty())
            .base_url(url)
            .api_key(self.key().unwrap_or_else(|_| ANY_KEY.to_owned()))
            .retry(RetryPolicy::disabled())
            .without_telemetry()
            .build();
        // A key that no client can send is in the file.
        let Ok(client) = client else { return ProbeResult::WithAnotherKey };
        match timeout(Duration::from_secs(2), client.server_capabilities()).await {
            Ok(Ok(_)) => ProbeResult::Server,
            Ok(Err(why)) => match why.status() {
                Some(401 | 403) => ProbeResult::WithAnotherKey,
                // It is there, and has a hard time.
                Some(500..) => ProbeResult::Server,
                _ => ProbeResult::Nobody,
            },
            Err(_) => ProbeResult::Nobody,
        }
    }

    /// Where the key is that a server does not take.
    pub(crate) fn refused(&self) -> String {
        let takes_not = match &self.key_file {
            Some(file) => format!("does not take the key in {}", file.display()),
            None => "asks for a key".to_owned(),
        };
        format!("the server on this machine ({}, process {}) {takes_not}", self.url(), self.pid)
    }
}

/// Who answers where a note says that a server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// A Tinker server that takes the key.
    Server,
    /// One that does not.
    WithAnotherKey,
    /// None.
    Nobody,
}

/// What to do about a server that takes another key.
pub(crate) const ANOTHER_KEY: &str = "put its key back into the file, or start it again; or use it with \
                                      --base-url and TINKER_API_KEY in place of --local";

impl LocalServer {
    /// The server of the user's data folder: the one that runs there, or a new one.
    pub(crate) async fn open(env: &Env) -> Result<Self, CommandError> {
        let data = data_folder(env)?;
        let mut options = ServerOptions::new(&data);
        options.hub_cache = hub_cache(env);
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Server::start(options.clone()).await {
                Ok(server) => {
                    let note = ServerInfo::of(&server, false, None);
                    note.leave(&data)?;
                    let own = Arc::new(Mutex::new(Some(server)));
                    return Ok(Self { note, data, own, heir: None });
                }
                Err(StartError::DataDirInUse(_)) => {}
                Err(why) => return Err(startup_error(&why, Starter::Local)),
            }
            if let Some(note) = ServerInfo::read(&data) {
                match note.ask().await {
                    ProbeResult::Server => {
                        let own = Arc::default();
                        let heir = (!note.stays).then(|| inherit(options, &note, Arc::clone(&own)));
                        return Ok(Self { note, data, own, heir });
                    }
                    ProbeResult::WithAnotherKey => {
                        // If the file cannot be read, that is the reason.
                        note.key()?;
                        let why = CommandError::new(Exit::Credentials, note.refused());
                        return Err(why.hint(ANOTHER_KEY));
                    }
                    ProbeResult::Nobody => {}
                }
            }
            if Instant::now() > deadline {
                let why = format!("{} is in use, but no server answers for it", data.display());
                return Err(CommandError::new(Exit::Temporary, why)
                    .hint("wait for the other program to end, or name another folder with TINKEX_DATA_DIR"));
            }
            sleep(RHYTHM).await;
        }
    }

    pub(crate) fn url(&self) -> Result<BaseUrl, CommandError> {
        Ok(self.note.url().parse()?)
    }

    pub(crate) fn key(&self) -> Result<String, CommandError> {
        self.note.key()
    }

    /// Stops the server if it is this program's own.
    pub(crate) async fn stop(self) -> Option<ShutdownSummary> {
        if let Some(heir) = &self.heir {
            heir.abort();
        }
        let server = self.own.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let mine = ServerInfo { pid: std::process::id(), ..self.note };
        mine.remove(&self.data);
        Some(server.stop().await)
    }
}

/// Goes on with a folder and a port once the program that has them ends.
#[expect(clippy::disallowed_methods, reason = "`LocalServer` owns it, and ends it")]
fn inherit(
    mut options: ServerOptions,
    note: &ServerInfo,
    own: Arc<Mutex<Option<Server>>>,
) -> tokio::task::JoinHandle<()> {
    options.address = note.address;
    tokio::spawn(async move {
        loop {
            sleep(RHYTHM).await;
            if let Ok(server) = Server::start(options.clone()).await {
                // Others can do without the note: they wait until this one ends.
                let _ = ServerInfo::of(&server, false, None).leave(&options.data_dir);
                *own.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
                return;
            }
        }
    })
}

/// Where a local server keeps everything, unless it is told otherwise.
pub(crate) fn data_folder(env: &Env) -> Result<PathBuf, CommandError> {
    if let Some(folder) = env.get("TINKEX_DATA_DIR") {
        return Ok(folder.into());
    }
    Ok(data_home(env)?.join("server"))
}

/// Where this program keeps what is the user's.
pub(crate) fn data_home(env: &Env) -> Result<PathBuf, CommandError> {
    let base = match (env.get("XDG_DATA_HOME"), env.get("LOCALAPPDATA"), env.get("HOME")) {
        // By its own rules a relative path there is to be ignored.
        (Some(folder), _, _) if Path::new(folder).is_absolute() => PathBuf::from(folder),
        (_, Some(folder), None) => PathBuf::from(folder),
        (_, _, Some(home)) => PathBuf::from(home).join(".local/share"),
        _ => {
            return Err(CommandError::usage("there is no home folder to keep data in (HOME)")
                .hint("name a folder with TINKEX_DATA_DIR"));
        }
    };
    Ok(base.join("tinkex"))
}

/// The hub cache of this user, if there is one.
pub(crate) fn hub_cache(env: &Env) -> Option<PathBuf> {
    let cache = HubCache::locate(|name| env.get(name).map(Into::into))?;
    cache.folder().is_dir().then(|| cache.folder().to_owned())
}
