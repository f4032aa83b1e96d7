//! Location and layout of the Hugging Face hub cache on this machine.
//!
//! All hub clients share one layout:
//!
//! ```text
//! models--org--name/refs/main                commit of a branch or tag
//!                   snapshots/<commit>/file  link to the content of a file
//!                   blobs/<etag>             content
//!                   .no_exist/<commit>/file  marks a file that the hub does not have
//! ```

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Variables that name the cache folder itself, in order of precedence.
const CACHE_VARIABLES: [&str; 2] = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"];

/// Hub cache folder.
///
/// ```
/// use tinkex_files::HubCache;
///
/// let env = |name: &str| (name == "HF_HOME").then(|| "/data/hf".into());
/// let cache = HubCache::locate(env).unwrap();
/// assert_eq!(cache.folder().to_str(), Some("/data/hf/hub"));
/// let repo = cache.model("Qwen/Qwen3-8B");
/// assert_eq!(repo.folder().to_str(), Some("/data/hf/hub/models--Qwen--Qwen3-8B"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HubCache(PathBuf);

impl HubCache {
    /// Creates a cache at `folder`, which need not exist.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// Finds the user's cache as `huggingface_hub` does. The first of these that is set and not
    /// empty decides:
    ///
    /// 1. `HF_HUB_CACHE`, then `HUGGINGFACE_HUB_CACHE`: the cache folder;
    /// 2. `HF_HOME`: the cache is `hub` in it;
    /// 3. `XDG_CACHE_HOME`: the cache is `huggingface/hub` in it;
    /// 4. `HOME`, then `USERPROFILE`: the cache is `.cache/huggingface/hub` in it.
    ///
    /// `env` looks up an environment variable. A leading `~`, `$NAME` and `${NAME}` are expanded in
    /// the result. Returns `None` if no variable is set. The folder need not exist.
    pub fn locate(env: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let folder = CACHE_VARIABLES.iter().find_map(|name| lookup(&env, name));
        let folder = match folder {
            Some(folder) => expand(&env, folder),
            None => hub_home(env)?.join("hub"),
        };
        Some(Self(folder))
    }

    /// Returns the cache folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Returns a model repository, such as `Qwen/Qwen3-8B`, whether or not any file is cached.
    #[must_use]
    pub fn model(&self, id: &str) -> CachedRepo {
        CachedRepo(self.0.join(format!("models--{}", id.replace('/', "--"))))
    }

    /// Returns the ids and folders of all model repositories in the cache, sorted by id. Empty if
    /// the cache does not exist or cannot be read.
    #[must_use]
    pub fn models(&self) -> Vec<(String, CachedRepo)> {
        let id = |path: &Path| {
            let name = path.file_name()?.to_str()?.strip_prefix("models--")?;
            Some(name.replacen("--", "/", 1))
        };
        let repos = entries(&self.0).into_iter();
        let mut models: Vec<(String, CachedRepo)> =
            repos.filter_map(|path| Some((id(&path)?, CachedRepo(path)))).collect();
        models.sort_by(|(a, _), (b, _)| a.cmp(b));
        models
    }
}

/// Folder of one repository in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedRepo(PathBuf);

impl CachedRepo {
    /// Returns the folder of the repository.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Returns the path of the file that stores the commit of a branch or tag.
    #[must_use]
    pub fn reference(&self, revision: &str) -> PathBuf {
        self.0.join("refs").join(revision)
    }

    /// Returns the cached commit of a branch or tag. A revision without a reference file is taken
    /// to be a commit. Returns `None` if the commit is not a plain folder name: as part of a path
    /// it could lead out of the cache.
    #[must_use]
    pub fn commit(&self, revision: &str) -> Option<String> {
        let stored = fs::read_to_string(self.reference(revision));
        let commit = stored.as_deref().map_or(revision, str::trim);
        let is_plain =
            !commit.is_empty() && !commit.contains(['/', '\\']) && commit != "." && commit != "..";
        is_plain.then(|| commit.to_owned())
    }

    /// Returns the folder with the files of a commit, whether or not any file is cached.
    #[must_use]
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.0.join("snapshots").join(commit)
    }

    /// Returns the folders of all cached commits, in no particular order.
    #[must_use]
    pub fn snapshots(&self) -> Vec<PathBuf> {
        entries(&self.0.join("snapshots"))
    }

    /// Returns the folder of a commit with a configuration and weights: the commit that `main` refers
    /// to, or the newest complete commit. `None` if no commit is complete: programs that need only a
    /// tokenizer download no weights.
    #[must_use]
    pub fn model_folder(&self) -> Option<PathBuf> {
        let modified = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
        let main = self.commit("main").map(|commit| self.snapshot(&commit));
        let mut complete: Vec<PathBuf> =
            self.snapshots().into_iter().filter(|path| is_model_folder(path)).collect();
        complete.sort_by_key(|path| (Some(path) == main.as_ref(), modified(path)));
        complete.pop()
    }

    /// Returns the folder with the content of all files.
    #[must_use]
    pub fn blobs(&self) -> PathBuf {
        self.0.join("blobs")
    }

    /// Returns the path of the marker that records that the hub has no file of this name in a
    /// commit.
    #[must_use]
    pub fn absence_marker(&self, commit: &str, file: &str) -> PathBuf {
        self.0.join(".no_exist").join(commit).join(file)
    }
}

/// Returns whether a folder has the configuration and the safetensors weights of a model.
pub fn is_model_folder(folder: impl AsRef<Path>) -> bool {
    let has = |name: &str| folder.as_ref().join(name).is_file();
    has("config.json") && (has("model.safetensors") || has("model.safetensors.index.json"))
}

/// Finds the folder in which `huggingface_hub` keeps its cache and token: `HF_HOME`, or
/// `huggingface` in `XDG_CACHE_HOME` or in `~/.cache`.
///
/// `env` looks up an environment variable; an empty value counts as unset. Returns `None` if
/// neither these variables nor `HOME` nor `USERPROFILE` are set.
pub fn hub_home(env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(home) = lookup(&env, "HF_HOME") {
        return Some(expand(&env, home));
    }
    let cache_home = match lookup(&env, "XDG_CACHE_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => user_home(&env)?.join(".cache"),
    };
    // `huggingface_hub` expands the result, so a `~` in XDG_CACHE_HOME works there too.
    Some(expand(&env, cache_home.join("huggingface").into_os_string()))
}

/// Returns a variable that is set and not empty.
fn lookup(env: &impl Fn(&str) -> Option<OsString>, name: &str) -> Option<OsString> {
    env(name).filter(|value| !value.is_empty())
}

fn user_home(env: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    lookup(env, "HOME").or_else(|| lookup(env, "USERPROFILE")).map(PathBuf::from)
}

/// Expands a leading `~`, and `$NAME` and `${NAME}` anywhere. Unknown variables are not expanded.
fn expand(env: &impl Fn(&str) -> Option<OsString>, value: OsString) -> PathBuf {
    let Some(text) = value.to_str() else { return PathBuf::from(value) };
    let mut path = OsString::new();
    let mut rest = text;
    if let Some(after) = text.strip_prefix('~')
        && (after.is_empty() || after.starts_with('/'))
        && let Some(home) = user_home(env)
    {
        path.push(home);
        rest = after;
    }
    while let Some(start) = rest.find('$') {
        path.push(&rest[..start]);
        rest = &rest[start..];
        // Name of the variable, and length in bytes of the reference to it: `$NAME` or `${NAME}`.
        let reference = match rest[1..].strip_prefix('{') {
            Some(braced) => braced.split_once('}').map(|(name, _)| (name, name.len() + 3)),
            None => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                let length = rest[1..].find(|c| !is_name(c)).unwrap_or(rest.len() - 1);
                Some((&rest[1..=length], length + 1))
            }
        };
        match reference.and_then(|(name, length)| Some((env(name)?, length))) {
            Some((value, length)) => {
                path.push(value);
                rest = &rest[length..];
            }
            None => {
                path.push("$");
                rest = &rest[1..];
            }
        }
    }
    path.push(rest);
    PathBuf::from(path)
}

/// Returns the paths in a folder; empty if the folder cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Locates the cache with `pairs` as environment variables.
    fn locate(pairs: &[(&str, &str)]) -> Option<String> {
        let env = |name: &str| {
            pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        };
        HubCache::locate(env).map(|cache| cache.folder().to_str().unwrap().to_owned())
    }

    #[test]
    fn variables_have_the_precedence_of_huggingface_hub() {
        let all = [
            ("HF_HUB_CACHE", "/1", "/1"),
            ("HUGGINGFACE_HUB_CACHE", "/2", "/2"),
            ("HF_HOME", "/3", "/3/hub"),
            ("XDG_CACHE_HOME", "/4", "/4/huggingface/hub"),
            ("HOME", "/5", "/5/.cache/huggingface/hub"),
            ("USERPROFILE", "/6", "/6/.cache/huggingface/hub"),
        ];
        for first in 0..all.len() {
            let mut pairs: Vec<(&str, &str)> =
                all[first..].iter().map(|(name, value, _)| (*name, *value)).collect();
            assert_eq!(locate(&pairs).as_deref(), Some(all[first].2));
            // An empty value counts as unset.
            pairs.extend(all[..first].iter().map(|(name, ..)| (*name, "")));
            assert_eq!(locate(&pairs).as_deref(), Some(all[first].2));
        }
        assert_eq!(locate(&[]), None);
    }

    #[test]
    fn a_tilde_and_variables_are_expanded_as_huggingface_hub_does() {
        let home = ("HOME", "/h");
        let expanded = |value| locate(&[home, ("DISK", "/d"), ("HF_HUB_CACHE", value)]).unwrap();
        for (value, path) in [
            ("~/hub", "/h/hub"),
            ("~", "/h"),
            ("~other/hub", "~other/hub"),
            ("$DISK/hub", "/d/hub"),
            ("${DISK}hub/$DISK", "/dhub//d"),
            ("$NONE/${NONE}/a$", "$NONE/${NONE}/a$"),
            ("${DISK", "${DISK"),
            ("/ü$DISK", "/ü/d"),
        ] {
            assert_eq!(expanded(value), path, "{value}");
        }
        assert_eq!(locate(&[home, ("HF_HOME", "~/hf")]).as_deref(), Some("/h/hf/hub"));
    }

    #[test]
    fn models_are_listed_by_id() {
        let folder = tempfile::tempdir().unwrap();
        let cache = HubCache::new(folder.path());
        for name in ["models--org--b--c", "models--plain", "datasets--org--d", ".locks"] {
            fs::create_dir_all(folder.path().join(name).join("snapshots/c0ffee")).unwrap();
        }
        let models = cache.models();
        let ids: Vec<&str> = models.iter().map(|(id, _)| id.as_str()).collect();
        assert_eq!(ids, ["org/b--c", "plain"]);
        assert_eq!(models[1].1, cache.model("plain"));
        assert_eq!(models[1].1.snapshots(), [cache.model("plain").snapshot("c0ffee")]);
        assert!(HubCache::new(folder.path().join("missing")).models().is_empty());
    }

    #[test]
    fn a_reference_never_leads_out_of_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let repo = HubCache::new(folder.path()).model("org/name");
        assert_eq!(repo.commit("c0ffee").as_deref(), Some("c0ffee"), "a commit is a revision too");
        fs::create_dir_all(repo.reference("main").parent().unwrap()).unwrap();
        for (text, commit) in [
            ("c0ffee\n", Some("c0ffee")),
            ("..", None),
            (".", None),
            ("../../x", None),
            ("", None),
            ("a\\b", None),
        ] {
            fs::write(repo.reference("main"), text).unwrap();
            assert_eq!(repo.commit("main").as_deref(), commit, "{text:?}");
        }
    }
}
