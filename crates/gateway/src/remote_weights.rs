//! Paths and deletion of weights that are saved on an upstream.

use tinkex_store::log;
use tinkex_store::record::FailureCategory;
use tinkex_store::weights::{RemoteWeights, WeightsLocation};
use tokio::sync::oneshot;

use super::Upstream;
use super::fault::Fault;

/// Returns the path of `weights` on the upstream.
///
/// # Errors
/// If the weights are in a folder of this server. A record of a run on an upstream refers to such
/// weights only if another program has changed the record.
pub(super) fn remote_path(weights: &WeightsLocation) -> Result<&str, Fault> {
    match weights {
        WeightsLocation::Upstream(remote) => Ok(&remote.path),
        WeightsLocation::Local(folder) => {
            let message = format!("the weights in {folder} are not on an upstream");
            Err(Fault::Failed(FailureCategory::Server, message))
        }
    }
}

/// Deletes weights from an upstream if no record refers to them. A failure is only logged, because
/// the only consequence is wasted space on the upstream.
pub(super) async fn delete_unreferenced(upstream: &Upstream, weights: RemoteWeights) {
    let (sender, written) = oneshot::channel();
    let store = &upstream.context.store;
    store.lock().disk.barrier(Box::new(move |written| drop(sender.send(written))));
    // Wait until the current records are durable: after a crash, earlier records would refer to the
    // deleted weights.
    let is_durable = matches!(written.await, Ok(Ok(())));
    let path = weights.path.clone();
    let location = WeightsLocation::Upstream(weights);
    if !is_durable || store.lock().weights_in_use().contains(&location) {
        return;
    }
    if let Err(error) = upstream.service.rest().delete_checkpoint(&path).await {
        tracing::debug!(
            target: log::STORAGE,
            upstream = %upstream.handle.name,
            path,
            %error,
            "cannot delete a checkpoint of an upstream"
        );
    }
}
