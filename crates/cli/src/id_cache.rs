//! Cache of recently listed ids, for shell completion.
//!
//! A missing, outdated or invalid cache only means fewer completions, so all errors are ignored.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap_complete::CompletionCandidate;
use serde::{Deserialize, Serialize};
use tinkex::Env;
use tinkex_files::AtomicWrite;

use crate::config;

/// Age in seconds at which ids are no longer offered.
const MAX_AGE_SECONDS: u64 = 3600;
/// Maximum number of ids to store per kind.
const MAX_IDS: usize = 500;

/// Kind of the resource that an id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IdKind {
    Run,
    /// Name of a run.
    Name,
    Checkpoint,
    Session,
    /// Name of a base model.
    Model,
}

#[derive(Default, Serialize, Deserialize)]
struct IdCache {
    lists: Vec<CachedIds>,
}

#[derive(Serialize, Deserialize)]
struct CachedIds {
    kind: IdKind,
    /// Time of writing, in seconds since the Unix epoch.
    written: u64,
    ids: Vec<String>,
}

fn path(env: &Env) -> PathBuf {
    config::folder(env, "XDG_CACHE_HOME", ".cache").join("ids.json")
}

fn read(env: &Env) -> IdCache {
    let text = std::fs::read(path(env)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Stores the ids of a list, replacing earlier ids of the same kind.
pub(crate) fn store(env: &Env, kind: IdKind, ids: impl Iterator<Item = String>) {
    let ids: Vec<String> = ids.take(MAX_IDS).collect();
    // Without these variables the location of the cache is unknown.
    let located = ["XDG_CACHE_HOME", "HOME", "USERPROFILE"];
    if ids.is_empty() || located.iter().all(|name| env.get(name).is_none()) {
        return;
    }
    let mut file = read(env);
    file.lists.retain(|list| list.kind != kind);
    file.lists.push(CachedIds { kind, written: now(), ids });
    if let Ok(text) = serde_json::to_vec(&file) {
        let _ = AtomicWrite::new(path(env)).create_folders().write(text);
    }
}

/// Returns the ids that were stored within the last hour.
pub(crate) fn recent(env: &Env, kind: IdKind) -> Vec<String> {
    let lists = read(env).lists.into_iter();
    let is_recent = |list: &CachedIds| list.kind == kind && now() < list.written + MAX_AGE_SECONDS;
    lists.filter(is_recent).flat_map(|list| list.ids).collect()
}

fn candidates(kind: IdKind) -> Vec<CompletionCandidate> {
    recent(&Env::from_process(), kind).into_iter().map(CompletionCandidate::new).collect()
}

pub(crate) fn sessions() -> Vec<CompletionCandidate> {
    candidates(IdKind::Session)
}

pub(crate) fn models() -> Vec<CompletionCandidate> {
    candidates(IdKind::Model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_ids_are_offered_for_an_hour() {
        let folder = tempfile::tempdir().unwrap();
        let env = Env::from_pairs([("XDG_CACHE_HOME", folder.path().to_str().unwrap())]);
        assert_eq!(recent(&env, IdKind::Run), Vec::<String>::new());
        let ids = || ["a", "b"].into_iter().map(str::to_owned);
        store(&env, IdKind::Run, ids());
        store(&env, IdKind::Checkpoint, ids().rev());
        assert_eq!(recent(&env, IdKind::Run), ["a", "b"]);
        assert_eq!(recent(&env, IdKind::Checkpoint), ["b", "a"]);
        assert!(recent(&env, IdKind::Session).is_empty());
        let mut file = read(&env);
        file.lists[0].written = 0;
        std::fs::write(path(&env), serde_json::to_vec(&file).unwrap()).unwrap();
        assert!(recent(&env, IdKind::Run).is_empty(), "too old");
        std::fs::write(path(&env), "{").unwrap();
        assert!(recent(&env, IdKind::Checkpoint).is_empty(), "an invalid file counts as empty");
        store(&Env::empty(), IdKind::Run, ids());
    }
}
