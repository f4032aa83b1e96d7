//! Background tasks. All tasks of the crate are spawned here.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::error::{Error, Result};

/// Returns an error if the current thread has no tokio runtime.
pub(crate) fn require_runtime() -> Result<()> {
    Handle::try_current().map(drop).map_err(|_| Error::no_runtime())
}

/// Background task that is aborted when this value is dropped.
#[derive(Debug)]
pub(crate) struct Task(Option<JoinHandle<()>>);

impl Task {
    /// Spawns `work`. A panic is logged.
    ///
    /// # Panics
    /// Outside a tokio runtime; see [`require_runtime`].
    #[expect(clippy::disallowed_methods, reason = "all tasks are spawned in this module")]
    pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(Some(tokio::spawn(logging_panics(work))))
    }

    /// Lets the task run to its end.
    pub(crate) fn detach(mut self) {
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
pub(crate) fn spawn_detached(work: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(logging_panics(work)));
}

/// Spawns `work` on `runtime`. A panic is logged.
pub(crate) fn spawn_on(
    runtime: &Handle,
    work: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    runtime.spawn(logging_panics(work))
}

/// Spawns `work` as a task that nothing aborts, or drops it if there is no runtime.
pub(crate) fn try_spawn_detached(work: impl Future<Output = ()> + Send + 'static) {
    if require_runtime().is_ok() {
        spawn_detached(work);
    }
}

/// Turns a panic of `work` into an error of kind [`Panicked`](crate::ErrorKind::Panicked).
///
/// A combinator and not an async block, which would store `work` twice: as captured and as awaited.
pub(crate) fn catching_panics<T>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> impl Future<Output = Result<T>> + Send + 'static {
    AssertUnwindSafe(work)
        .catch_unwind()
        .map(|outcome| outcome.unwrap_or_else(|payload| Err(Error::panicked(&*payload))))
}

fn logging_panics(
    work: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = ()> + Send + 'static {
    AssertUnwindSafe(work).catch_unwind().map(|outcome| {
        if let Err(payload) = outcome {
            tracing::error!(error = %Error::panicked(&*payload), "background task failed");
        }
    })
}
