//! [`RunReference`]: a training run that a command line names.

use std::pin::pin;
use std::str::FromStr;

use futures_util::StreamExt as _;
use tinkex::rest::{AccessScope, Checkpoint, ListTrainingRuns, TrainingRun};
use tinkex::{ModelId, RestClient};
use tinkex_runs::RunFolder;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::id_cache::{self, IdKind};
use crate::progress::Progress;

use super::folder::{self, LocalRun};
use super::{LATEST, did_you_mean, is_unknown, name_of};
use tinkex_suggest::nearest_names;

/// Minimum length of the start of an id. Shorter texts would match by chance.
pub(super) const MIN_PREFIX: usize = 4;
/// Maximum number of runs in an error message.
const MAX_CANDIDATES: usize = 5;

/// Training run that a command line names: by id, start of the id, name, run folder or `latest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunReference(pub(super) String);

impl FromStr for RunReference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("tinker://") {
            _ if matches!(text, "" | "tinker://") => {
                Err("expected a run: its name, id or folder".to_owned())
            }
            Some(path) if path.contains('/') => {
                Err("expected a run, not the path of a checkpoint".to_owned())
            }
            Some(id) => Ok(Self(id.to_owned())),
            None => Ok(Self(text.to_owned())),
        }
    }
}

impl std::fmt::Display for RunReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Runs that a reference names, newest first; never empty. Every resumption of a run creates a run
/// with the same name.
pub(super) type FoundRuns = Vec<TrainingRun>;

/// A reference that names no run.
#[derive(Debug)]
pub(crate) struct UnknownRun {
    text: String,
    /// Similar names.
    nearest: Vec<String>,
    /// Whether the server has runs.
    pub(super) has_runs: bool,
}

impl UnknownRun {
    /// Reports a text that cannot name a run.
    pub(super) fn new(text: &str) -> Self {
        Self { text: text.to_owned(), nearest: Vec::new(), has_runs: true }
    }

    /// Returns a hint with similar names, if there are any.
    pub(crate) fn suggestion(&self) -> Option<String> {
        (!self.nearest.is_empty()).then(|| did_you_mean(&self.nearest, ""))
    }

    pub(super) fn error(&self, context: &CommandContext<'_>) -> CommandError {
        let message = match self.text.as_str() {
            LATEST if !self.has_runs => "the server has no training runs".to_owned(),
            text => format!("no training run has the name, id or folder {text:?}"),
        };
        let list = format!("tinkex run list{}", context.server_flags());
        let otherwise = format!("List the runs of the server with `{list}`.");
        CommandError::new(Exit::NotFound, message).hint(did_you_mean(&self.nearest, otherwise))
    }
}

impl RunReference {
    /// Returns whether the text is a complete id, which needs no request.
    pub(super) fn is_id(&self) -> bool {
        let number = self.0.rsplit_once(":train:").map(|(_, number)| number);
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    }

    pub(super) fn is_latest(&self) -> bool {
        self.0 == LATEST
    }

    /// Finds the run on the server.
    pub(crate) async fn find(
        &self,
        context: &CommandContext<'_>,
        rest: &RestClient,
        scope: AccessScope,
    ) -> Result<TrainingRun, CommandError> {
        match Box::pin(self.look_up(context, rest, scope)).await? {
            Ok(mut runs) => Ok(runs.swap_remove(0)),
            Err(unknown) => Err(unknown.error(context)),
        }
    }

    /// Finds all runs that the text names, newest first: a name has one for every resumption.
    pub(crate) async fn find_all(
        &self,
        context: &CommandContext<'_>,
        rest: &RestClient,
    ) -> Result<Vec<TrainingRun>, CommandError> {
        let found = Box::pin(self.look_up(context, rest, AccessScope::Owned)).await?;
        found.map_err(|unknown| unknown.error(context))
    }

    /// Returns the checkpoints of the runs that the text names, newest run first.
    pub(crate) async fn find_with_checkpoints(
        &self,
        context: &CommandContext<'_>,
        rest: &RestClient,
    ) -> Result<Vec<(ModelId, Vec<Checkpoint>)>, CommandError> {
        let is_folder = || RunFolder::contains_run(&context.environment.path(self.0.as_ref()));
        let mut listed = None;
        if !self.is_latest() && !is_folder() {
            // An id is the most common form, and needs only this request.
            let id = ModelId::from(self.0.as_str());
            match rest.list_checkpoints(id.clone()).await {
                Ok(response) => listed = Some(vec![(id, response.checkpoints)]),
                Err(error) if self.is_id() || !is_unknown(&error) => return Err(error.into()),
                Err(_) => {}
            }
        }
        // Some servers return an empty list for an unknown id, which may be a name.
        let is_empty = listed.as_ref().is_none_or(|listed| listed[0].1.is_empty());
        if !is_empty || (self.is_id() && listed.is_some()) {
            return Ok(listed.unwrap_or_default());
        }
        let found = Box::pin(self.look_up(context, rest, AccessScope::Accessible)).await?;
        let runs = match found {
            Ok(runs) => runs,
            Err(unknown) => return listed.ok_or_else(|| unknown.error(context)),
        };
        let mut found = Vec::new();
        for run in runs {
            let response = rest.list_checkpoints(run.training_run_id.clone()).await?;
            found.push((run.training_run_id, response.checkpoints));
        }
        Ok(found)
    }

    /// Finds the runs with this name, or the one run with this id, folder or start of an id.
    ///
    /// # Errors
    ///
    /// Returns an error if the text is the start of several ids, or if a request fails.
    pub(super) async fn look_up(
        &self,
        context: &CommandContext<'_>,
        rest: &RestClient,
        scope: AccessScope,
    ) -> Result<Result<FoundRuns, UnknownRun>, CommandError> {
        if self.is_latest() {
            return newest(context, rest, scope, |run| !is_temporary(run)).await;
        }
        let text = self.0.as_str();
        let path = context.environment.path(text.as_ref());
        if RunFolder::contains_run(&path) {
            let folder = LocalRun::open(&path)?;
            return Ok(Ok(vec![folder.run(rest, scope).await?]));
        }
        // An id is the most common form, and needs only this request.
        let by_id = rest.get_training_run(text, scope).await;
        match by_id {
            Ok(run) => return Ok(Ok(vec![run])),
            Err(error) if self.is_id() || !is_unknown(&error) => {
                let message = format!("cannot show run {text}");
                return Err(CommandError::from(error).context(&message));
            }
            Err(_) => {}
        }
        self.search(context, rest, scope).await
    }

    /// Searches the list of runs.
    async fn search(
        &self,
        context: &CommandContext<'_>,
        rest: &RestClient,
        scope: AccessScope,
    ) -> Result<Result<FoundRuns, UnknownRun>, CommandError> {
        let text = self.0.as_str();
        let _progress = Progress::waiting(context, "searching runs");
        let all = list_runs(context, rest, scope, usize::MAX).await?;
        let matching = |test: &dyn Fn(&TrainingRun) -> bool| -> FoundRuns {
            all.iter().filter(|run| test(run)).cloned().collect()
        };
        let named = matching(&|run| name_of(run) == Some(text));
        if !named.is_empty() {
            return Ok(Ok(named));
        }
        let is_prefix = |run: &TrainingRun| run.training_run_id.as_str().starts_with(text);
        let prefixed = if text.len() < MIN_PREFIX { Vec::new() } else { matching(&is_prefix) };
        match &prefixed[..] {
            [] => {}
            [_] => return Ok(Ok(prefixed)),
            several => return Err(ambiguous(text, several)),
        }
        // Servers that do not store names in metadata have runs whose names only the folders know.
        let environment = &*context.environment;
        let folders = folder::all_folders(&environment.variables, &environment.folder);
        let local = folders.iter().find(|folder| folder.record.name == text);
        if let Some(id) = local.and_then(LocalRun::run_id) {
            match rest.get_training_run(id, scope).await {
                Ok(run) => return Ok(Ok(vec![run])),
                // The run is on another server, or was deleted.
                Err(error) if is_unknown(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let names = all.iter().flat_map(|run| [name_of(run), Some(run.training_run_id.as_str())]);
        let mut names: Vec<&str> = names.flatten().collect();
        names.sort_unstable();
        names.dedup();
        let nearest = nearest_names(text, names).into_iter().map(str::to_owned).collect();
        Ok(Err(UnknownRun { text: text.to_owned(), nearest, has_runs: !all.is_empty() }))
    }
}

/// Returns the newest run that `accept` accepts.
pub(super) async fn newest(
    context: &CommandContext<'_>,
    rest: &RestClient,
    scope: AccessScope,
    accept: impl Fn(&TrainingRun) -> bool,
) -> Result<Result<FoundRuns, UnknownRun>, CommandError> {
    let _progress = Progress::waiting(context, "searching runs");
    let mut runs = pin!(rest.training_runs(ListTrainingRuns::default().access_scope(scope)));
    let mut has_runs = false;
    while let Some(run) = runs.next().await {
        let run = run?;
        if accept(&run) {
            return Ok(Ok(vec![run]));
        }
        has_runs = true;
    }
    Ok(Err(UnknownRun { text: LATEST.to_owned(), nearest: Vec::new(), has_runs }))
}

/// Lists at most `limit` runs, newest first. A server without the list has none.
pub(super) async fn list_runs(
    context: &CommandContext<'_>,
    rest: &RestClient,
    scope: AccessScope,
    limit: usize,
) -> Result<Vec<TrainingRun>, CommandError> {
    let runs = rest.training_runs(ListTrainingRuns::default().access_scope(scope)).take(limit);
    let mut runs = pin!(runs);
    let mut all = Vec::new();
    while let Some(run) = runs.next().await {
        match run {
            Ok(run) => all.push(run),
            Err(error) if is_unknown(&error) => break,
            Err(error) => return Err(error.into()),
        }
    }
    store_candidates(context, &all);
    Ok(all)
}

/// Keeps ids and names of runs for completion.
pub(crate) fn store_candidates(context: &CommandContext<'_>, runs: &[TrainingRun]) {
    let names = runs.iter().filter_map(|run| name_of(run).map(str::to_owned));
    let ids = runs.iter().map(|run| run.training_run_id.to_string());
    let variables = &context.environment.variables;
    id_cache::store(variables, IdKind::Run, ids);
    id_cache::store(variables, IdKind::Name, names);
}

/// Returns whether the run exists only for a download: `checkpoint download` loads training
/// checkpoints into such runs.
fn is_temporary(run: &TrainingRun) -> bool {
    let creator = run.user_metadata.as_ref().and_then(|metadata| metadata.get("created_by"));
    creator.is_some_and(|creator| creator.ends_with("checkpoint download"))
}

fn ambiguous(text: &str, runs: &[TrainingRun]) -> CommandError {
    let describe = |run: &TrainingRun| match name_of(run) {
        Some(name) => format!("\n  {} ({})", run.training_run_id, format::escape_controls(name)),
        None => format!("\n  {}", run.training_run_id),
    };
    let shown: String = runs.iter().take(MAX_CANDIDATES).map(describe).collect();
    let more = match runs.len().saturating_sub(MAX_CANDIDATES) {
        0 => String::new(),
        more => format!("\n  and {more} more"),
    };
    let message = format!("{text:?} is the start of {} run ids:{shown}{more}", runs.len());
    CommandError::usage(message).hint("Pass more characters of the id, or the name of the run.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_ids_are_recognized() {
        let is_id = |text: &str| text.parse::<RunReference>().unwrap().is_id();
        assert!(is_id("0034d8c9-0a88-52a9-b2b7-bce7cb1e6fef:train:0"));
        assert!(is_id("tinker://0034d8c9:train:12"));
        for other in ["animals", "0034d8c9", "0034d8c9:train:", "latest"] {
            assert!(!is_id(other), "{other}");
        }
        assert!("".parse::<RunReference>().is_err());
        assert!("tinker://".parse::<RunReference>().is_err());
        assert!("tinker://r:train:0/weights/1".parse::<RunReference>().is_err());
    }
}
