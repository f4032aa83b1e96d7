//! [`Hub`]: where tokenizers are looked for, and in which order.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tinkex_wire::Secret;
use tokio::sync::OnceCell;

use crate::config::{BaseUrl, Env};
use crate::error::{Error, ErrorKind, Result};
use crate::transport::http::HttpService;
use crate::transport::network::Network;

use super::cache::Repo;
use super::download::{Source, off_runtime};
use super::{Tokenizer, TokenizerId, files};

const PUBLIC: &str = "https://huggingface.co";
const MAIN: &str = "main";

/// A model hub and the cache of it on this machine. Cheap to clone.
///
/// A tokenizer is looked for in this order, and the first that is found is taken:
///
/// 1. a folder of that name with a `tokenizer.json` in it (or Kimi's `tiktoken.model`);
/// 2. this process's memory;
/// 3. the local hub cache, which is shared with the Python tools; a cached revision is not asked
///    about again;
/// 4. the hub. An interrupted download goes on where it ended.
///
/// | Setting | Variable | Otherwise |
/// |---|---|---|
/// | [`endpoint`](Hub::endpoint) | `HF_ENDPOINT` | `https://huggingface.co` |
/// | [`token`](Hub::token) | `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, or the file `HF_TOKEN_PATH` or `HF_HOME/token` | none |
/// | [`cache`](Hub::cache) | `HF_HUB_CACHE`, `HF_HOME/hub`, `XDG_CACHE_HOME/huggingface/hub` | `~/.cache/huggingface/hub` |
/// | [`offline`](Hub::offline) | `HF_HUB_OFFLINE` | online |
///
/// ```no_run
/// use tinkex::{Env, Hub};
///
/// # async fn run() -> tinkex::Result<()> {
/// let hub = Hub::from_env(&Env::from_process())?.endpoint("https://hub.example".parse()?);
/// let tokenizer = hub.tokenizer("Qwen/Qwen3-8B").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Hub {
    endpoint: BaseUrl,
    token: Option<Secret>,
    cache: PathBuf,
    offline: bool,
    http: Option<Arc<dyn HttpService>>,
    env: Env,
}

impl Hub {
    /// The hub that these variables describe.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` is not an address.
    pub fn from_env(env: &Env) -> Result<Self> {
        let endpoint = env.get("HF_ENDPOINT").unwrap_or(PUBLIC).parse();
        let endpoint = endpoint.map_err(|error: Error| error.during("reading HF_ENDPOINT"))?;
        let home = home(env);
        let cache = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"].into_iter().find_map(|n| env.get(n));
        let on = |value: &str| matches!(&*value.to_ascii_lowercase(), "1" | "true" | "yes" | "on");
        Ok(Self {
            endpoint,
            token: token(env, &home),
            cache: cache.map_or_else(|| home.join("hub"), PathBuf::from),
            offline: env.get("HF_HUB_OFFLINE").is_some_and(on),
            http: None,
            env: env.clone(),
        })
    }

    /// Another hub.
    #[must_use]
    pub fn endpoint(mut self, url: BaseUrl) -> Self {
        self.endpoint = url;
        self
    }

    /// A token for it. It is sent to this hub and to nobody else.
    #[must_use]
    pub fn token(mut self, token: impl Into<Secret>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Another cache.
    #[must_use]
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = folder.into();
        self
    }

    /// Whether the hub must not be asked.
    #[must_use]
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// Another way to send requests: a proxy, a recorder, a fake.
    #[must_use]
    pub fn http(self, service: impl HttpService) -> Self {
        self.shared_http(Arc::new(service))
    }

    pub(crate) fn shared_http(mut self, service: Arc<dyn HttpService>) -> Self {
        self.http = Some(service);
        self
    }

    /// The tokenizer of a model or a folder.
    ///
    /// # Errors
    /// If it is nowhere to be found; the error says where it was looked for.
    pub async fn tokenizer(&self, model: &str) -> Result<Tokenizer> {
        self.tokenizer_of(model, None).await
    }

    /// The same, if the server named a tokenizer.
    pub(crate) async fn tokenizer_of(
        &self,
        model: &str,
        named_by_server: Option<&str>,
    ) -> Result<Tokenizer> {
        // A server on this machine may name a model by its folder.
        let folder = PathBuf::from(named_by_server.unwrap_or(model));
        let looking = folder.clone();
        if off_runtime(move || Ok(files::are_in(&looking))).await? {
            return read(folder, None).await;
        }
        self.fetch(&TokenizerId::of_model(model, named_by_server)?).await
    }

    /// A tokenizer by its id: from memory, the cache or the hub. All who ask at once share one
    /// download, and everyone after them what it brought.
    ///
    /// # Errors
    /// As [`Hub::tokenizer`].
    pub async fn fetch(&self, id: &TokenizerId) -> Result<Tokenizer> {
        let place = Loaded::place(self, id);
        let loaded = place.get_or_try_init(|| self.load(id)).await;
        loaded.cloned().map_err(|error| error.during(format!("loading the tokenizer of {id}")))
    }

    async fn load(&self, id: &TokenizerId) -> Result<Tokenizer> {
        let repo = Repo::new(&self.cache, id);
        let revision = id.revision().unwrap_or(MAIN);
        let (looking, wanted) = (repo.clone(), revision.to_owned());
        let here = off_runtime(move || Ok(looking.snapshot(&wanted))).await?;
        let name = Some(id.to_string());
        let folder = match here {
            Some(here) if here.complete || self.offline => here.folder,
            None if self.offline => return Err(self.nowhere(&repo, None)),
            here => match (self.download(&repo, id, revision).await, here) {
                (Ok(folder), _) => folder,
                (Err(error), Some(here)) => {
                    tracing::warn!(%id, %error, "taking the tokenizer without its settings");
                    here.folder
                }
                (Err(error), None) if error.status().is_none() && error.is_retryable() => {
                    return Err(self.nowhere(&repo, Some(error)));
                }
                (Err(error), None) => return Err(error),
            },
        };
        read(folder, name).await
    }

    /// Brings all files of a revision into the cache; returns their folder.
    async fn download(&self, repo: &Repo, id: &TokenizerId, revision: &str) -> Result<PathBuf> {
        let http = self.door()?;
        let token = self.token.as_ref();
        let source = Source { http: &*http, endpoint: &self.endpoint, token };
        let about = |file: &str| format!("fetching {file} of {id} from {}", self.endpoint);
        let mut found = None;
        for file in [files::TOKENIZER, files::TIKTOKEN] {
            let facts = source.facts(id, revision, file).await;
            if let Some(facts) = facts.map_err(|error| error.during(about(file)))? {
                found = Some((file, facts));
                break;
            }
        }
        let Some((main, first)) = found else {
            let why = format!("{id} has no {} on {}", files::TOKENIZER, self.endpoint);
            let hint = "some models come with code in its place, which is not run here; convert it \
                        to a tokenizer.json and give its folder";
            return Err(Error::new(ErrorKind::NotFound, why).with_hint(hint));
        };
        // Every file is of the commit that the first one was of.
        let commit = first.commit.clone().unwrap_or_else(|| revision.replace('/', "--"));
        let asked = if first.commit.is_some() { &*commit } else { revision };
        // The tokenizer is last: where it is, the rest is too.
        for file in [files::CONFIG, files::SPECIAL, files::TEMPLATE, main] {
            let fetched = async {
                let facts = source.facts(id, asked, file).await?;
                let blob = match &facts {
                    Some(facts) => Some(source.fetch(repo, id, asked, file, facts).await?),
                    None => None,
                };
                let (repo, commit) = (repo.clone(), commit.clone());
                off_runtime(move || match blob {
                    Some(blob) => repo.place(&blob, &commit, file),
                    None => repo.mark_absent(&commit, file),
                })
                .await
            };
            fetched.await.map_err(|error| error.during(about(file)))?;
        }
        let (referring, revision) = (repo.clone(), revision.to_owned());
        let folder = repo.snapshot_folder(&commit);
        off_runtime(move || referring.refer(&revision, &commit)).await?;
        Ok(folder)
    }

    /// The way to the network.
    pub(crate) fn door(&self) -> Result<Arc<dyn HttpService>> {
        Ok(match &self.http {
            Some(http) => Arc::clone(http),
            None => Arc::new(Network::new(&self.env)?),
        })
    }

    pub(crate) fn address(&self) -> &BaseUrl {
        &self.endpoint
    }

    pub(crate) fn secret(&self) -> Option<&Secret> {
        self.token.as_ref()
    }

    pub(crate) fn is_offline(&self) -> bool {
        self.offline
    }

    /// Neither here nor to be had.
    fn nowhere(&self, repo: &Repo, cause: Option<Error>) -> Error {
        let hint = "fetch it once where the hub can be reached and bring the cache along \
                    (HF_HOME), set another hub (HF_ENDPOINT), or give a folder with its files";
        let (cache, hub) = (repo.folder().display(), &self.endpoint);
        let kind = cause.as_ref().map_or(ErrorKind::NotFound, Error::kind);
        let tried = match &cause {
            None => format!("{hub} must not be asked (HF_HUB_OFFLINE)"),
            Some(_) => format!("{hub} cannot be reached"),
        };
        let error = Error::new(kind, format!("it is not in the cache ({cache}), and {tried}"));
        match cause {
            None => error.with_hint(hint),
            Some(cause) => error.with_hint(hint).with_source(cause),
        }
    }
}

/// Reading a tokenizer takes a while: it is megabytes of text.
async fn read(folder: PathBuf, name: Option<String>) -> Result<Tokenizer> {
    off_runtime(move || {
        let read = Tokenizer::from_folder(&folder);
        Ok(read.map(|tokenizer| match name {
            Some(name) => tokenizer.named(name),
            None => tokenizer,
        }))
    })
    .await?
}

/// Tokenizers that this process has loaded, or is loading.
struct Loaded;

type Place = Arc<OnceCell<Tokenizer>>;
type Key = (TokenizerId, PathBuf, BaseUrl);

static LOADED: LazyLock<Mutex<HashMap<Key, Place>>> = LazyLock::new(Mutex::default);

impl Loaded {
    /// The one place of a tokenizer; whoever comes first fills it. A failure leaves it empty.
    fn place(hub: &Hub, id: &TokenizerId) -> Place {
        let key = (id.clone(), hub.cache.clone(), hub.endpoint.clone());
        let mut places = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(places.entry(key).or_default())
    }
}

fn home(env: &Env) -> PathBuf {
    if let Some(home) = env.get("HF_HOME") {
        return PathBuf::from(home);
    }
    let caches = match env.get("XDG_CACHE_HOME") {
        Some(caches) => PathBuf::from(caches),
        None => env.home().unwrap_or_default().join(".cache"),
    };
    caches.join("huggingface")
}

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
            .field("cache", &self.cache)
            .field("offline", &self.offline)
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
    fn the_cache_is_where_the_other_tools_have_it() {
        let cache = |pairs: &[(&str, &str)]| hub(pairs).cache.display().to_string();
        assert_eq!(cache(&[("HOME", "/h")]), "/h/.cache/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")]), "/f/hub");
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), "/c");
    }

    #[test]
    fn the_token_comes_from_a_variable_or_a_file_and_is_not_shown() {
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
    fn the_endpoint_can_be_set() {
        let endpoint = |pairs: &[(&str, &str)]| hub(pairs).endpoint.to_string();
        assert_eq!(endpoint(&[]), PUBLIC);
        assert_eq!(
            endpoint(&[("HF_ENDPOINT", "https://hf.test/mirror/")]),
            "https://hf.test/mirror"
        );
        let error = Hub::from_env(&Env::from_pairs([("HF_ENDPOINT", "nowhere")])).unwrap_err();
        assert!(error.to_string().starts_with("reading HF_ENDPOINT failed"), "{error}");
    }
}
