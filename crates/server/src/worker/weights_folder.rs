//! Folders of weights: their names get the digest of their content when they are complete, and the
//! content is verified before each use.

use std::io;
use std::path::PathBuf;

use tinkex_backend::outcome::Outcome;
use tinkex_store::sealed;
use tinkex_store::store::{FailureCategory, Store};
use tinkex_store::weights::WeightsLocation;

use super::WorkerContext;
use crate::fault::is_transient;

impl WorkerContext {
    /// Adds the digest to the name of a folder under `weights/` that is complete and registered in
    /// [`Store::unfinished_folders`]. Registers and returns the new name.
    pub(super) fn seal_folder(&self, folder: &str) -> io::Result<String> {
        let mut registered = None;
        let sealed = sealed::seal(&self.weights_dir.join(folder), |name| {
            // Register the name before the rename: the expiry task removes unknown folders.
            self.store().unfinished_folders.insert(name.to_owned());
            registered = Some(name.to_owned());
        });
        let mut store = self.store();
        store.unfinished_folders.remove(folder);
        if let (Err(_), Some(name)) = (&sealed, registered) {
            store.unfinished_folders.remove(&name);
        }
        sealed
    }

    /// Returns the path of a folder of weights after verifying its content.
    pub(super) fn verified_folder(&self, folder: &str) -> Result<PathBuf, Outcome> {
        let path = self.weights_dir.join(folder);
        sealed::verify(&path).map(|()| path).map_err(|error| {
            let user = user_of_folder(&self.store(), folder);
            let message = format!("cannot use {user} on the server's disk: {error}");
            Outcome::failed(FailureCategory::Server, message).with_transient(is_transient(&error))
        })
    }
}

/// Returns the object that uses a folder, for messages to clients.
fn user_of_folder(store: &Store, folder: &str) -> String {
    let is_folder = |weights: &WeightsLocation| weights.local() == Some(folder);
    let checkpoint = store.checkpoints.values().find(|entry| is_folder(&entry.row.weights));
    if let Some(checkpoint) = checkpoint {
        return format!("checkpoint {}", checkpoint.row.path);
    }
    let of_run = |snapshot: &tinkex_store::store::SnapshotRecord| is_folder(&snapshot.weights);
    let run = store.runs.values().find(|entry| entry.row.snapshot.as_ref().is_some_and(of_run));
    if let Some(run) = run {
        return format!("the snapshot of model {}", run.row.id);
    }
    let mut samplers = store.samplers.values();
    match samplers.find(|entry| entry.row.weights.as_ref().is_some_and(is_folder)) {
        Some(sampler) => format!("the weights of sampling session {}", sampler.row.id),
        None => "the weights".to_owned(),
    }
}
