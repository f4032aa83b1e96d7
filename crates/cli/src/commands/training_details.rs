//! Name, method, data and number of steps of a training run, for the model card of an export.

use std::path::Path;

use serde_json::Value;
use tinkex::recipes::SavedCheckpoint;
use tinkex::rest::AccessScope;
use tinkex::{RestClient, TinkerPath};

use crate::environment::Environment;
use crate::error::CommandError;
use crate::reference::{folder_of_run, name_of};

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
    let folder = folder_of_run(&environment.variables, &environment.folder, path.run().as_str());
    if let Some(folder) = folder {
        details.extend(folder_details(&folder.path, path));
    }
    Ok(details)
}

/// Returns the rows for method, data and steps from the files of a run folder.
fn folder_details(folder: &Path, path: &TinkerPath) -> Vec<(&'static str, String)> {
    let read = |name: &str| -> Value {
        let bytes = std::fs::read(folder.join(name)).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    };
    let run = read("run.json");
    let settings = &run["settings"];
    let mut details = Vec::new();
    // `tinkex rl` has the method beside the settings.
    if let Some(method) = settings["method"].as_str().or(run["method"].as_str()) {
        details.push(("method", method.to_owned()));
    }
    let files = match &settings["file"] {
        Value::Array(files) => files.iter().filter_map(Value::as_str).collect(),
        file => Vec::from_iter(file.as_str()),
    };
    // Only the names: a model card is published, and folders belong to the user.
    let names: Vec<_> =
        files.iter().filter_map(|file| Path::new(file).file_name()?.to_str()).collect();
    if !names.is_empty() {
        details.push(("training data", names.join(", ")));
    }
    // `tinkex rl` keeps its progress in a second file.
    let saved = [&run["saved"], &read("resume.json")["saved"]]
        .into_iter()
        .find_map(|saved| serde_json::from_value::<Vec<SavedCheckpoint>>(saved.clone()).ok())
        .unwrap_or_default();
    let step = saved.iter().find(|saved| saved.path == *path).map(|saved| saved.step);
    // The sampler weights of a finished run have all of its steps.
    let is_last = run["sampler"] == path.to_string() && run["finished"] == true;
    let step = step.or_else(|| settings["steps"].as_u64().filter(|_| is_last));
    details.extend(step.map(|step| ("steps", step.to_string())));
    details
}
