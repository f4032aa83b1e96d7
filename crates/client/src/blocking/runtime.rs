//! [`RuntimeThread`]: the tokio runtime of the blocking interface, on a thread of its own.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::coop::poll_proceed;

use crate::error::{Error, ErrorKind, Result};
use crate::hint::Hint;

/// Runtime on a thread of its own, which runs until all clones are dropped: requests, heartbeats
/// and retries make progress while the program does something else.
#[derive(Clone, Debug)]
pub(super) struct RuntimeThread {
    handle: Handle,
    /// Ends the thread when the last clone is dropped. Dropping it never blocks, so that clients may
    /// be dropped anywhere.
    _stop: Arc<oneshot::Sender<()>>,
}

impl RuntimeThread {
    pub(super) fn start() -> Result<Self> {
        let failed = |error: std::io::Error| {
            let message = format!("cannot start the runtime of the blocking client: {error}");
            Error::new(ErrorKind::Io, message).with_source(error)
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = oneshot::channel();
        let handle = runtime.handle().clone();
        let run = move || {
            // Fails when the sender is dropped, which is the only way to end.
            let _ = runtime.block_on(stopped);
        };
        thread::Builder::new().name("tinkex-blocking".to_owned()).spawn(run).map_err(failed)?;
        Ok(Self { handle, _stop: Arc::new(stop) })
    }

    /// Runs `future` to its end on the calling thread.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] in an async task: the other tasks of its thread would be blocked.
    pub(super) fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        self.require_no_async()?;
        self.handle.block_on(future)
    }

    /// Returns an error in an async task, where blocking the thread would panic.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] in an async task.
    pub(super) fn require_no_async(&self) -> Result<()> {
        if Handle::try_current().is_ok() && is_async_task() {
            let message = "blocking call in an async task";
            return Err(Error::new(ErrorKind::Config, message).with_hint(Hint::UseAsyncClient));
        }
        Ok(())
    }

    /// Calls `start` with this runtime as the current one, in which it spawns its tasks.
    pub(super) fn enter<T>(&self, start: impl FnOnce() -> T) -> T {
        let _entered = self.handle.enter();
        start()
    }
}

/// Returns whether the current thread executes an async task of a tokio runtime, where a blocking
/// call would panic.
///
/// A thread can have a current runtime and still block: in `spawn_blocking`, in `block_in_place` and
/// with a guard of `Handle::enter`. tokio does not say which of these applies, but it gives a budget
/// of operations to async tasks only. This function spends the budget and restores it. A task in
/// `tokio::task::unconstrained` has no budget either: there tokio panics when the thread blocks.
fn is_async_task() -> bool {
    /// More than the budget of a task, which is 128.
    const OPERATIONS: usize = 1024;
    let mut context = Context::from_waker(Waker::noop());
    let mut spent = Vec::new();
    let is_limited = loop {
        match poll_proceed(&mut context) {
            Poll::Ready(operation) if spent.len() < OPERATIONS => spent.push(operation),
            Poll::Ready(_) => break false,
            Poll::Pending => break true,
        }
    };
    // Dropping an operation restores the budget as of the operation, so drop the first one last.
    while let Some(operation) = spent.pop() {
        drop(operation);
    }
    is_limited
}
