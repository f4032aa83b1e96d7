//! [`Host`]: the simulated machine of the server. Starts, kills and restarts the server process.

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use fastrand::Rng;
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tinkex_server::ServerOptions;
use tinkex_server::simulation::{
    RequestHandler, SIMULATED_CORES, Scheduler, SimulatedServer, SimulatedTask,
};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::clocks::MachineClocks;
use crate::disk::SimulatedDisk;
use crate::faults::FaultPlan;
use crate::oracle::Oracle;
use crate::task::{self, Delayed};
use crate::trace::{EventTrace, event};

/// The machine of the server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Host(Arc<HostInner>);

struct HostInner {
    options: ServerOptions,
    clocks: Arc<MachineClocks>,
    plan: FaultPlan,
    disk: SimulatedDisk,
    trace: EventTrace,
    oracle: Oracle,
    process: Mutex<Option<Process>>,
    /// Processes that still run although another one has the data folder.
    superseded: Mutex<Vec<Process>>,
    /// Notified when a process ends. Not a `watch` channel, which wakes its receivers in random
    /// order.
    process_ended: Notify,
    /// End of the current freeze of the process, as SIGSTOP would cause.
    frozen_until: Mutex<Option<Instant>>,
    /// End of the current freeze of the clients.
    clients_frozen_until: Mutex<Option<Instant>>,
    rng: Mutex<Rng>,
}

/// A running server process.
struct Process {
    /// `None` while the server stops: it accepts no further requests.
    server: Option<SimulatedServer>,
    handler: RequestHandler,
    tasks: Arc<ProcessTasks>,
}

/// Tasks of one server process.
struct ProcessTasks {
    /// Weak, because the host owns the process: with a reference cycle, a run would never release
    /// its server and files.
    host: Weak<HostInner>,
    rng: Mutex<Rng>,
    running: Mutex<Vec<JoinHandle<()>>>,
    /// Number of bodies that are being decoded.
    decoding: Arc<AtomicUsize>,
}

/// A body that is being decoded.
struct Decoding(Arc<AtomicUsize>);

impl Decoding {
    fn start(count: &Arc<AtomicUsize>, trace: &EventTrace) -> Self {
        let running = count.fetch_add(1, Ordering::Relaxed) + 1;
        if running > SIMULATED_CORES {
            trace.fail(format!("{running} bodies are decoded at once, beyond the limit"));
        }
        Self(Arc::clone(count))
    }
}

impl Drop for Decoding {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Scheduler for ProcessTasks {
    fn spawn(&self, name: &'static str, task: SimulatedTask) {
        let Some(host) = self.host.upgrade().map(Host) else { return };
        let trace = host.0.trace.clone();
        let plan = &host.0.plan;
        let max = match name {
            "deferred" => 0,
            "worker" => plan.max_task_delay.max(plan.max_compute),
            _ => plan.max_task_delay,
        };
        let mut rng = Rng::with_seed(self.rng.lock().u64(..));
        let machine = host.clone();
        let delay = move |first| match machine.interruption() {
            Some(interruption) => interruption,
            None if first => Duration::from_millis(rng.u64(0..=max)),
            None => Duration::ZERO,
        };
        let observes = name == "disk" || name == "worker";
        let after = move || {
            if observes {
                host.observe();
            }
        };
        let decoding = (name == "decode").then(|| Decoding::start(&self.decoding, &trace));
        let run = AssertUnwindSafe(Delayed::new(task, delay, after)).catch_unwind();
        let task = task::spawn(async move {
            let ended = run.await;
            drop(decoding);
            if let Err(panic) = ended {
                let message = panic.downcast_ref::<String>().map(String::as_str);
                let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
                trace.fail(format!("task {name} panicked: {}", message.unwrap_or_default()));
            }
        });
        let mut running = self.running.lock();
        running.retain(|task| !task.is_finished());
        running.push(task);
    }
}

impl Host {
    pub(crate) fn new(
        options: ServerOptions,
        plan: &FaultPlan,
        disk: SimulatedDisk,
        oracle: Oracle,
        seed: u64,
        trace: EventTrace,
    ) -> Self {
        Self(Arc::new(HostInner {
            options,
            clocks: Arc::new(MachineClocks::new()),
            plan: plan.clone(),
            disk,
            trace,
            oracle,
            process: Mutex::new(None),
            superseded: Mutex::default(),
            process_ended: Notify::new(),
            frozen_until: Mutex::new(None),
            clients_frozen_until: Mutex::new(None),
            rng: Mutex::new(Rng::with_seed(seed)),
        }))
    }

    /// Starts the server. Repeats a start that a fault interrupts.
    pub(crate) async fn start(&self) {
        loop {
            let (ids, tasks) = {
                let mut rng = self.0.rng.lock();
                (rng.u64(..), rng.u64(..))
            };
            let tasks = Arc::new(ProcessTasks {
                host: Arc::downgrade(&self.0),
                rng: Mutex::new(Rng::with_seed(tasks)),
                running: Mutex::default(),
                decoding: Arc::default(),
            });
            let scheduler: Arc<dyn Scheduler> = Arc::clone(&tasks) as _;
            self.0.disk.revive();
            let options = self.0.options.clone();
            let clocks = Arc::clone(&self.0.clocks);
            let starting = SimulatedServer::start(options, scheduler, clocks, ids);
            let started = tokio::select! {
                biased;
                () = self.0.disk.killed() => None,
                started = starting => Some(started),
            };
            match started {
                Some(Ok(server)) if !self.0.disk.is_dead() => {
                    event!(self.0.trace, "server started");
                    let handler = server.handler();
                    self.0.disk.inspect(|| self.0.oracle.server_started(&handler));
                    *self.0.process.lock() = Some(Process { server: Some(server), handler, tasks });
                    return;
                }
                Some(Err(error)) => {
                    event!(self.0.trace, "server cannot start: {error}");
                    self.0.oracle.start_failed(&error.to_string());
                }
                _ => event!(self.0.trace, "server died while it started"),
            }
            end_tasks(&tasks).await;
            self.end_superseded().await;
            if self.0.trace.has_failed() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Kills the server process. If `power_loss` is true, the machine loses power, too.
    pub(crate) async fn crash(&self, power_loss: bool) {
        self.0.disk.kill();
        *self.0.frozen_until.lock() = None;
        self.end_superseded().await;
        let Some(Process { server, tasks, .. }) = self.0.process.lock().take() else { return };
        let what = if power_loss { "power loss" } else { "server killed" };
        event!(self.0.trace, "{what}");
        self.0.trace.count(what);
        self.0.process_ended.notify_waiters();
        end_tasks(&tasks).await;
        // Let the connections end: they hold references to the state of the server.
        tokio::task::yield_now().await;
        drop(server);
        if power_loss {
            self.0.disk.lose_power();
            self.0.clocks.reboot();
        }
    }

    /// Starts a second server on the data folder. The first server still runs and responds to the
    /// requests that it has received; later requests reach the second one.
    pub(crate) async fn start_second(&self) {
        let Some(first) = self.0.process.lock().take() else { return };
        event!(self.0.trace, "second server on the data folder");
        self.0.trace.count("second server");
        // The lock of a removed file does not keep the second server out.
        let _ = std::fs::remove_file(self.data_dir().join("lock"));
        self.0.superseded.lock().push(first);
        self.start().await;
    }

    async fn end_superseded(&self) {
        let superseded = std::mem::take(&mut *self.0.superseded.lock());
        if superseded.is_empty() {
            return;
        }
        self.0.process_ended.notify_waiters();
        for process in superseded {
            end_tasks(&process.tasks).await;
            // Let the connections end: they hold references to the state of the server.
            tokio::task::yield_now().await;
        }
    }

    /// Damages a byte of the data folder, while the server is down.
    pub(crate) fn damage(&self) {
        if self.0.disk.damage() {
            self.0.oracle.damaged();
        }
    }

    /// Stops the server gracefully: the server accepts no further requests and responds to the
    /// accepted requests. If `full_disk` is true, the disk is full during the shutdown.
    pub(crate) async fn stop(&self, full_disk: bool) {
        let server = self.0.process.lock().as_mut().and_then(|process| process.server.take());
        let Some(server) = server else { return };
        event!(self.0.trace, "server stops");
        self.0.trace.count("graceful stop");
        if full_disk {
            self.0.disk.fill(Duration::from_secs(60));
        }
        tokio::select! {
            biased;
            () = self.0.disk.killed() => event!(self.0.trace, "server died while it stopped"),
            summary = server.stop() => event!(self.0.trace, "server stopped: {summary:?}"),
        }
        // Wait until the last responses are sent.
        tokio::time::sleep(Duration::from_millis(5)).await;
        self.observe();
        self.0.disk.empty();
        self.end_superseded().await;
        let Some(Process { tasks, .. }) = self.0.process.lock().take() else { return };
        self.0.process_ended.notify_waiters();
        end_tasks(&tasks).await;
        // Let the connections end: they hold references to the state of the server.
        tokio::task::yield_now().await;
    }

    /// Waits until a file operation has killed the process.
    pub(crate) async fn killed_by_disk(&self) {
        self.0.disk.killed().await;
    }

    /// Returns the handler of the server, if it accepts requests.
    pub(crate) fn handler(&self) -> Option<RequestHandler> {
        if self.0.disk.is_dead() {
            return None;
        }
        let process = self.0.process.lock();
        process.as_ref().filter(|process| process.server.is_some()).map(|p| p.handler.clone())
    }

    /// Waits until the current process ends.
    pub(crate) async fn process_ended(&self) {
        self.0.process_ended.notified().await;
    }

    /// Stops the process for some time, without ending it.
    pub(crate) fn freeze(&self, time: Duration) {
        event!(self.0.trace, "server frozen for {time:.0?}");
        self.0.trace.count("freeze");
        *self.0.frozen_until.lock() = Some(Instant::now() + time);
    }

    /// Stops the processes of all clients for some time.
    pub(crate) fn freeze_clients(&self, time: Duration) {
        event!(self.0.trace, "clients frozen for {time:.0?}");
        self.0.trace.count("freeze of the clients");
        *self.0.clients_frozen_until.lock() = Some(Instant::now() + time);
    }

    /// Waits until the clients run.
    pub(crate) async fn clients_run(&self) {
        let until = *self.0.clients_frozen_until.lock();
        if let Some(until) = until {
            tokio::time::sleep_until(until).await;
        }
    }

    /// Returns for how long the process does not run; `None` if it runs.
    pub(crate) fn interruption(&self) -> Option<Duration> {
        if self.0.disk.is_dead() {
            // Longer than any run: the tasks of a dead process are dropped before the delay ends.
            return Some(Duration::from_secs(1 << 30));
        }
        let frozen = (*self.0.frozen_until.lock())?.saturating_duration_since(Instant::now());
        (!frozen.is_zero()).then_some(frozen)
    }

    /// Sets the wall clock of the machine to a time that is wrong by `error` seconds.
    pub(crate) fn set_clock(&self, error: i64) {
        event!(self.0.trace, "wall clock set, wrong by {error} s");
        self.0.trace.count("clock set");
        self.0.clocks.set_wall(error);
    }

    /// Ends all faults of disk and clock.
    pub(crate) fn calm(&self) {
        self.0.clocks.set_wall(0);
        self.0.disk.calm();
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.0.disk.is_dead()
    }

    /// Returns the data folder.
    pub(crate) fn data_dir(&self) -> PathBuf {
        self.0.options.data_dir.clone()
    }

    /// Lets the oracle inspect the state of the server, also while the server stops.
    pub(crate) fn observe(&self) {
        if self.0.disk.is_dead() {
            return;
        }
        let handler = self.0.process.lock().as_ref().map(|process| process.handler.clone());
        if let Some(handler) = handler {
            self.0.disk.inspect(|| self.0.oracle.observe(&handler));
        }
    }
}

/// Ends all tasks of a process and waits until they are dropped.
async fn end_tasks(tasks: &ProcessTasks) {
    let running = std::mem::take(&mut *tasks.running.lock());
    for task in &running {
        task.abort();
    }
    for task in running {
        let _ = task.await;
    }
}
