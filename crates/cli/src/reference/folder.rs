//! [`LocalRun`]: a run folder of this machine, found by its path or by the name of the run.
//!
//! The folders of earlier runs are listed in the file `run-folders.json` of the user's data folder,
//! so that a run is found from any working directory.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tinkex::rest::{AccessScope, TrainingRun};
use tinkex::{Env, RestClient, TinkerPath};
use tinkex_files::AtomicWrite;
use tinkex_runs::{RUN_FILE, RunError, RunFolder, RunMethod, RunRecord};
use tinkex_suggest::nearest_names;

use crate::commands::TrainingCommand;
use crate::error::{CommandError, Exit};
use crate::local;

use super::run::MIN_PREFIX;
use super::{LATEST, did_you_mean};

/// Maximum number of folders in the list.
const MAX_LISTED: usize = 200;

/// Run folder of this machine.
#[derive(Clone, Debug)]
pub(crate) struct LocalRun {
    pub(crate) path: PathBuf,
    pub(crate) record: RunRecord,
    /// Time at which the record was last written.
    changed: SystemTime,
}

impl LocalRun {
    /// Reads the record of a run folder.
    pub(super) fn open(path: &Path) -> Result<Self, RunError> {
        let record = RunFolder::read(path)?;
        let file = std::fs::metadata(path.join(RUN_FILE));
        let changed = file.and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        Ok(Self { path: path.to_owned(), record, changed })
    }

    /// Returns the id of the run on the server, if it was created there.
    pub(crate) fn run_id(&self) -> Option<&str> {
        self.record.progress.run_id.as_ref().map(|id| id.as_str())
    }

    /// Returns the training method.
    fn method(&self) -> RunMethod {
        self.record.settings.method.method()
    }

    /// Fetches the run of the folder from the server.
    pub(super) async fn run(
        &self,
        rest: &RestClient,
        scope: AccessScope,
    ) -> Result<TrainingRun, CommandError> {
        let shown = self.path.display();
        let Some(id) = self.run_id() else {
            let message = format!("the run in {shown} was not started on a server");
            let command = self.method().command();
            return Err(CommandError::new(Exit::NotFound, message)
                .hint(format!("Start it with `{command} --resume {shown}`.")));
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
    folders.retain(|known| *known != folder && RunFolder::contains_run(known));
    folders.insert(0, folder);
    folders.truncate(MAX_LISTED);
    if let (Some(file), Ok(text)) = (list_file(variables), serde_json::to_vec_pretty(&folders)) {
        let _ = AtomicWrite::new(file).create_folders().write(text);
    }
}

/// Returns the folder of the run that saved a checkpoint, among the run folders in the folder `here`
/// and in the list.
pub(crate) fn folder_of_checkpoint(
    variables: &Env,
    here: &Path,
    path: &TinkerPath,
) -> Option<LocalRun> {
    let has_checkpoint = |folder: &LocalRun| {
        let progress = &folder.record.progress;
        // A run has another id since its last resumption, but keeps its earlier checkpoints.
        progress.run_id.as_ref() == Some(path.run())
            || progress.sampler.as_ref() == Some(path)
            || progress.checkpoints.iter().any(|saved| saved.path == *path)
    };
    all_folders(variables, here).into_iter().find(has_checkpoint)
}

/// Returns the run folders in the folder `here` and in the list that this program can read, the last
/// changed first.
pub(crate) fn all_folders(variables: &Env, here: &Path) -> Vec<LocalRun> {
    let here = std::fs::read_dir(here).into_iter().flatten().flatten();
    let here = here.map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = here.chain(listed_folders(variables)).collect();
    paths.sort();
    paths.dedup();
    let mut folders: Vec<LocalRun> =
        paths.iter().filter_map(|path| LocalRun::open(path).ok()).collect();
    folders.sort_by_key(|folder| std::cmp::Reverse(folder.changed));
    folders
}

/// Finds the folder of the run that `text` names: a folder, a name, an id, the start of an id, or
/// `latest`, the last changed folder of a run that `command` resumes. Relative paths are below `here`.
pub(crate) fn find_folder(
    variables: &Env,
    here: &Path,
    text: &str,
    command: TrainingCommand,
) -> Result<PathBuf, CommandError> {
    let path = here.join(text);
    if RunFolder::contains_run(&path) {
        return Ok(path);
    }
    let folders = all_folders(variables, here);
    if text == LATEST
        && let Some(newest) = folders.iter().find(|folder| command.accepts(folder.method()))
    {
        return Ok(newest.path.clone());
    }
    let named = folders.iter().filter(|folder| folder.record.name == text);
    let mut found: Vec<&LocalRun> = named.collect();
    if found.is_empty() && text.len() >= MIN_PREFIX {
        let is_prefix = |folder: &&LocalRun| folder.run_id().is_some_and(|id| id.starts_with(text));
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

fn unknown_folder(path: &Path, text: &str, folders: &[LocalRun]) -> CommandError {
    let message = if path.is_dir() {
        format!("{} contains no run: run.json is missing", path.display())
    } else {
        format!("no run folder has the path, name or id {text:?}")
    };
    let names = folders.iter().map(|folder| folder.record.name.as_str());
    let nearest = nearest_names(text, names);
    let nearest: Vec<String> = nearest.into_iter().map(str::to_owned).collect();
    let otherwise = format!(
        "Pass the folder that `tinkex train` or `tinkex rl` created. To continue from the weights of \
         a run without its folder, start a new run with --from {text}."
    );
    CommandError::new(Exit::NotFound, message).hint(did_you_mean(&nearest, otherwise))
}

#[cfg(test)]
mod tests {
    use tinkex_runs::{MethodSettings, RlSettings, RunSettings, SftSettings};

    use super::*;

    #[test]
    fn latest_is_the_newest_folder_of_the_command() {
        let here = tempfile::tempdir().unwrap();
        let methods = [
            ("a", MethodSettings::Sft(SftSettings::default())),
            ("b", MethodSettings::Rl(RlSettings::default())),
        ];
        for (name, method) in methods {
            let path = here.path().join(format!("{name}-run"));
            let record = RunRecord::new(name, RunSettings::new("tiny", method));
            RunFolder::new(path, record).unwrap().store().unwrap();
        }
        let find = |text: &str, command| find_folder(&Env::empty(), here.path(), text, command);
        let commands = [(TrainingCommand::Train, "a-run"), (TrainingCommand::Rl, "b-run")];
        for (command, expected) in commands {
            assert_eq!(find(LATEST, command).unwrap(), here.path().join(expected));
        }
        assert_eq!(find("a", TrainingCommand::Rl).unwrap(), here.path().join("a-run"));
    }
}
