//! [`RuntimeThread`]: the tokio runtime of the blocking interface, on a thread of its own.

use std::sync::Arc;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

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
    /// [`ErrorKind::Config`] inside an async runtime, whose other tasks would be blocked.
    pub(super) fn block_on<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        self.require_no_async()?;
        self.handle.block_on(future)
    }

    /// Returns an error inside an async runtime, whose other tasks a blocking call would delay.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] inside an async runtime.
    pub(super) fn require_no_async(&self) -> Result<()> {
        if Handle::try_current().is_ok() {
            let message = "blocking call inside an async runtime";
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
