//! Async tasks and the blocking pool. The only module that may call `tokio::spawn`.

use std::future::Future;

use crate::error::ServerError;
use crate::state::ServerState;

/// Maximum size of a body, in bytes, that is read without a permit of the body budget and decoded
/// on the async thread.
pub(crate) const SMALL: usize = 64 << 10;

/// Spawns `future` as a task that runs until it completes, is aborted, or the runtime shuts down.
pub(crate) fn spawn(
    future: impl Future<Output = ()> + Send + 'static,
) -> tokio::task::JoinHandle<()> {
    #[expect(clippy::disallowed_methods, reason = "this module is the permitted caller")]
    tokio::spawn(future)
}

/// Runs `work` on the blocking pool, with one permit per core, if it processes at least [`SMALL`]
/// bytes; runs it directly otherwise.
pub(crate) async fn run_blocking<T: Send + 'static, E: From<ServerError> + Send + 'static>(
    state: &ServerState,
    size: usize,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    if size < SMALL {
        return work();
    }
    let _permit = state.decode_permits.acquire().await.map_err(|_| ServerError::shutting_down())?;
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(ServerError::shutting_down().into()))
}
