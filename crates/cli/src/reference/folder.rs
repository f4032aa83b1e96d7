//! [`RunFolder`]: the folder of a run of `tinkex train` or `tinkex rl`, found by its path or by the
//! name of the run.
//!
//! The folders of earlier runs are listed in the file `run-folders.json` of the user's data folder,
//! so that a run is found from any working directory.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;
use tinkex::recipes::SavedCheckpoint;
use tinkex::rest::{AccessScope, TrainingRun};
use tinkex::{Env, RestClient};
use tinkex_files::AtomicWrite;

use crate::error::{CommandError, Exit};
use crate::local;

use super::run::MIN_PREFIX;
use super::{LATEST, did_you_mean};

/// Maximum number of folders in the list.
const MAX_LISTED: usize = 200;

/// Folder of a run.
#[derive(Clone, Debug)]
pub(crate) struct RunFolder {
    pub(crate) path: PathBuf,
    pub(crate) name: Option<String>,
    /// Id of the run on the server, if it was created there.
    pub(crate) run_id: Option<String>,
    /// Names of the checkpoints to resume from.
    pub(super) checkpoints: Vec<String>,
    changed: SystemTime,
    kind: RunFolderKind,
}

/// Command that created a run folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunFolderKind {
    Train,
    Rl,
}

/// Fields of `run.json` and `resume.json` that identify the run.
#[derive(Deserialize)]
struct RunIdentity {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    run_id: Option<String>,
    #[serde(default)]
    saved: Vec<SavedCheckpoint>,
    /// `rl` in the folders of `tinkex rl`. `tinkex train` writes no such field.
    #[serde(default)]
    method: Option<String>,
}

impl RunIdentity {
    fn read(file: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(file).ok()?).ok()
    }
}

impl RunFolder {
    /// Opens the folder, if it contains a run.
    pub(crate) fn open(path: &Path) -> Option<Self> {
        let file = path.join("run.json");
        let changed = std::fs::metadata(&file).and_then(|file| file.modified()).ok()?;
        let RunIdentity { name, run_id, mut saved, method } = RunIdentity::read(&file)?;
        let kind = match method.as_deref() {
            Some("rl") => RunFolderKind::Rl,
            _ => RunFolderKind::Train,
        };
        // `tinkex rl` keeps its progress in a second file.
        let run_id = match run_id {
            Some(id) => Some(id),
            None => RunIdentity::read(&path.join("resume.json")).and_then(|progress| {
                saved = progress.saved;
                progress.run_id
            }),
        };
        let checkpoints = saved.iter().map(|saved| saved.path.name().to_owned()).collect();
        Some(Self { path: path.to_owned(), name, run_id, checkpoints, changed, kind })
    }

    /// Fetches the run of the folder from the server.
    pub(super) async fn run(
        &self,
        rest: &RestClient,
        scope: AccessScope,
    ) -> Result<TrainingRun, CommandError> {
        let shown = self.path.display();
        let Some(id) = self.run_id.as_deref() else {
            let message = format!("the run in {shown} was not started on a server");
            return Err(CommandError::new(Exit::NotFound, message)
                .hint(format!("Start it with `tinkex train --resume {shown}`.")));
        };
        let run = rest.get_training_run(id, scope).await;
        run.map_err(|error| {
            CommandError::from(error).context(&format!("cannot find the run of {shown}"))
        })
    }
}

fn list_file(variables: &Env) -> Option<PathBuf> {
    Some(local::data_home(variables).ok()?.join("run-folders.json"))
}

fn listed_folders(variables: &Env) -> Vec<PathBuf> {
    let bytes = list_file(variables).and_then(|file| std::fs::read(file).ok());
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Adds a folder to the list, so that its run is found from other working directories. Errors are
/// ignored: the path of the folder always works.
pub(crate) fn remember_folder(variables: &Env, folder: &Path) {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let mut folders = listed_folders(variables);
    folders.retain(|known| *known != folder && known.join("run.json").is_file());
    folders.insert(0, folder);
    folders.truncate(MAX_LISTED);
    if let (Some(file), Ok(text)) = (list_file(variables), serde_json::to_vec_pretty(&folders)) {
        let _ = AtomicWrite::new(file).create_folders().write(text);
    }
}

/// Returns the folder of the run with the id `run_id`, among those in the folder `here` and in the
/// list.
pub(crate) fn folder_of_run(variables: &Env, here: &Path, run_id: &str) -> Option<RunFolder> {
    let is_run = |folder: &RunFolder| folder.run_id.as_deref() == Some(run_id);
    all_folders(variables, here).into_iter().find(is_run)
}

/// Returns the run folders in the folder `here` and in the list, the last changed first.
pub(crate) fn all_folders(variables: &Env, here: &Path) -> Vec<RunFolder> {
    let here = std::fs::read_dir(here).into_iter().flatten().flatten();
    let here = here.map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = here.chain(listed_folders(variables)).collect();
    paths.sort();
    paths.dedup();
    let mut folders: Vec<RunFolder> =
        paths.iter().filter_map(|path| RunFolder::open(path)).collect();
    folders.sort_by_key(|folder| std::cmp::Reverse(folder.changed));
    folders
}

/// Finds the folder of the run that `text` names: a folder, a name, an id, the start of an id, or
/// `latest`, the last changed folder of `kind`. Relative paths are below `here`.
pub(crate) fn find_folder(
    variables: &Env,
    here: &Path,
    text: &str,
    kind: RunFolderKind,
) -> Result<PathBuf, CommandError> {
    let path = here.join(text);
    if path.join("run.json").exists() {
        return Ok(path);
    }
    let folders = all_folders(variables, here);
    if text == LATEST
        && let Some(newest) = folders.iter().find(|folder| folder.kind == kind)
    {
        return Ok(newest.path.clone());
    }
    let named = folders.iter().filter(|folder| folder.name.as_deref() == Some(text));
    let mut found: Vec<&RunFolder> = named.collect();
    if found.is_empty() && text.len() >= MIN_PREFIX {
        let is_prefix =
            |folder: &&RunFolder| folder.run_id.as_deref().is_some_and(|id| id.starts_with(text));
        found = folders.iter().filter(is_prefix).collect();
    }
    match found[..] {
        [only] => Ok(only.path.clone()),
        [] => Err(unknown_folder(&path, text, &folders)),
        _ => {
            let list: String =
                found.iter().map(|folder| format!("\n  {}", folder.path.display())).collect();
            let message = format!("{text:?} names {} run folders:{list}", found.len());
            Err(CommandError::usage(message).hint("Pass the path of the folder."))
        }
    }
}

fn unknown_folder(path: &Path, text: &str, folders: &[RunFolder]) -> CommandError {
    let message = match path.is_dir() {
        true => format!("{} contains no run: run.json is missing", path.display()),
        false => format!("no run folder has the path, name or id {text:?}"),
    };
    let names = folders.iter().filter_map(|folder| folder.name.as_deref());
    let nearest = tinkex_text::nearest_names(text, names);
    let nearest: Vec<String> = nearest.into_iter().map(str::to_owned).collect();
    let otherwise = format!(
        "Pass the folder that `tinkex train` or `tinkex rl` created. To continue from the weights of \
         a run without its folder, start a new run with --from {text}."
    );
    CommandError::new(Exit::NotFound, message).hint(did_you_mean(&nearest, otherwise))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latest_is_the_newest_folder_of_the_command() {
        let here = tempfile::tempdir().unwrap();
        for (name, state) in [
            ("a-run", r#"{"name": "a", "settings": {"method": "sft"}}"#),
            ("b-run", r#"{"name": "b", "method": "rl"}"#),
        ] {
            let folder = here.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("run.json"), state).unwrap();
        }
        for (kind, expected) in [(RunFolderKind::Train, "a-run"), (RunFolderKind::Rl, "b-run")] {
            let found = find_folder(&Env::empty(), here.path(), LATEST, kind).unwrap();
            assert_eq!(found, here.path().join(expected));
        }
        let named = find_folder(&Env::empty(), here.path(), "a", RunFolderKind::Rl).unwrap();
        assert_eq!(named, here.path().join("a-run"));
    }
}
