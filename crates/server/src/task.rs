//! The only place that spawns.

use std::future::Future;

/// Runs something beside the caller, until it ends or the runtime does.
pub(crate) fn spawn(
    future: impl Future<Output = ()> + Send + 'static,
) -> tokio::task::JoinHandle<()> {
    #[expect(clippy::disallowed_methods, reason = "this is the place")]
    tokio::spawn(future)
}
