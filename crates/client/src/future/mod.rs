//! Work on its way: [`ApiFuture`].

mod batch_poll;
pub(crate) mod poll;
mod poll_interval;
pub(crate) mod queue_log;
mod report;

#[cfg(test)]
mod tests;

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind, Result};
use crate::task::{self, Task};

pub(crate) use batch_poll::BatchPoll;

/// An answer that is already on its way.
///
/// The work started when the call was made, not when this is awaited. Dropping it stops the
/// waiting; training goes on all the same, a sample is given up.
///
/// Calls that return one must be made inside a tokio runtime, which does the work. Several can wait
/// for one answer, because results and errors can be cloned:
///
/// ```no_run
/// use futures_util::FutureExt;
///
/// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
/// let saved = model.save_state("step-100").shared();
/// let (one, other) = (saved.clone(), saved);
/// assert_eq!(one.await?, other.await?);
/// # Ok(()) }
/// ```
#[must_use = "the work goes on, but nobody learns how it ended"]
pub struct ApiFuture<T> {
    result: oneshot::Receiver<Result<T>>,
    /// Work that ends when nobody waits for it any more.
    _work: Option<Task>,
}

impl<T: Send + 'static> ApiFuture<T> {
    /// Starts work that nobody has to wait for.
    pub(crate) fn start(work: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        let (sender, receiver) = oneshot::channel();
        // Mapped, here and below: an async block would hold the work twice, as captured and as
        // awaited.
        task::detach(work.map(|result| {
            if let Err(Err(error)) = sender.send(result) {
                tracing::debug!(%error, "work failed and nobody was waiting for it");
            }
        }));
        Self { result: receiver, _work: None }
    }

    /// Starts work that is given up when nobody waits for it.
    pub(crate) fn abandonable(work: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        let (sender, receiver) = oneshot::channel();
        let work = Task::spawn(work.map(|result| drop(sender.send(result))));
        Self { result: receiver, _work: Some(work) }
    }

    /// Work that was over before it began.
    pub(crate) fn failed(error: Error) -> Self {
        let (sender, receiver) = oneshot::channel();
        let _ = sender.send(Err(error));
        Self { result: receiver, _work: None }
    }
}

impl<T> Future for ApiFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.result).poll(context).map(|received| {
            received.unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Closed, "the runtime ended before the work did"))
            })
        })
    }
}

impl<T> fmt::Debug for ApiFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiFuture")
    }
}
