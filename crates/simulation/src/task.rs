//! Tasks of the simulation. The only module that calls `tokio::spawn`.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Sleep;

/// Spawns a task.
pub(crate) fn spawn<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    #[expect(clippy::disallowed_methods, reason = "all tasks are spawned in this module")]
    tokio::spawn(task)
}

/// A task that takes simulated time: it is polled some time after it was woken, like a thread that
/// waits to be scheduled or waits for a disk.
pub(crate) struct Delayed<F: ?Sized, D, A> {
    task: Pin<Box<F>>,
    /// Returns the delay before the next poll; zero to poll now. The argument is true for the first
    /// delay after a wake-up, and false when the previous delay has passed.
    delay: D,
    /// Runs after every poll.
    after: A,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<F: ?Sized, D, A> Delayed<F, D, A> {
    pub(crate) fn new(task: Pin<Box<F>>, delay: D, after: A) -> Self {
        Self { task, delay, after, sleep: None }
    }
}

impl<F, D, A> Future for Delayed<F, D, A>
where
    F: Future + ?Sized,
    D: FnMut(bool) -> Duration + Unpin,
    A: FnMut() + Unpin,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        loop {
            let first = self.sleep.is_none();
            if let Some(sleep) = &mut self.sleep {
                std::task::ready!(sleep.as_mut().poll(context));
            }
            let delay = (self.delay)(first);
            if delay.is_zero() {
                break;
            }
            self.sleep = Some(Box::pin(tokio::time::sleep(delay)));
        }
        self.sleep = None;
        let polled = self.task.as_mut().poll(context);
        (self.after)();
        polled
    }
}
