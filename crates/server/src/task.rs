//! Async tasks, threads and the blocking pool. The only module that may call `tokio::spawn`.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use tokio::sync::{Notify, Semaphore, oneshot};

use crate::error::ServerError;
use crate::simulation::Scheduler;

/// Maximum size of a body, in bytes, that is read without a permit of the body budget and decoded
/// on the async thread.
pub(crate) const SMALL: usize = 64 << 10;

/// Runs the loops of the worker and of the disk writer, and blocking jobs.
///
/// A loop is a future that waits only for its queue: it computes, or writes to disk, without
/// awaiting. A thread of its own therefore drives it in production. A simulation drives all loops
/// from one thread, in an order that it chooses.
#[derive(Clone)]
pub(crate) enum Executor {
    /// A thread for each loop; tokio's blocking pool for jobs.
    Threads,
    Simulated(Arc<dyn Scheduler>),
}

impl Executor {
    /// Starts a loop. `on_panic` runs if it panics, except in a simulation, whose scheduler reports
    /// panics.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl Future<Output = T> + Send + 'static,
        on_panic: impl FnOnce() + Send + 'static,
    ) -> io::Result<LoopHandle<T>> {
        let (sender, result) = oneshot::channel();
        let thread = match self {
            Self::Threads => {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_time().build()?;
                let run = move || match catch_unwind(AssertUnwindSafe(|| runtime.block_on(work))) {
                    // Sending fails if the handle was dropped, which is allowed.
                    Ok(result) => drop(sender.send(result)),
                    Err(_) => on_panic(),
                };
                Some(thread::Builder::new().name(name.to_owned()).spawn(run)?)
            }
            Self::Simulated(scheduler) => {
                scheduler.spawn(name, Box::pin(async move { drop(sender.send(work.await)) }));
                None
            }
        };
        Ok(LoopHandle { result, thread })
    }

    /// Runs `job`, which may block, on the blocking pool. The job continues if the caller stops
    /// waiting.
    pub(crate) async fn run_job<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServerError> {
        self.run_named_job("job", job).await
    }

    async fn run_named_job<T: Send + 'static>(
        &self,
        name: &'static str,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServerError> {
        match self {
            Self::Threads => {
                tokio::task::spawn_blocking(job).await.map_err(|error| job_error(&error))
            }
            Self::Simulated(scheduler) => {
                let (sender, result) = oneshot::channel();
                scheduler.spawn(name, Box::pin(async move { drop(sender.send(job())) }));
                result.await.map_err(|_| ServerError::shutting_down())
            }
        }
    }

    /// Spawns a task that runs until it is aborted.
    pub(crate) fn spawn(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> TaskHandle {
        match self {
            Self::Threads => TaskHandle::Spawned(spawn(task)),
            Self::Simulated(scheduler) => {
                let aborted = Arc::new(Notify::new());
                let abort = Arc::clone(&aborted);
                let task = async move {
                    tokio::select! {
                        biased;
                        () = abort.notified() => {}
                        () = task => {}
                    }
                };
                scheduler.spawn(name, Box::pin(task));
                TaskHandle::Simulated(aborted)
            }
        }
    }

    /// Runs `work` soon, never on the caller's stack. Drops it if no thread can be started.
    pub(crate) fn defer(&self, work: impl FnOnce() + Send + 'static) {
        match self {
            Self::Threads => {
                drop(thread::Builder::new().name("deferred".to_owned()).spawn(work));
            }
            Self::Simulated(scheduler) => scheduler.spawn("deferred", Box::pin(async { work() })),
        }
    }
}

/// Number of cores of a simulated machine.
pub const SIMULATED_CORES: usize = 2;

/// Handle of a loop that [`Executor::start`] started. Dropping it does not end the loop.
pub(crate) struct LoopHandle<T> {
    result: oneshot::Receiver<T>,
    thread: Option<thread::JoinHandle<()>>,
}

impl<T> LoopHandle<T> {
    /// Waits until the loop has ended and returns its result; `None` if it panicked. Everything
    /// that the loop owned is dropped then.
    pub(crate) async fn finished(self) -> Option<T> {
        self.result.await.ok()
    }

    /// Blocks until the loop has ended, unless the calling thread is its own.
    pub(crate) fn block(self) {
        let current = thread::current().id();
        if let Some(thread) = self.thread.filter(|thread| thread.thread().id() != current) {
            // `start` has caught and reported a panic.
            let _ = thread.join();
        }
    }
}

/// Task that [`Executor::spawn`] spawned. Dropping the handle does not end the task.
pub(crate) enum TaskHandle {
    Spawned(tokio::task::JoinHandle<()>),
    /// Notifies the task that it must end.
    Simulated(Arc<Notify>),
}

impl TaskHandle {
    pub(crate) fn abort(&self) {
        match self {
            Self::Spawned(task) => task.abort(),
            Self::Simulated(aborted) => aborted.notify_one(),
        }
    }

    /// Returns whether the task has ended, or has panicked. A simulation reports panics itself.
    #[cfg(feature = "upstream")]
    pub(crate) fn is_finished(&self) -> bool {
        matches!(self, Self::Spawned(task) if task.is_finished())
    }
}

/// Spawns `future` as a task that runs until it completes, is aborted, or the runtime shuts down.
pub(crate) fn spawn(
    future: impl Future<Output = ()> + Send + 'static,
) -> tokio::task::JoinHandle<()> {
    #[expect(clippy::disallowed_methods, reason = "this module is the permitted caller")]
    tokio::spawn(future)
}

/// Limits the number of jobs that decode large bodies at the same time.
pub(crate) struct DecodeJobs {
    pub(crate) permits: Arc<Semaphore>,
    executor: Executor,
}

impl DecodeJobs {
    /// Allows one job per core. More concurrent decoding would delay small requests.
    pub(crate) fn new(executor: Executor) -> Self {
        let cores = match executor {
            Executor::Threads => thread::available_parallelism().map_or(1, std::num::NonZero::get),
            Executor::Simulated(_) => SIMULATED_CORES,
        };
        Self { permits: Arc::new(Semaphore::new(cores)), executor }
    }

    /// Returns whether a body of `size` bytes is decoded on the async thread. The limit is lower in
    /// a simulation, whose requests are small: most of them must become jobs.
    fn is_small(&self, size: usize) -> bool {
        size < if matches!(self.executor, Executor::Threads) { SMALL } else { 128 }
    }
}

/// Runs `work` on the blocking pool, with one of the permits of `jobs`, if it processes at least
/// [`SMALL`] bytes; runs it directly otherwise.
pub(crate) async fn run_blocking<T: Send + 'static, E: From<ServerError> + Send + 'static>(
    jobs: &DecodeJobs,
    size: usize,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    if jobs.is_small(size) {
        return work();
    }
    let permit = Arc::clone(&jobs.permits).acquire_owned().await;
    let permit = permit.map_err(|_| ServerError::shutting_down())?;
    // The job keeps the permit: it continues if the client disconnects, which drops this future.
    let job = move || {
        let result = work();
        drop(permit);
        result
    };
    jobs.executor.run_named_job("decode", job).await?
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
        let jobs = DecodeJobs { permits: Arc::clone(&permits), executor: Executor::Threads };
        let (started, has_started) = tokio::sync::oneshot::channel();
        let (finish, may_finish) = mpsc::channel::<()>();
        let work = move || {
            let _ = started.send(());
            let _ = may_finish.recv();
            Ok::<_, ServerError>(())
        };
        tokio::select! {
            _ = run_blocking(&jobs, SMALL, work) => panic!("the job waits"),
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
        let jobs = DecodeJobs { permits: Arc::clone(&permits), executor: Executor::Threads };
        let work = || -> Result<(), ServerError> { panic!("the test expects this") };
        let error = run_blocking(&jobs, SMALL, work).await.unwrap_err();
        assert!(matches!(error, ServerError::Internal(_)), "{error}");
        assert_eq!(permits.available_permits(), 1);
    }
}
