//! [`CheckpointReference`]: a checkpoint that a command line names.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tinkex::CheckpointKind;
use tinkex::rest::{AccessScope, Checkpoint, TrainingRun};
use tinkex::{RestClient, TinkerPath};
use tinkex_runs::{RunFolder, checkpoint_name};
use tinkex_suggest::nearest_names;

use crate::context::CommandContext;
use crate::environment::Environment;
use crate::error::{CommandError, Exit};

use super::run::{self, FoundRuns, RunReference, UnknownRun};
use super::{LATEST, did_you_mean, name_of};

/// Checkpoint that a command line names: a `tinker://` path, a run, or a name below a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CheckpointReference {
    Path(TinkerPath),
    /// Any other form. It is split when it is resolved, because the path of a run folder may
    /// contain slashes.
    Text(String),
}

impl FromStr for CheckpointReference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("tinker:") {
            let path: Result<TinkerPath, tinkex::InvalidInput> = text.parse();
            return path.map(Self::Path).map_err(|error| error.to_string());
        }
        if text.is_empty() {
            return Err(
                "expected a tinker:// path, or a run and the name of a checkpoint".to_owned()
            );
        }
        Ok(Self::Text(text.to_owned()))
    }
}

impl std::fmt::Display for CheckpointReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Path(path) => path.fmt(f),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl Serialize for CheckpointReference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CheckpointReference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What a checkpoint is used for, which determines the kinds that a reference may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckpointUse {
    /// Sampling: sampler weights, or else a training checkpoint.
    Sample,
    /// Training: a training checkpoint.
    Train,
    /// Download: a training checkpoint, or else other weights.
    Download,
    /// Download of external weights.
    External,
    /// Anything that applies to all kinds, such as publishing.
    Any,
}

impl CheckpointUse {
    /// Returns the kinds, preferred ones first.
    fn kinds(self) -> &'static [CheckpointKind] {
        use CheckpointKind::{External, Sampler, Training};
        match self {
            Self::Sample => &[Sampler, Training],
            Self::Train => &[Training],
            Self::Download | Self::Any => &[Training, Sampler, External],
            Self::External => &[External],
        }
    }

    /// Describes the kind of checkpoint in an error message.
    fn noun(self) -> &'static str {
        match self {
            Self::Train => "training checkpoint",
            Self::External => "external weights",
            Self::Sample | Self::Download | Self::Any => "checkpoint",
        }
    }
}

/// Hint of an error about a run without a checkpoint.
const SAVE_HINT: &str = "Save one first; `tinkex train` saves one when it is stopped with Ctrl-C.";

/// Parts of a reference.
struct CheckpointParts {
    run: RunReference,
    kind: Option<CheckpointKind>,
    /// Name of the checkpoint; `None` is the latest.
    name: Option<String>,
}

impl CheckpointReference {
    /// Returns a reference to the latest checkpoint of a run.
    pub(crate) fn latest_of(run: &RunReference) -> Self {
        Self::Text(run.to_string())
    }

    /// Finds the checkpoint on the server. A `tinker://` path needs no request.
    pub(crate) async fn resolve(
        &self,
        context: &mut CommandContext<'_>,
        wanted: CheckpointUse,
    ) -> Result<TinkerPath, CommandError> {
        if let Self::Path(path) = self {
            return check_path(path, wanted);
        }
        let rest = context.client().await?.rest();
        match Box::pin(self.look_up(context, &rest, wanted)).await? {
            Ok(path) => Ok(path),
            Err(unknown) => Err(unknown.error(context)),
        }
    }

    /// Finds the checkpoint, or reports that there is no such run.
    pub(crate) async fn look_up(
        &self,
        context: &CommandContext<'_>,
        rest: &RestClient,
        wanted: CheckpointUse,
    ) -> Result<Result<TinkerPath, UnknownRun>, CommandError> {
        let text = match self {
            Self::Path(path) => return check_path(path, wanted).map(Ok),
            Self::Text(text) => text,
        };
        let Some(parts) = split(context.environment, text) else {
            return Ok(Err(UnknownRun::new(text)));
        };
        if let Some(kind) = parts.kind {
            check_kind(kind, text, wanted)?;
        }
        // A complete path needs no request. A short name such as `step-30` is found in the list.
        if parts.run.is_id()
            && let Some(kind) = parts.kind
            && let Some(name) = &parts.name
            && full_step_name(name).is_none_or(|full| full == *name)
        {
            let path =
                TinkerPath::new(parts.run.0.as_str(), kind, name).map_err(tinkex::Error::from)?;
            return Ok(Ok(path));
        }
        let scope = AccessScope::Accessible;
        let runs = if parts.run.is_latest() && parts.name.is_none() {
            let accept = |run: &TrainingRun| latest_of(run, parts.kind, wanted).is_some();
            match run::newest(context, rest, scope, accept).await? {
                Err(unknown) if unknown.has_runs => {
                    let message = "no training run has a checkpoint that this command can use";
                    return Err(CommandError::new(Exit::NotFound, message).hint(SAVE_HINT));
                }
                found => found,
            }
        } else {
            Box::pin(parts.run.look_up(context, rest, scope)).await?
        };
        match runs {
            Ok(runs) => parts.choose(rest, &runs, wanted).await.map(Ok),
            Err(unknown) => Ok(Err(unknown)),
        }
    }
}

/// Parses the `tinker://` path of a checkpoint in a response.
fn parse_path(text: &str) -> Result<TinkerPath, CommandError> {
    Ok(text.parse().map_err(tinkex::Error::from)?)
}

/// Splits a reference into the run, the kind and the name. Returns `None` if it has too many
/// segments or an unknown kind.
fn split(environment: &Environment, text: &str) -> Option<CheckpointParts> {
    let whole: Vec<&str> = text.trim_end_matches('/').split('/').collect();
    // The run is the longest prefix that is the path of a run folder, or else the first segment.
    let is_folder = |count: &usize| {
        RunFolder::contains_run(&environment.path(whole[..*count].join("/").as_ref()))
    };
    let count = (1..=whole.len()).rev().find(is_folder).unwrap_or(1);
    let run = RunReference(whole[..count].join("/"));
    let segment = |text: &str| CheckpointKind::from_segment(text);
    let (kind, name) = match whole[count..] {
        [] => (None, None),
        [kind] if segment(kind).is_some() => (segment(kind), None),
        [name] => (None, Some(name)),
        [kind, name] => (Some(segment(kind)?), Some(name)),
        _ => return None,
    };
    let name = name.filter(|name| *name != LATEST).map(str::to_owned);
    (!run.0.is_empty()).then_some(CheckpointParts { run, kind, name })
}

/// Checks that a path has a kind that the command can use.
fn check_path(path: &TinkerPath, wanted: CheckpointUse) -> Result<TinkerPath, CommandError> {
    check_kind(path.kind(), &path.to_string(), wanted)?;
    Ok(path.clone())
}

/// Checks that the command can use checkpoints of the kind that `text` names.
fn check_kind(kind: CheckpointKind, text: &str, wanted: CheckpointUse) -> Result<(), CommandError> {
    let expected = match wanted {
        CheckpointUse::Train => "a training checkpoint: tinker://RUN/weights/NAME",
        CheckpointUse::External => "external weights: tinker://RUN/external_weights/NAME",
        CheckpointUse::Sample | CheckpointUse::Download | CheckpointUse::Any => {
            return Ok(());
        }
    };
    if wanted.kinds().contains(&kind) {
        return Ok(());
    }
    Err(CommandError::usage(format!("cannot use {text}: expected {expected}")))
}

/// Returns the latest checkpoint of a run, of `kind` if it is given.
fn latest_of(
    run: &TrainingRun,
    kind: Option<CheckpointKind>,
    wanted: CheckpointUse,
) -> Option<&Checkpoint> {
    let of_kind = |kind: &CheckpointKind| match kind {
        CheckpointKind::Training => run.last_checkpoint.as_ref(),
        CheckpointKind::Sampler => run.last_sampler_checkpoint.as_ref(),
        _ => None,
    };
    let kinds = wanted.kinds().iter().filter(|one| kind.is_none_or(|kind| kind == **one));
    let mut checkpoints = kinds.filter_map(of_kind);
    match wanted {
        CheckpointUse::Any => checkpoints.max_by_key(|one| one.time.unix_micros()),
        _ => checkpoints.next(),
    }
}

impl CheckpointParts {
    /// Chooses the checkpoint from `runs`, which have the same name, newest first.
    async fn choose(
        &self,
        rest: &RestClient,
        runs: &FoundRuns,
        wanted: CheckpointUse,
    ) -> Result<TinkerPath, CommandError> {
        if self.name.is_none()
            && let Some(latest) = runs.iter().find_map(|run| latest_of(run, self.kind, wanted))
        {
            return parse_path(&latest.tinker_path);
        }
        let mut names = Vec::new();
        for run in runs {
            let mut listed = rest.list_checkpoints(run.training_run_id.clone()).await?.checkpoints;
            let is_usable = |one: &Checkpoint| {
                let kind = one.checkpoint_type;
                wanted.kinds().contains(&kind) && self.kind.is_none_or(|wanted| wanted == kind)
            };
            listed.retain(is_usable);
            names.extend(listed.iter().filter_map(|one| name_in(one).map(str::to_owned)));
            if let Some(found) = self.pick(&listed, wanted)? {
                return parse_path(&found.tinker_path);
            }
        }
        Err(self.missing(&runs[0], wanted, names))
    }

    /// Picks the checkpoint with the name, or the latest one.
    fn pick<'c>(
        &self,
        listed: &'c [Checkpoint],
        wanted: CheckpointUse,
    ) -> Result<Option<&'c Checkpoint>, CommandError> {
        let Some(name) = &self.name else {
            return Ok(listed.iter().max_by_key(|one| one.time.unix_micros()));
        };
        let has_name = |one: &&Checkpoint| name_in(one).is_some_and(|known| is_same(known, name));
        let mut found: Vec<&Checkpoint> = listed.iter().filter(has_name).collect();
        if wanted == CheckpointUse::Any && found.len() > 1 {
            let list: String = found.iter().map(|one| format!("\n  {}", one.tinker_path)).collect();
            let message = format!("{}/{name} names {} checkpoints:{list}", self.run, found.len());
            let kind = found[0].checkpoint_type.segment();
            let hint = format!("Name the kind too, such as {}/{kind}/{name}.", self.run);
            return Err(CommandError::usage(message).hint(hint));
        }
        let order =
            |one: &&Checkpoint| wanted.kinds().iter().position(|kind| *kind == one.checkpoint_type);
        found.sort_by_key(order);
        Ok(found.first().copied())
    }

    /// Returns the error of a run without the checkpoint. `names` are the checkpoints of the run.
    fn missing(
        &self,
        run: &TrainingRun,
        wanted: CheckpointUse,
        mut names: Vec<String>,
    ) -> CommandError {
        names.sort();
        names.dedup();
        let id = &run.training_run_id;
        let shown = name_of(run).unwrap_or(id.as_str());
        let noun = wanted.noun();
        let Some(name) = &self.name else {
            let message = format!("run {shown} has no {noun}");
            return CommandError::new(Exit::NotFound, message).hint(SAVE_HINT);
        };
        let nearest = nearest_names(name, names.iter().map(String::as_str));
        let nearest: Vec<String> = nearest.iter().map(|name| format!("{shown}/{name}")).collect();
        let other = match &names[..] {
            [] => format!("The run has no {noun} that this command can use."),
            names => {
                // Names contain the step, so the last ones are the newest.
                let last: Vec<&str> = names.iter().rev().take(5).map(String::as_str).collect();
                let more = if names.len() > last.len() { ", …" } else { "" };
                format!("The run has: {}{more}.", last.join(", "))
            }
        };
        CommandError::new(Exit::NotFound, format!("run {shown} has no {noun} {name}"))
            .hint(did_you_mean(&nearest, other))
    }
}

/// Returns the name of a listed checkpoint.
fn name_in(checkpoint: &Checkpoint) -> Option<&str> {
    checkpoint.tinker_path.rsplit('/').next()
}

/// Returns the name that `tinkex train` gives to the checkpoint of a step: `step-000030` for
/// `step-30`. Returns `None` if `text` names no step.
fn full_step_name(text: &str) -> Option<String> {
    text.strip_prefix("step-")?.parse().ok().map(checkpoint_name)
}

/// Returns whether `text` names the checkpoint `known`: `step-30` names `step-000030` too.
fn is_same(known: &str, text: &str) -> bool {
    known == text || full_step_name(text).is_some_and(|name| name == known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_named_without_leading_zeros() {
        assert!(is_same("step-000030", "step-30"));
        assert!(is_same("step-000030", "step-000030"));
        assert!(is_same("final", "final"));
        assert!(!is_same("step-000030", "step-3"));
        assert!(!is_same("step-000030", "30"));
    }

    #[test]
    fn invalid_paths_are_rejected_before_a_request() {
        let parse = |text: &str| text.parse::<CheckpointReference>();
        assert!(parse("tinker://run-1/0001").is_err());
        assert!(parse("tinker://run-1").is_err());
        assert!(parse("").is_err());
        assert!(matches!(parse("tinker://r/weights/1"), Ok(CheckpointReference::Path(_))));
        assert!(matches!(parse("animals/step-30"), Ok(CheckpointReference::Text(_))));
    }
}
