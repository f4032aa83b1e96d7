//! Candidates for completing references in a shell.
//!
//! A shell asks for candidates on every key press, so no request is sent: ids and names come from
//! recent lists ([`id_cache`]) and from the run folders of this machine.

use clap_complete::CompletionCandidate;
use tinkex::{Env, TinkerPath};

use crate::id_cache::{self, IdKind};

use super::LATEST;
use super::folder::{LocalRun, all_folders};

fn candidates(texts: impl Iterator<Item = String>) -> Vec<CompletionCandidate> {
    let mut texts: Vec<String> = texts.collect();
    let mut seen = std::collections::HashSet::new();
    texts.retain(|text| seen.insert(text.clone()));
    texts.into_iter().map(CompletionCandidate::new).collect()
}

/// Returns names of runs, from recent lists and from the run folders of this machine.
fn names() -> Vec<String> {
    let listed = id_cache::recent(&Env::from_process(), IdKind::Name).into_iter();
    listed.chain(folders().into_iter().map(|folder| folder.record.name)).collect()
}

fn folders() -> Vec<LocalRun> {
    all_folders(&Env::from_process(), &std::env::current_dir().unwrap_or_default())
}

/// Returns the candidates for RUN: names, `latest` and ids.
pub(crate) fn run_candidates() -> Vec<CompletionCandidate> {
    let ids = id_cache::recent(&Env::from_process(), IdKind::Run).into_iter();
    candidates(names().into_iter().chain([LATEST.to_owned()]).chain(ids))
}

/// Returns the candidates for CHECKPOINT: the candidates for RUN, names of checkpoints below the names
/// of runs, and paths.
pub(crate) fn checkpoint_candidates() -> Vec<CompletionCandidate> {
    let paths = id_cache::recent(&Env::from_process(), IdKind::Checkpoint).into_iter();
    let names = names();
    let latest = names.iter().map(|name| format!("{name}/{LATEST}"));
    let runs = names.iter().cloned().chain([LATEST.to_owned()]);
    let saved = folders().into_iter().flat_map(|folder| {
        let record = folder.record;
        let below = |path: &TinkerPath| format!("{}/{}", record.name, path.name());
        let saved = record.progress.checkpoints.iter();
        saved.map(|checkpoint| below(&checkpoint.path)).collect::<Vec<_>>()
    });
    candidates(runs.chain(latest).chain(saved).chain(paths))
}

/// Returns the candidates for a model to sample from: the candidates for CHECKPOINT, and base models.
pub(crate) fn weights_candidates() -> Vec<CompletionCandidate> {
    let models = id_cache::recent(&Env::from_process(), IdKind::Model).into_iter();
    let mut all = checkpoint_candidates();
    all.extend(models.map(CompletionCandidate::new));
    all
}
