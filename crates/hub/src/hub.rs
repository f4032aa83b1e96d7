//! [`Hub`]: the settings of a hub and of its local cache. Finds the files of a tokenizer in the
//! cache or on the hub.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tinkex_files::HubCache;
use tinkex_wire::Secret;

use crate::api::HubApi;
use tinkex_transport::config::{BaseUrl, Env, is_on};
use tinkex_transport::error::{Error, ErrorKind, Result};
use tinkex_transport::http::HttpService;
use tinkex_transport::http::custom::CatchPanics;
use tinkex_transport::http::network::Network;

use crate::cache::TokenizerCache;
use crate::file::cache_io;
use crate::snapshot::SnapshotDownload;
use crate::tokenizer_id::TokenizerId;

/// The public Hugging Face hub.
const PUBLIC_HUB: &str = "https://huggingface.co";
/// Revision of a [`TokenizerId`] without a revision.
const DEFAULT_REVISION: &str = "main";

/// A Hugging Face hub and its local cache, which is shared with the Python tools. Cheap to clone.
///
/// | Setting | Environment variable | Default |
/// |---|---|---|
/// | [`endpoint`](Hub::endpoint) | `HF_ENDPOINT` | `https://huggingface.co` |
/// | [`token`](Hub::token) | `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, or the file `HF_TOKEN_PATH` or `HF_HOME/token` | none |
/// | [`cache`](Hub::cache) | `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME/hub`, `XDG_CACHE_HOME/huggingface/hub` | `~/.cache/huggingface/hub` |
/// | [`offline`](Hub::offline) | `HF_HUB_OFFLINE` | false |
///
/// ```no_run
/// use tinkex_hub::{Hub, TokenizerId};
/// use tinkex_transport::Result;
/// use tinkex_transport::config::Env;
///
/// # async fn run() -> Result<()> {
/// let hub = Hub::from_env(&Env::from_process())?.endpoint("https://hub.example".parse()?);
/// let folder = hub.tokenizer_files(&TokenizerId::new("Qwen/Qwen3-8B")?).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Hub {
    endpoint: BaseUrl,
    token: Option<Secret>,
    cache: HubCache,
    /// Where offline mode was set; `None` if offline mode is off.
    offline: Option<OfflineSource>,
    http: Option<Arc<dyn HttpService>>,
    env: Env,
}

/// Where offline mode was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OfflineSource {
    /// In the environment variable `HF_HUB_OFFLINE`.
    Environment,
    /// By the program, with [`Hub::offline`].
    Caller,
}

impl fmt::Display for OfflineSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Environment => "HF_HUB_OFFLINE",
            Self::Caller => "Hub::offline, or --offline on the command line",
        })
    }
}

impl Hub {
    /// Creates a hub from environment variables.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if `HF_ENDPOINT` is not a URL.
    pub fn from_env(env: &Env) -> Result<Self> {
        let endpoint = env.get("HF_ENDPOINT").unwrap_or(PUBLIC_HUB).parse();
        let endpoint = endpoint.map_err(|error: Error| error.during("reading HF_ENDPOINT"))?;
        let variable = |name: &str| env.get(name).map(Into::into);
        // Without a home folder, use a folder in the working directory.
        let home = tinkex_files::hub_home(variable).unwrap_or_else(|| ".cache/huggingface".into());
        let cache = HubCache::locate(variable).unwrap_or_else(|| HubCache::new(home.join("hub")));
        Ok(Self {
            endpoint,
            token: token(env, &home),
            cache,
            offline: env
                .get("HF_HUB_OFFLINE")
                .is_some_and(is_on)
                .then_some(OfflineSource::Environment),
            http: None,
            env: env.clone(),
        })
    }

    /// Sets the URL of the hub.
    #[must_use]
    pub fn endpoint(mut self, url: BaseUrl) -> Self {
        self.endpoint = url;
        self
    }

    /// Sets the access token, which is sent to the hub's own origin only.
    #[must_use]
    pub fn token(mut self, token: impl Into<Secret>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Sets the folder of the local cache.
    #[must_use]
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = HubCache::new(folder);
        self
    }

    /// Sets offline mode, in which no request is sent to the hub.
    #[must_use]
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = offline.then_some(OfflineSource::Caller);
        self
    }

    /// Sets the service that sends requests: a proxy, a recorder or a fake.
    #[must_use]
    pub fn http(self, service: impl HttpService) -> Self {
        self.shared_http(CatchPanics::wrap(service))
    }

    /// Sets the service that sends requests, for a service that other clients use too.
    #[doc(hidden)]
    #[must_use]
    pub fn shared_http(mut self, service: Arc<dyn HttpService>) -> Self {
        self.http = Some(service);
        self
    }

    /// Returns the URL of the hub.
    #[must_use]
    pub fn url(&self) -> &BaseUrl {
        &self.endpoint
    }

    /// Returns the folder of the local cache.
    #[must_use]
    pub fn cache_folder(&self) -> &Path {
        self.cache.folder()
    }

    /// Returns the folder with the files of a tokenizer, from the cache or else from the hub. A
    /// cached tokenizer without its `tokenizer_config.json` is used only if the hub is not
    /// available.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the repository has no tokenizer; [`ErrorKind::Connect`] if it is
    /// not cached and the hub cannot be reached. The message contains the cache folder and the URL
    /// of the hub.
    ///
    /// # Cancel safety
    /// Dropping the future stops a download; the next call resumes the download.
    pub async fn tokenizer_files(&self, id: &TokenizerId) -> Result<PathBuf> {
        let cache = TokenizerCache::new(&self.cache, id);
        let revision = id.revision().unwrap_or(DEFAULT_REVISION);
        let cached = {
            let cache = cache.clone();
            let revision = revision.to_owned();
            cache_io(move || Ok(cache.snapshot(&revision))).await?
        };
        let folder = match (cached, self.offline) {
            (Some(cached), _) if cached.complete => cached.folder,
            (Some(incomplete), Some(_)) => incomplete.folder,
            (None, Some(source)) => {
                let reason = format!("offline mode is set ({source})");
                return Err(self.not_cached(&cache, ErrorKind::NotFound, &reason));
            }
            (incomplete, None) => match (self.download(&cache, id, revision).await, incomplete) {
                (Ok(folder), _) => folder,
                (Err(error), Some(incomplete)) => {
                    tracing::warn!(
                        %id, %error,
                        "using the cached tokenizer without end token and chat template"
                    );
                    incomplete.folder
                }
                (Err(error), None) if error.status().is_none() && error.is_retryable() => {
                    let reason = format!("{} cannot be reached", self.endpoint);
                    let unreachable = self.not_cached(&cache, error.kind(), &reason);
                    return Err(unreachable.with_source(error));
                }
                (Err(error), None) => return Err(error),
            },
        };
        Ok(folder)
    }

    /// Downloads all files of a revision into the cache. Returns the folder of the snapshot.
    async fn download(
        &self,
        cache: &TokenizerCache,
        id: &TokenizerId,
        revision: &str,
    ) -> Result<PathBuf> {
        let api = HubApi::new(self)?;
        SnapshotDownload { api: &api, cache, id, revision }.run().await
    }

    /// Returns the service that sends requests, creating one if none was set.
    pub(crate) fn http_service(&self) -> Result<Arc<dyn HttpService>> {
        Ok(match &self.http {
            Some(http) => Arc::clone(http),
            None => Arc::new(Network::new(&self.env)?),
        })
    }

    pub(crate) fn access_token(&self) -> Option<&Secret> {
        self.token.as_ref()
    }

    /// Returns where offline mode was set; `None` if it is not.
    pub(crate) fn offline_source(&self) -> Option<OfflineSource> {
        self.offline
    }

    /// Error returned when a tokenizer is not cached and the hub is not available for `reason`.
    fn not_cached(&self, cache: &TokenizerCache, kind: ErrorKind, reason: &str) -> Error {
        let folder = cache.folder().display();
        let hint = "Download it once on a machine that reaches the hub and copy the cache \
                    (HF_HOME), set another hub (HF_ENDPOINT), or pass a folder with its files.";
        Error::new(kind, format!("not in the cache ({folder}), and {reason}")).with_hint(hint)
    }
}

/// Finds the access token in the environment variables, or else in the token file.
fn token(env: &Env, home: &Path) -> Option<Secret> {
    let named = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter().find_map(|name| env.get(name));
    if let Some(token) = named {
        return Some(token.trim().into());
    }
    let file = env.get("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
    let stored = std::fs::read_to_string(file).ok()?;
    Some(stored.trim()).filter(|token| !token.is_empty()).map(Secret::from)
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.is_some())
            .field("cache", &self.cache.folder())
            .field("offline", &self.offline.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(pairs: &[(&str, &str)]) -> Hub {
        Hub::from_env(&Env::from_pairs(pairs.iter().copied())).unwrap()
    }

    #[test]
    fn the_cache_folder_is_the_one_of_the_python_tools() {
        let cache = |pairs: &[(&str, &str)]| hub(pairs).cache.folder().display().to_string();
        assert_eq!(cache(&[("HOME", "/h")]), "/h/.cache/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")]), "/f/hub");
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HUGGINGFACE_HUB_CACHE", "/g")]), "/g");
        assert_eq!(cache(&[("HUGGINGFACE_HUB_CACHE", "/g"), ("HF_HUB_CACHE", "/c")]), "/c");
    }

    #[test]
    fn the_token_comes_from_a_variable_or_a_file_and_is_not_printed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(folder.path().join("other"), "hf_other").unwrap();
        let home = folder.path().to_str().unwrap();
        let other = folder.path().join("other");
        let token = |pairs: &[(&str, &str)]| hub(pairs).token.map(|t| t.expose().to_owned());
        let file = [("HF_HOME", home)];
        assert_eq!(token(&file).as_deref(), Some("hf_file"));
        let path = [("HF_HOME", home), ("HF_TOKEN_PATH", other.to_str().unwrap())];
        assert_eq!(token(&path).as_deref(), Some("hf_other"));
        let old = [("HF_HOME", home), ("HUGGING_FACE_HUB_TOKEN", "hf_old")];
        assert_eq!(token(&old).as_deref(), Some("hf_old"));
        let both = [("HF_TOKEN", "hf_new"), ("HUGGING_FACE_HUB_TOKEN", "hf_old")];
        assert_eq!(token(&both).as_deref(), Some("hf_new"));
        assert_eq!(token(&[("HF_HOME", "/nonexistent")]), None);
        assert!(!format!("{:?}", hub(&both)).contains("hf_"));
    }

    #[test]
    fn the_endpoint_comes_from_the_environment() {
        let endpoint = |pairs: &[(&str, &str)]| hub(pairs).endpoint.to_string();
        assert_eq!(endpoint(&[]), PUBLIC_HUB);
        assert_eq!(
            endpoint(&[("HF_ENDPOINT", "https://hf.test/mirror/")]),
            "https://hf.test/mirror"
        );
        let error = Hub::from_env(&Env::from_pairs([("HF_ENDPOINT", "nowhere")])).unwrap_err();
        assert!(error.to_string().starts_with("reading HF_ENDPOINT failed"), "{error}");
    }
}
