//! [`BackgroundTasks`]: the tasks of a client that outlive a call, such as heartbeats.
//!
//! A tokio runtime that ends drops its tasks without notice. A client may outlive the runtime that
//! its first call ran in, so every request checks whether that runtime still exists, and otherwise
//! restarts the tasks in its own runtime.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinHandle};

use crate::task;

/// Task that is restarted if its runtime ends. Dropping this value aborts the task.
pub struct BackgroundTask {
    make: Box<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>,
    /// `None` once the task has ended by itself.
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl BackgroundTask {
    fn spawn(&self, runtime: &Handle) {
        let handle = task::spawn_on(runtime, (self.make)());
        *self.lock() = Some(handle);
    }

    /// Starts the task again if its runtime ended before the task did.
    fn restart(&self, runtime: &Handle) {
        let outcome = match &mut *self.lock() {
            Some(handle) if handle.is_finished() => handle.now_or_never(),
            _ => return,
        };
        match outcome {
            Some(Err(error)) if error.is_cancelled() => self.spawn(runtime),
            Some(_) => *self.lock() = None,
            // `now_or_never` could not read the outcome, because tokio's cooperative budget is used
            // up. The next request checks the task again.
            None => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.handle.lock()
    }
}

impl Drop for BackgroundTask {
    fn drop(&mut self) {
        if let Some(handle) = self.lock().take() {
            handle.abort();
        }
    }
}

impl fmt::Debug for BackgroundTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackgroundTask")
    }
}

/// Background tasks of one connection, and the runtime that hosts them.
#[derive(Debug, Default)]
pub struct BackgroundTasks {
    /// Runtime that the caller chose as the first host.
    chosen: OnceLock<Handle>,
    host: RwLock<Option<Host>>,
    /// Tasks to restart if the runtime ends. The references are weak, because the owners of the
    /// tasks keep them alive.
    tasks: Mutex<Vec<Weak<BackgroundTask>>>,
}

/// Runtime that hosts the tasks.
#[derive(Debug)]
struct Host {
    runtime: Handle,
    /// Task that never ends by itself. If it has ended, the runtime has ended.
    canary: AbortHandle,
}

impl Host {
    fn new(runtime: &Handle) -> Self {
        let canary = task::spawn_on(runtime, std::future::pending()).abort_handle();
        Self { runtime: runtime.clone(), canary }
    }

    fn has_ended(&self) -> bool {
        self.canary.is_finished()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.canary.abort();
    }
}

impl BackgroundTasks {
    /// Chooses the runtime that hosts the tasks. By default the runtime of the first call hosts
    /// them.
    pub fn choose_host(&self, runtime: Handle) {
        let _ = self.chosen.set(runtime);
    }

    /// Starts a task; `make` is called again if the task has to be restarted.
    ///
    /// # Panics
    /// Outside a tokio runtime; see [`task::require_runtime`].
    pub fn start<F: Future<Output = ()> + Send + 'static>(
        &self,
        make: impl Fn() -> F + Send + Sync + 'static,
    ) -> Arc<BackgroundTask> {
        self.ensure_running();
        let task = Arc::new(BackgroundTask {
            make: Box::new(move || Box::pin(make())),
            handle: Mutex::new(None),
        });
        let mut tasks = self.lock();
        let host = self.host.read();
        task.spawn(&host.as_ref().expect("a call outside a runtime is rejected").runtime);
        tasks.retain(|task| task.strong_count() > 0);
        tasks.push(Arc::downgrade(&task));
        task
    }

    /// Restarts the tasks in the current runtime if their runtime has ended.
    pub fn ensure_running(&self) {
        let alive = |host: &Option<Host>| host.as_ref().is_some_and(|host| !host.has_ended());
        if alive(&self.host.read()) {
            return;
        }
        let Ok(current) = Handle::try_current() else { return };
        // Hold the lock until all tasks are restarted, so that no task is added in between.
        let tasks = self.lock();
        {
            let mut host = self.host.write();
            if alive(&host) {
                return;
            }
            let chosen = self.chosen.get().filter(|_| host.is_none()).map(Host::new);
            let new = chosen.filter(|chosen| !chosen.has_ended());
            if host.replace(new.unwrap_or_else(|| Host::new(&current))).is_some() {
                tracing::debug!("the runtime of the background tasks ended; restarting them");
            }
        }
        for task in tasks.iter().filter_map(Weak::upgrade) {
            task.restart(&current);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<BackgroundTask>>> {
        self.tasks.lock()
    }
}
