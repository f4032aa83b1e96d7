//! The only place that spawns: work in the background that ends with its owner.

use tokio::task::JoinHandle;

/// A task that is stopped when this is dropped.
#[derive(Debug)]
pub(crate) struct Task(JoinHandle<()>);

impl Task {
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(work))
    }
}

/// Work that goes on without an owner: training that was asked for is done, whoever still listens.
#[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
pub(crate) fn detach(work: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(work));
}

/// The same, unless the runtime is gone already.
pub(crate) fn detach_if_possible(work: impl Future<Output = ()> + Send + 'static) {
    if tokio::runtime::Handle::try_current().is_ok() {
        detach(work);
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
