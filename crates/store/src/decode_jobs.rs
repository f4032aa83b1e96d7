//! [`DecodeJobs`]: limits the jobs that decode request bodies.

use std::sync::Arc;
use std::thread;

use tokio::sync::Semaphore;

use crate::error::ServerError;
use crate::executor::Executor;

/// Size in bytes below which the server reads a body without a permit of the body budget. A server
/// process also decodes such a body on the async thread.
pub const SMALL: usize = 64 << 10;

/// Decides where bodies are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodePolicy {
    /// Maximum number of jobs at the same time. More concurrent decoding than cores would delay
    /// small requests.
    pub concurrent: usize,
    /// Size in bytes below which work runs on the caller's thread.
    pub inline_bytes: usize,
}

impl DecodePolicy {
    /// Returns the policy of a server process: one job per core, for work of at least [`SMALL`]
    /// bytes.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { concurrent: cores, inline_bytes: SMALL }
    }
}

/// Limits the number of jobs that decode large bodies at the same time.
pub struct DecodeJobs {
    permits: Arc<Semaphore>,
    inline_bytes: usize,
    executor: Executor,
}

impl DecodeJobs {
    /// Creates a limit for jobs on `executor`.
    #[must_use]
    pub fn new(policy: DecodePolicy, executor: Executor) -> Self {
        let permits = Arc::new(Semaphore::new(policy.concurrent.max(1)));
        Self { permits, inline_bytes: policy.inline_bytes, executor }
    }

    /// Runs `work`, which processes `size` bytes: as a job with a permit, or on the caller's thread
    /// if the size is below [`DecodePolicy::inline_bytes`].
    ///
    /// # Errors
    /// The error of `work`; also the errors of [`Executor::run_job`].
    pub async fn run<T: Send + 'static, E: From<ServerError> + Send + 'static>(
        &self,
        size: usize,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        if size < self.inline_bytes {
            return work();
        }
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|_| ServerError::shutting_down())?;
        // The job keeps the permit: it continues if the client disconnects, which drops this
        // future.
        let job = move || {
            let result = work();
            drop(permit);
            result
        };
        self.executor.run_named_job("decode", job).await?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn one_job() -> DecodeJobs {
        DecodeJobs::new(DecodePolicy { concurrent: 1, inline_bytes: SMALL }, Executor::threads())
    }

    #[tokio::test]
    async fn a_running_job_keeps_its_permit_if_its_client_disconnects() {
        let jobs = one_job();
        let (started, has_started) = tokio::sync::oneshot::channel();
        let (finish, may_finish) = mpsc::channel::<()>();
        let work = move || {
            let _ = started.send(());
            let _ = may_finish.recv();
            Ok::<_, ServerError>(())
        };
        tokio::select! {
            _ = jobs.run(SMALL, work) => panic!("the job waits"),
            started = has_started => started.unwrap(),
        }
        assert_eq!(jobs.permits.available_permits(), 0, "the job still runs");
        drop(finish);
        drop(jobs.permits.acquire().await.unwrap());
    }

    /// A client retries after a shutdown, so it would send the request that panics again and again.
    #[tokio::test]
    async fn a_panic_of_a_job_is_not_reported_as_a_shutdown() {
        let jobs = one_job();
        let work = || -> Result<(), ServerError> { panic!("the test expects this") };
        let error = jobs.run(SMALL, work).await.unwrap_err();
        assert!(matches!(error, ServerError::Internal(_)), "{error}");
        let permit = jobs.permits.acquire().await;
        assert!(permit.is_ok(), "the permit is released");
    }
}
