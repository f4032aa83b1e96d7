//! [`Executor`]: runs loops on their own threads, tasks, and blocking jobs.
//!
//! The only module of the server's crates that may call `tokio::spawn`.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::sync::{Notify, oneshot};

use crate::error::ServerError;

/// Future that a [`Scheduler`] drives.
pub type ScheduledTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Function that a [`Scheduler`] calls once.
pub type ScheduledJob = Box<dyn FnOnce() + Send>;

/// Decides on which threads, and in which order, the work of an [`Executor`] runs.
///
/// The provided methods run everything as tasks, for a scheduler that drives the whole server from
/// one thread.
pub trait Scheduler: Send + Sync {
    /// Runs `task` until it completes or the process ends. `name` identifies the task to the
    /// scheduler.
    fn spawn(&self, name: &'static str, task: ScheduledTask);

    /// Runs a loop. The loop computes or writes to disk without awaiting, and awaits only its
    /// queue. Calls `on_panic` if the loop panics and the scheduler does not report panics itself.
    /// Returns the thread of the loop if the loop has its own thread.
    ///
    /// # Errors
    /// If no thread can be started.
    fn start_loop(
        &self,
        name: &'static str,
        work: ScheduledTask,
        on_panic: ScheduledJob,
    ) -> io::Result<Option<thread::JoinHandle<()>>> {
        drop(on_panic);
        self.spawn(name, work);
        Ok(None)
    }

    /// Runs `job`, which may block. Drops it if the process shuts down before it starts.
    fn run_job(&self, name: &'static str, job: ScheduledJob) {
        self.spawn(name, Box::pin(async { job() }));
    }

    /// Runs `work` soon, never on the caller's stack. Drops it if no thread can be started.
    fn defer(&self, work: ScheduledJob) {
        self.spawn("deferred", Box::pin(async { work() }));
    }
}

/// Scheduler of a server process: a thread for each loop, tokio's tasks, and tokio's blocking pool
/// for jobs.
struct Threads;

impl Scheduler for Threads {
    fn spawn(&self, _name: &'static str, task: ScheduledTask) {
        drop(spawn(task));
    }

    fn start_loop(
        &self,
        name: &'static str,
        work: ScheduledTask,
        on_panic: ScheduledJob,
    ) -> io::Result<Option<thread::JoinHandle<()>>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let run = move || {
            if catch_unwind(AssertUnwindSafe(|| runtime.block_on(work))).is_err() {
                on_panic();
            }
        };
        thread::Builder::new().name(name.to_owned()).spawn(run).map(Some)
    }

    fn run_job(&self, _name: &'static str, job: ScheduledJob) {
        drop(tokio::task::spawn_blocking(job));
    }

    fn defer(&self, work: ScheduledJob) {
        drop(thread::Builder::new().name("deferred".to_owned()).spawn(work));
    }
}

/// Runs the loops of the worker and of the disk writer, tasks, and jobs that block. Cheap to clone.
#[derive(Clone)]
pub struct Executor(Arc<dyn Scheduler>);

impl Executor {
    /// Creates the executor of a server process.
    #[must_use]
    pub fn threads() -> Self {
        Self(Arc::new(Threads))
    }

    /// Creates an executor whose work `scheduler` runs.
    #[must_use]
    pub fn new(scheduler: Arc<dyn Scheduler>) -> Self {
        Self(scheduler)
    }

    /// Starts a loop; see [`Scheduler::start_loop`].
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl Future<Output = T> + Send + 'static,
        on_panic: impl FnOnce() + Send + 'static,
    ) -> io::Result<LoopHandle<T>> {
        let (sender, result) = oneshot::channel();
        // Sending fails if the caller has dropped the handle, which is allowed.
        let work = Box::pin(async move { drop(sender.send(work.await)) });
        let thread = self.0.start_loop(name, work, Box::new(on_panic))?;
        Ok(LoopHandle { result, thread })
    }

    /// Runs `job`, which may block. The job continues if the caller stops waiting.
    ///
    /// # Errors
    /// [`ServerError::Internal`] if the job panicked; [`ServerError::Busy`] if the server shut down
    /// before the job started.
    pub async fn run_job<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServerError> {
        self.run_named_job("job", job).await
    }

    pub(crate) async fn run_named_job<T: Send + 'static>(
        &self,
        name: &'static str,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServerError> {
        let (sender, result) = oneshot::channel();
        let job = move || match catch_unwind(AssertUnwindSafe(job)) {
            // Sending fails if the caller stopped waiting.
            Ok(value) => drop(sender.send(Some(value))),
            Err(panic) => {
                drop(sender.send(None));
                // Continue the panic: the scheduler may report it.
                resume_unwind(panic);
            }
        };
        self.0.run_job(name, Box::new(job));
        match result.await {
            Ok(Some(value)) => Ok(value),
            Ok(None) => {
                Err(ServerError::Internal("internal error: a request handler panicked".to_owned()))
            }
            Err(_) => Err(ServerError::shutting_down()),
        }
    }

    /// Spawns a task that runs until it completes or is aborted.
    pub fn spawn(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> TaskHandle {
        let abort = Arc::new(Notify::new());
        let finished = Arc::new(AtomicBool::new(false));
        let aborted = Arc::clone(&abort);
        let finish = SetOnDrop(Arc::clone(&finished));
        let task = async move {
            let _finish = finish;
            tokio::select! {
                biased;
                () = aborted.notified() => {}
                () = task => {}
            }
        };
        self.0.spawn(name, Box::pin(task));
        TaskHandle { abort, finished }
    }

    /// Runs `work` soon, never on the caller's stack. Drops it if no thread can be started.
    pub fn defer(&self, work: impl FnOnce() + Send + 'static) {
        self.0.defer(Box::new(work));
    }
}

/// Handle of a loop that [`Executor::start`] started. Dropping it does not end the loop.
pub struct LoopHandle<T> {
    result: oneshot::Receiver<T>,
    thread: Option<thread::JoinHandle<()>>,
}

impl<T> LoopHandle<T> {
    /// Waits until the loop has ended and returns its result; `None` if the loop panicked.
    /// Everything that the loop owned is dropped then.
    pub async fn finished(self) -> Option<T> {
        self.result.await.ok()
    }

    /// Blocks until the loop has ended, unless the calling thread runs the loop.
    pub fn block(self) {
        let current = thread::current().id();
        if let Some(thread) = self.thread.filter(|thread| thread.thread().id() != current) {
            // `start_loop` has caught and reported a panic.
            let _ = thread.join();
        }
    }
}

/// Task that [`Executor::spawn`] spawned. Dropping the handle does not end the task.
pub struct TaskHandle {
    abort: Arc<Notify>,
    finished: Arc<AtomicBool>,
}

impl TaskHandle {
    /// Drops the task at its next await.
    pub fn abort(&self) {
        self.abort.notify_one();
    }

    /// Returns whether the task has completed, panicked, or was aborted.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }
}

/// Sets a flag when it is dropped, also by a panic.
struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Spawns `future` as a task that runs until it completes, is aborted, or the runtime shuts down.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) -> tokio::task::JoinHandle<()> {
    #[expect(clippy::disallowed_methods, reason = "this module is the permitted caller")]
    tokio::spawn(future)
}
