//! [`Task`]: background tasks. All tasks of this crate, of `tinkex-session` and of the SDK are
//! spawned by this module, so that a panic of any task is logged.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::error::{Error, Result};

/// Returns an error if the current thread has no tokio runtime.
pub fn require_runtime() -> Result<()> {
    Handle::try_current().map(drop).map_err(|_| Error::no_runtime())
}

/// Background task that is aborted when this value is dropped.
#[derive(Debug)]
pub struct Task(Option<JoinHandle<()>>);

impl Task {
    /// Spawns `work` on the current runtime. A panic is logged.
    ///
    /// # Panics
    /// Outside a tokio runtime; see [`require_runtime`].
    #[expect(clippy::disallowed_methods, reason = "all tasks are spawned in this module")]
    pub fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(Some(tokio::spawn(logging_panics(Box::pin(work)))))
    }

    /// Lets the task run to its end instead of aborting it on drop.
    pub fn detach(mut self) {
        self.0.take();
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// Spawns `work` as a task that nothing aborts. A panic is logged.
///
/// # Panics
/// Outside a tokio runtime; see [`require_runtime`].
#[expect(clippy::disallowed_methods, reason = "all tasks are spawned in this module")]
pub fn spawn_detached(work: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(logging_panics(Box::pin(work))));
}

/// Spawns `work` on `runtime`. A panic is logged.
pub(crate) fn spawn_on(
    runtime: &Handle,
    work: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    runtime.spawn(logging_panics(Box::pin(work)))
}

/// Spawns `work` as a task that nothing aborts, or drops `work` if the current thread has no tokio
/// runtime.
pub fn try_spawn_detached(work: impl Future<Output = ()> + Send + 'static) {
    if require_runtime().is_ok() {
        spawn_detached(work);
    }
}

/// Converts a panic of `work` to an error of kind [`Panicked`](crate::ErrorKind::Panicked).
///
/// Implemented with combinators, because an async block would store `work` twice: as a captured
/// variable and as the awaited future.
pub fn catching_panics<T>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> impl Future<Output = Result<T>> + Send + 'static {
    AssertUnwindSafe(work)
        .catch_unwind()
        .map(|outcome| outcome.unwrap_or_else(|payload| Err(Error::panicked(&*payload))))
}

/// Logs a panic of `work`.
///
/// Takes a boxed future, so that the code of a tokio task is compiled once and not for every kind
/// of task.
fn logging_panics(work: BoxFuture<'static, ()>) -> impl Future<Output = ()> + Send + 'static {
    AssertUnwindSafe(work).catch_unwind().map(|outcome| {
        if let Err(payload) = outcome {
            tracing::error!(error = %Error::panicked(&*payload), "background task failed");
        }
    })
}
