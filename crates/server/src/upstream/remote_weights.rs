//! Weights that are saved on an upstream.

use tokio::sync::oneshot;

use super::Upstream;
use super::fault::Fault;
use crate::backend::RemoteWeights;
use crate::log;
use crate::store::FailureCategory;

/// Returns the path on the upstream of weights, given as records store them.
pub(super) fn remote_path(folder: &str) -> Result<&str, Fault> {
    RemoteWeights::path_in(folder).ok_or_else(|| {
        let message = format!("the weights in {folder} are not on an upstream");
        Fault::Failed(FailureCategory::Server, message)
    })
}

/// Deletes weights of an upstream if no record refers to them. A failure is only logged: the
/// weights waste space.
pub(super) async fn delete_unreferenced(upstream: &Upstream, folder: &str) {
    let Some(path) = RemoteWeights::path_in(folder) else { return };
    let (sender, written) = oneshot::channel();
    let state = &upstream.state;
    state.store().disk.barrier(Box::new(move |written| drop(sender.send(written))));
    // Wait until the current records are durable: after a crash, earlier records would refer to the
    // deleted weights.
    let is_durable = matches!(written.await, Ok(Ok(())));
    if !is_durable || state.store().folders().contains(folder) {
        return;
    }
    if let Err(error) = upstream.service.rest().delete_checkpoint(path).await {
        tracing::debug!(
            target: log::STORAGE,
            upstream = %upstream.name,
            path,
            %error,
            "cannot delete a checkpoint of an upstream"
        );
    }
}
