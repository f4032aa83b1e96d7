//! References to training runs and checkpoints in command lines.
//!
//! | Argument | Forms |
//! |---|---|
//! | RUN | an id, the start of an id, a name, a run folder, or `latest` |
//! | CHECKPOINT | a `tinker://` path, RUN (its latest checkpoint), `RUN/NAME`, `RUN/KIND/NAME`, or `RUN/latest` |
//!
//! [`RunReference`] and [`CheckpointReference`] are the types of these arguments. All commands use
//! them, so that the same text names the same run everywhere.

mod checkpoint;
mod completion;
mod folder;
mod name;
mod run;

pub(crate) use checkpoint::{CheckpointReference, CheckpointUse};
pub(crate) use completion::{checkpoint_candidates, run_candidates, weights_candidates};
pub(crate) use folder::{LocalRun, find_folder, folder_of_checkpoint, remember_folder};
pub(crate) use name::{RunName, choose_name, name_of, run_metadata};
pub(crate) use run::{RunReference, store_candidates};

/// Reference to the newest run, or to the newest checkpoint of a run.
const LATEST: &str = "latest";

/// Returns the hint of an error about an unknown name.
fn did_you_mean(nearest: &[String], otherwise: impl Into<String>) -> String {
    match nearest {
        [] => otherwise.into(),
        [only] => format!("Did you mean {only}?"),
        [others @ .., last] => format!("Did you mean {} or {last}?", others.join(", ")),
    }
}

/// Returns whether the server rejected a request because it does not know the resource, or does not
/// support the request.
fn is_unknown(error: &tinkex::Error) -> bool {
    matches!(error.status(), Some(400 | 404 | 405 | 422 | 501))
}
