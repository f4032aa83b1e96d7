//! Name, method, data and number of steps of a training run, for the model card of an export.

use tinkex::rest::AccessScope;
use tinkex::{RestClient, TinkerPath};
use tinkex_runs::RunRecord;

use crate::environment::Environment;
use crate::error::CommandError;
use crate::reference::{folder_of_checkpoint, name_of};

/// Returns rows for the table of a model card: the name of the run, which the server has, and the
/// method, data and number of steps, which only a run folder on this machine has.
///
/// The rows are optional, so a request that the server rejects is logged and not an error.
pub(super) async fn training_details(
    environment: &Environment,
    rest: &RestClient,
    path: &TinkerPath,
) -> Result<Vec<(&'static str, String)>, CommandError> {
    let mut details = Vec::new();
    match rest.get_training_run(path.run().clone(), AccessScope::Accessible).await {
        Ok(run) => details.extend(name_of(&run).map(|name| ("training run", name.to_owned()))),
        Err(error) if error.status().is_none() => return Err(error.into()),
        Err(error) => tracing::debug!(%error, %path, "cannot read the name of the training run"),
    }
    let folder = folder_of_checkpoint(&environment.variables, &environment.folder, path);
    if let Some(folder) = folder {
        details.extend(folder_details(&folder.record, path));
    }
    Ok(details)
}

/// Returns the rows for method, data and steps of a run.
fn folder_details(record: &RunRecord, path: &TinkerPath) -> Vec<(&'static str, String)> {
    let settings = &record.settings;
    let progress = &record.progress;
    let mut details = vec![("method", settings.method.method().to_string())];
    // Only the names: a model card is published, and folders belong to the user.
    let files = settings.data.files.iter();
    let names: Vec<_> = files.filter_map(|file| file.file_name()?.to_str()).collect();
    if !names.is_empty() {
        details.push(("training data", names.join(", ")));
    }
    let saved = progress.checkpoints.iter().find(|saved| saved.path == *path);
    // The sampler weights are saved after the last training checkpoint of a finished run.
    let is_last = progress.finished && progress.sampler.as_ref() == Some(path);
    let step = saved.map(|saved| saved.step).or_else(|| is_last.then_some(settings.steps));
    details.extend(step.map(|step| ("steps", step.to_string())));
    details
}
