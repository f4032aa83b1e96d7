//! Spawns async tasks. The only module that may call `tokio::spawn`.

use std::future::Future;

/// Spawns `future` as a task that runs until it completes, is aborted, or the runtime shuts down.
pub(crate) fn spawn(
    future: impl Future<Output = ()> + Send + 'static,
) -> tokio::task::JoinHandle<()> {
    #[expect(clippy::disallowed_methods, reason = "this module is the permitted caller")]
    tokio::spawn(future)
}
