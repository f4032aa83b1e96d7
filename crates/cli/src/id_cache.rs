//! Ids that were listed lately, for completions: a small file that nobody waits for.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap_complete::CompletionCandidate;
use serde::{Deserialize, Serialize};
use tinkex::Env;
use tinkex_files::AtomicWrite;

use crate::config;

/// Older ids are not offered: runs and checkpoints come and go.
const FRESH_SECONDS: u64 = 3600;
/// More are too many to choose from.
const MOST: usize = 500;

/// What ids stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IdKind {
    Run,
    Checkpoint,
    Session,
}

#[derive(Default, Serialize, Deserialize)]
struct IdCache {
    lists: Vec<CachedIds>,
}

#[derive(Serialize, Deserialize)]
struct CachedIds {
    kind: IdKind,
    written: u64,
    ids: Vec<String>,
}

fn path(env: &Env) -> PathBuf {
    config::folder(env, "XDG_CACHE_HOME", ".cache").join("ids.json")
}

fn read(env: &Env) -> IdCache {
    let text = std::fs::read(path(env)).unwrap_or_default();
    // What cannot be read is as good as nothing.
    serde_json::from_slice(&text).unwrap_or_default()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Remembers what was listed. It is a convenience: if it fails, nobody needs to know.
pub(crate) fn remember(env: &Env, kind: IdKind, ids: impl Iterator<Item = String>) {
    let ids: Vec<String> = ids.take(MOST).collect();
    // Without a home there is no place for it.
    if ids.is_empty() || (env.get("HOME").is_none() && env.get("XDG_CACHE_HOME").is_none()) {
        return;
    }
    let mut file = read(env);
    file.lists.retain(|list| list.kind != kind);
    file.lists.push(CachedIds { kind, written: now(), ids });
    if let Ok(text) = serde_json::to_vec(&file) {
        let _ = AtomicWrite::new(path(env)).create_folders().write(text);
    }
}

/// What was listed lately.
fn fresh(env: &Env, kind: IdKind) -> Vec<String> {
    let lists = read(env).lists.into_iter();
    let fresh = |list: &CachedIds| list.kind == kind && now() < list.written + FRESH_SECONDS;
    lists.filter(fresh).flat_map(|list| list.ids).collect()
}

fn candidates(kind: IdKind) -> Vec<CompletionCandidate> {
    fresh(&Env::of_process(), kind).into_iter().map(CompletionCandidate::new).collect()
}

/// Runs to choose from.
pub(crate) fn runs() -> Vec<CompletionCandidate> {
    candidates(IdKind::Run)
}

/// Checkpoints to choose from.
pub(crate) fn checkpoints() -> Vec<CompletionCandidate> {
    candidates(IdKind::Checkpoint)
}

/// Sessions to choose from.
pub(crate) fn sessions() -> Vec<CompletionCandidate> {
    candidates(IdKind::Session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_listed_is_offered_for_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let env = Env::from_pairs([("XDG_CACHE_HOME", folder.path().to_str().unwrap())]);
        assert_eq!(fresh(&env, IdKind::Run), Vec::<String>::new());
        let ids = || ["a", "b"].into_iter().map(str::to_owned);
        remember(&env, IdKind::Run, ids());
        remember(&env, IdKind::Checkpoint, ids().rev());
        assert_eq!(fresh(&env, IdKind::Run), ["a", "b"]);
        assert_eq!(fresh(&env, IdKind::Checkpoint), ["b", "a"]);
        assert!(fresh(&env, IdKind::Session).is_empty());
        let mut file = read(&env);
        file.lists[0].written = 0;
        std::fs::write(path(&env), serde_json::to_vec(&file).unwrap()).unwrap();
        assert!(fresh(&env, IdKind::Run).is_empty(), "too old");
        std::fs::write(path(&env), "{").unwrap();
        assert!(fresh(&env, IdKind::Checkpoint).is_empty(), "a broken file is none");
        remember(&Env::empty(), IdKind::Run, ids());
    }
}
