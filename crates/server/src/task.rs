//! Async tasks and the blocking pool. The only module that may call `tokio::spawn`.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::error::ServerError;

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

/// Runs `work` on the blocking pool, with one of `permits`, if it processes at least [`SMALL`]
/// bytes; runs it directly otherwise.
pub(crate) async fn run_blocking<T: Send + 'static, E: From<ServerError> + Send + 'static>(
    permits: &Arc<Semaphore>,
    size: usize,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    if size < SMALL {
        return work();
    }
    let permit = Arc::clone(permits).acquire_owned().await;
    let permit = permit.map_err(|_| ServerError::shutting_down())?;
    // The job keeps the permit: it continues if the client disconnects, which drops this future.
    let job = move || {
        let result = work();
        drop(permit);
        result
    };
    let done = tokio::task::spawn_blocking(job).await;
    done.unwrap_or_else(|error| Err(job_error(&error).into()))
}

/// Returns the error of a job on the blocking pool that has no result: it panicked, or the runtime
/// shut down before it started.
pub(crate) fn job_error(error: &tokio::task::JoinError) -> ServerError {
    match error.is_panic() {
        true => ServerError::Internal("internal error: a request handler panicked".to_owned()),
        false => ServerError::shutting_down(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn bug_a_disconnected_client_released_the_permit_of_a_running_job() {
        let permits = Arc::new(Semaphore::new(1));
        let (started, has_started) = tokio::sync::oneshot::channel();
        let (finish, may_finish) = mpsc::channel::<()>();
        let work = move || {
            let _ = started.send(());
            let _ = may_finish.recv();
            Ok::<_, ServerError>(())
        };
        tokio::select! {
            _ = run_blocking(&permits, SMALL, work) => panic!("the job waits"),
            started = has_started => started.unwrap(),
        }
        assert_eq!(permits.available_permits(), 0, "the job still runs");
        drop(finish);
        drop(permits.acquire().await.unwrap());
    }

    /// Clients retry after a shutdown, so the same request would have panicked again and again.
    #[tokio::test]
    async fn bug_a_job_that_panicked_was_reported_as_a_shutdown() {
        let permits = Arc::new(Semaphore::new(1));
        let work = || -> Result<(), ServerError> { panic!("the test expects this") };
        let error = run_blocking(&permits, SMALL, work).await.unwrap_err();
        assert!(matches!(error, ServerError::Internal(_)), "{error}");
        assert_eq!(permits.available_permits(), 1);
    }
}
