//! Futures of calls ([`ApiFuture`], [`RequestFuture`]), and the polling that retrieves the results
//! of submitted requests ([`Poller`], [`BatchPoll`]).

mod batch_poll;
mod poll;
mod poll_failures;
mod poll_interval;
pub mod queue_log;
mod report;
mod submitted;

#[cfg(test)]
mod tests;

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep, sleep_until};
use tracing::Instrument as _;

use crate::error::{Error, Result};
use crate::task::{self, Task};

use batch_poll::Announcement;
pub use batch_poll::BatchPoll;
pub use poll::Poller;
pub use poll_failures::MAX_SERVER_FAILURES;
pub use submitted::Submitted;

/// Future of the result of a call that has started and continues if the future is dropped.
///
/// All calls of a `TrainingClient` that have a position in the model's call order return an
/// `ApiFuture`: later requests depend on earlier ones, so the calls always run to their end.
/// [`detach`](Self::detach) drops the future explicitly. All other calls return a
/// [`RequestFuture`], which cancels the call if it is dropped.
///
/// Results and errors are `Clone`, so several tasks can wait for one result:
///
/// ```no_run
/// use futures_util::FutureExt;
///
/// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
/// let saved = model.save_state("step-100").shared();
/// let one = saved.clone();
/// let other = saved;
/// assert_eq!(one.await?, other.await?);
/// # Ok(()) }
/// ```
///
/// # Errors
/// Calls outside a tokio runtime resolve to an error of kind [`ErrorKind::Config`], unless the
/// builder of the client sets a runtime. If the task of the request panics, the future resolves to
/// [`ErrorKind::Panicked`].
///
/// # Cancel safety
/// Dropping the future, for example in `select!` or `tokio::time::timeout`, loses the result but
/// not the request: the client still submits the request, in call order and with all retries, and
/// the server executes it. The same holds for a future that fails by its
/// [`timeout`](Self::timeout).
///
/// [`ErrorKind::Config`]: tinkex_transport::ErrorKind::Config
/// [`ErrorKind::Panicked`]: tinkex_transport::ErrorKind::Panicked
#[must_use = "dropping an ApiFuture loses the result while the request continues; await it or call `detach`"]
pub struct ApiFuture<T> {
    result: oneshot::Receiver<Result<T>>,
    deadline: Option<Deadline>,
    /// Runtime of the call, for the timer of the deadline; `None` if the call did not start.
    runtime: Option<Handle>,
}

impl<T> ApiFuture<T> {
    /// Lets the request continue and discards its result. A failure is logged at debug level.
    pub fn detach(self) {}

    /// Limits how long the future waits for the result, counted from now.
    ///
    /// The request continues on the server, because later requests of the model depend on it: the
    /// weights change although the future fails.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
    /// use std::time::Duration;
    ///
    /// let path = model.save_state("step-100").timeout(Duration::from_secs(60)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The future resolves to an error of kind [`Timeout`](tinkex_transport::ErrorKind::Timeout)
    /// once the time is over.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.limit(Some(timeout))
    }

    /// Limits how long the future waits for the result, counted from now. `None` keeps the limit
    /// that was set before, if any.
    #[doc(hidden)]
    pub fn limit(self, limit: Option<Duration>) -> Self {
        Self { deadline: limit.map(Deadline::new).or(self.deadline), ..self }
    }

    /// Creates a future that has resolved to `result`, for implementations of `Training` in tests.
    ///
    /// ```
    /// use tinkex::{ApiFuture, Error, ErrorKind};
    ///
    /// let saved = ApiFuture::<()>::ready(Err(Error::new(ErrorKind::Conflict, "name is taken")));
    /// # let error = futures_util::FutureExt::now_or_never(saved).unwrap().unwrap_err();
    /// # assert_eq!(error.kind(), ErrorKind::Conflict);
    /// ```
    pub fn ready(result: Result<T>) -> Self {
        Self { result: resolved(result), deadline: None, runtime: None }
    }

    /// Creates a future that has failed.
    #[doc(hidden)]
    pub fn failed(error: Error) -> Self {
        Self::ready(Err(error))
    }
}

impl<T: Send + 'static> ApiFuture<T> {
    /// Runs `work` in a task of its own, in the caller's span. The task continues if the future is
    /// dropped.
    ///
    /// # Errors
    /// Outside a tokio runtime the future resolves to an error of kind
    /// [`ErrorKind::Config`](tinkex_transport::ErrorKind::Config).
    pub fn start(work: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        if let Err(error) = task::require_runtime() {
            return Self::failed(error);
        }
        let (sender, result) = oneshot::channel();
        let work = task::catching_panics(work).map(|result| {
            if let Err(Err(error)) = sender.send(result) {
                tracing::debug!(%error, "detached request failed");
            }
        });
        task::spawn_detached(work.in_current_span());
        Self { result, deadline: None, runtime: Handle::try_current().ok() }
    }
}

/// Future of the result of a call that has started and is cancelled if the future is dropped.
///
/// All calls return a `RequestFuture`, except the calls of a `TrainingClient` that have a position
/// in the model's call order, which return an [`ApiFuture`]. [`detach`](Self::detach) lets the call
/// continue instead.
///
/// # Errors
/// Calls outside a tokio runtime resolve to an error of kind [`ErrorKind::Config`], unless the
/// builder of the client sets a runtime. If the task of the call panics, the future resolves to
/// [`ErrorKind::Panicked`].
///
/// # Cancel safety
/// Dropping the future, for example in `select!`, ends the retries and polls of the call. The
/// server may have executed its request. A sample is also cancelled on the server, if the server
/// supports that.
///
/// [`ErrorKind::Config`]: tinkex_transport::ErrorKind::Config
/// [`ErrorKind::Panicked`]: tinkex_transport::ErrorKind::Panicked
#[must_use = "dropping a RequestFuture cancels the call; await it or call `detach`"]
pub struct RequestFuture<T> {
    result: oneshot::Receiver<Result<T>>,
    /// Aborted when the future is dropped.
    task: Option<Task>,
    deadline: Option<Deadline>,
    /// Runtime of the call, for the timer of the deadline; `None` if the call did not start.
    runtime: Option<Handle>,
}

impl<T> RequestFuture<T> {
    /// Lets the request continue and discards its result.
    pub fn detach(mut self) {
        if let Some(task) = self.task.take() {
            task.detach();
        }
    }

    /// Limits how long the future waits for the result, counted from now. The call is cancelled
    /// once the time is over, as if the future were dropped.
    ///
    /// [`CallOptions::timeout`](tinkex_transport::CallOptions::timeout) does the same for all calls
    /// of a client. With that option, the error of a sample also contains the last failure.
    ///
    /// # Errors
    /// The future resolves to an error of kind [`Timeout`](tinkex_transport::ErrorKind::Timeout)
    /// once the time is over.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { deadline: Some(Deadline::new(timeout)), ..self }
    }

    /// Creates a future that has resolved to `result`, for implementations of `Sampling` in tests.
    ///
    /// ```
    /// use tinkex::{RequestFuture, SampleResponse};
    ///
    /// let sample = RequestFuture::ready(Ok(SampleResponse::default()));
    /// # assert!(futures_util::FutureExt::now_or_never(sample).unwrap().is_ok());
    /// ```
    pub fn ready(result: Result<T>) -> Self {
        Self { result: resolved(result), task: None, deadline: None, runtime: None }
    }

    /// Creates a future that has failed.
    #[doc(hidden)]
    pub fn failed(error: Error) -> Self {
        Self::ready(Err(error))
    }
}

impl<T: Send + 'static> RequestFuture<T> {
    /// Runs `work` in a task of its own, in the caller's span. The task is aborted if the future is
    /// dropped.
    ///
    /// # Errors
    /// Outside a tokio runtime the future resolves to an error of kind
    /// [`ErrorKind::Config`](tinkex_transport::ErrorKind::Config).
    pub fn start(work: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        if let Err(error) = task::require_runtime() {
            return Self::failed(error);
        }
        let (sender, result) = oneshot::channel();
        let work = task::catching_panics(work).map(|result| drop(sender.send(result)));
        let task = Some(Task::spawn(work.in_current_span()));
        Self { result, task, deadline: None, runtime: Handle::try_current().ok() }
    }
}

/// Returns a receiver that already holds `result`.
fn resolved<T>(result: Result<T>) -> oneshot::Receiver<Result<T>> {
    let (sender, receiver) = oneshot::channel();
    let _ = sender.send(result);
    receiver
}

/// Polls for the result that the call's task sends. If the sender was dropped without a result, the
/// runtime has ended.
fn receive<T>(
    result: &mut oneshot::Receiver<Result<T>>,
    context: &mut Context<'_>,
) -> Poll<Result<T>> {
    Pin::new(result)
        .poll(context)
        .map(|received| received.unwrap_or_else(|_| Err(Error::runtime_ended())))
}

impl<T> Future for ApiFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { result, deadline, runtime } = &mut *self;
        let received = receive(result, context);
        match deadline {
            Some(deadline) if received.is_pending() => {
                let ended = deadline.poll(runtime.as_ref(), context);
                ended.map(|()| Err(Error::training_deadline(deadline.limit)))
            }
            _ => received,
        }
    }
}

impl<T> Future for RequestFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { result, task, deadline, runtime } = &mut *self;
        let received = receive(result, context);
        let ended = match deadline {
            Some(deadline) if received.is_pending() => {
                let ended = deadline.poll(runtime.as_ref(), context);
                ended.map(|()| Err(Error::deadline(deadline.limit)))
            }
            _ => return received,
        };
        if ended.is_ready() {
            // Aborts the task, which cancels the call.
            *task = None;
        }
        ended
    }
}

/// Time limit of a future.
struct Deadline {
    limit: Duration,
    /// Time at which the limit ends; `None` if it is too far in the future for an [`Instant`].
    at: Option<Instant>,
    /// Created at the first poll. Boxed to keep the futures small, because most futures have no
    /// limit.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    fn new(limit: Duration) -> Self {
        Self { limit, at: Instant::now().checked_add(limit), timer: None }
    }

    /// Returns ready once the limit has ended, else registers the waker. Outside of a runtime, the
    /// timer runs in `runtime`, the runtime of the call.
    fn poll(&mut self, runtime: Option<&Handle>, context: &mut Context<'_>) -> Poll<()> {
        let Some(at) = self.at else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| {
            let outside = Handle::try_current().is_err();
            let _entered = runtime.filter(|_| outside).map(Handle::enter);
            Box::pin(sleep_until(at))
        });
        timer.as_mut().poll(context)
    }
}

impl<T> fmt::Debug for ApiFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiFuture")
    }
}

impl<T> fmt::Debug for RequestFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RequestFuture")
    }
}
