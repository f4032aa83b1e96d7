//! [`ThreadPool`]: worker threads that execute a closure together with their caller.
//!
//! Decoding one token runs hundreds of matrix products of a few dozen microseconds each. Waking a
//! sleeping thread takes about as long as such a product, so workers spin for a short time after
//! their last region before they sleep.

#![expect(
    unsafe_code,
    reason = "workers borrow a closure that lives on the caller's stack; see `ThreadPool::run`"
)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::PoisonError;

use super::sync::{
    Arc, AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Builder, Condvar, JoinHandle, Mutex,
    MutexGuard, Ordering, fence, in_region, set_in_region, spin_until,
};

/// Body of a parallel region. Every participating thread calls it once; the calls divide the tasks
/// among themselves.
type RegionBody<'a> = &'a (dyn Fn() + Sync);

/// Worker threads that execute parallel regions together with the calling thread.
pub(super) struct ThreadPool {
    shared: Arc<PoolState>,
    threads: Vec<JoinHandle<()>>,
    /// Held while a region runs, so that concurrent callers run one after the other.
    region_lock: Mutex<()>,
}

/// State that the workers and the calling threads share.
struct PoolState {
    /// Number of the current region (upper 32 bits), whether workers may still join it ([`OPEN`]),
    /// and the number of workers executing it ([`ACTIVE`]).
    state: AtomicU64,
    /// Body of the current region. Valid for a worker between `try_join` and its decrement of the
    /// active count.
    body: AtomicPtr<RegionBody<'static>>,
    /// Workers that sleep on `region_started` and must be notified.
    sleeping_workers: AtomicUsize,
    /// Whether the caller sleeps on `workers_left`.
    caller_waiting: AtomicBool,
    shutting_down: AtomicBool,
    /// First panic of the current region. Its mutex also protects both condition variables.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    region_started: Condvar,
    workers_left: Condvar,
}

/// Increment of the region number.
const REGION: u64 = 1 << 32;
/// Bit that is set while workers may join the region.
const OPEN: u64 = 1 << 31;
/// Mask of the number of active workers.
const ACTIVE: u64 = OPEN - 1;

impl ThreadPool {
    /// Starts `threads` workers, not counting the caller's thread.
    pub(super) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(PoolState {
            state: AtomicU64::new(0),
            body: AtomicPtr::new(ptr::null_mut()),
            sleeping_workers: AtomicUsize::new(0),
            caller_waiting: AtomicBool::new(false),
            shutting_down: AtomicBool::new(false),
            panic: Mutex::new(None),
            region_started: Condvar::new(),
            workers_left: Condvar::new(),
        });
        let mut pool = Self { shared, threads: Vec::new(), region_lock: Mutex::new(()) };
        for index in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = Builder::new()
                .name(format!("tinkex-engine-{index}"))
                .spawn(move || shared.worker_loop())?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Runs `task` once for every index below `count`, in any order and on any thread. Returns when
    /// all tasks have finished.
    ///
    /// # Panics
    /// With the payload of the first task that panicked, after all started tasks have finished.
    pub(super) fn for_each(&self, count: usize, task: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        self.run(&|| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                task(index);
            }
        });
    }

    /// Executes `body` on this thread and on every worker that joins before this thread has
    /// finished it. Returns when all of them have left the region. Inside another region, only the
    /// current thread executes `body`.
    fn run(&self, body: RegionBody<'_>) {
        if in_region() {
            return body();
        }
        let region = lock(&self.region_lock);
        // SAFETY: only the lifetime changes. Workers dereference the pointer only between joining
        // and leaving. `close` ends joining and returns after all workers have left, and it is
        // always reached: nothing between here and there can panic outside of `catch_unwind`.
        let mut body_ptr =
            unsafe { std::mem::transmute::<RegionBody<'_>, RegionBody<'static>>(body) };
        self.shared.open(&mut body_ptr);
        let own_result = execute(body);
        self.shared.close();
        let worker_panic = lock(&self.shared.panic).take();
        drop(region);
        if let Some(panic) = own_result.err().or(worker_panic) {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
#[allow(dead_code, reason = "tests/model compiles this file without the tests that use them")]
impl ThreadPool {
    pub(super) fn sleeping_workers(&self) -> usize {
        self.shared.sleeping_workers.load(Ordering::Relaxed)
    }

    pub(super) fn is_caller_waiting(&self) -> bool {
        self.shared.caller_waiting.load(Ordering::Relaxed)
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.shutting_down.store(true, Ordering::Release);
        // A worker checks the flag while holding this mutex before it sleeps. After this line it
        // either sleeps already and receives the notification, or it will see the flag.
        drop(lock(&self.shared.panic));
        self.shared.region_started.notify_all();
        for thread in self.threads.drain(..) {
            // Panics of tasks were already reported to the caller of the region.
            let _ = thread.join();
        }
    }
}

/// Executes `body` and marks the thread as being inside a region meanwhile.
fn execute(body: RegionBody<'_>) -> Result<(), Box<dyn Any + Send>> {
    set_in_region(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    set_in_region(false);
    result
}

impl PoolState {
    /// Starts a region that workers may join.
    fn open(&self, body: *mut RegionBody<'static>) {
        self.body.store(body, Ordering::Relaxed);
        // No worker is active, so the lower half is zero. The release store makes the body visible
        // to every worker that sees the new state.
        let before = self.state.load(Ordering::Relaxed);
        self.state.store(before.wrapping_add(REGION) | OPEN, Ordering::Release);
        // Pairs with the fence in `wait_for_region`: either this thread sees the sleeping worker,
        // or the worker saw the new state before it went to sleep.
        fence(Ordering::SeqCst);
        if self.sleeping_workers.load(Ordering::Relaxed) > 0 {
            drop(lock(&self.panic));
            self.region_started.notify_all();
        }
    }

    /// Ends joining and waits until all workers have left the region.
    fn close(&self) {
        self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let all_left = || self.state.load(Ordering::Acquire) & ACTIVE == 0;
        if spin_until(all_left) {
            return;
        }
        let mut guard = lock(&self.panic);
        self.caller_waiting.store(true, Ordering::Relaxed);
        // Pairs with the fence in `worker_loop`: either this thread sees that the last worker has
        // left, or that worker sees `caller_waiting` and notifies.
        fence(Ordering::SeqCst);
        while !all_left() {
            guard = self.workers_left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_waiting.store(false, Ordering::Relaxed);
    }

    /// Executes regions until the pool is dropped.
    fn worker_loop(&self) {
        let mut last_region = 0;
        while let Some(region) = self.wait_for_region(last_region) {
            last_region = region;
            if !self.try_join(region) {
                continue;
            }
            // SAFETY: the pointer was stored before the state that `try_join` read, and the caller
            // keeps the body alive until this worker has decremented the active count.
            let body = unsafe { *self.body.load(Ordering::Relaxed) };
            if let Err(panic) = execute(body) {
                lock(&self.panic).get_or_insert(panic);
            }
            let before = self.state.fetch_sub(1, Ordering::AcqRel);
            // Pairs with the fence in `close`.
            fence(Ordering::SeqCst);
            if before & ACTIVE == 1 && self.caller_waiting.load(Ordering::Relaxed) {
                drop(lock(&self.panic));
                self.workers_left.notify_all();
            }
        }
    }

    /// Waits for a region other than `last_region`. Returns `None` when the pool shuts down.
    fn wait_for_region(&self, last_region: u64) -> Option<u64> {
        let region = || self.state.load(Ordering::Acquire) / REGION;
        let ready = || region() != last_region || self.shutting_down.load(Ordering::Acquire);
        if !spin_until(ready) {
            let mut guard = lock(&self.panic);
            self.sleeping_workers.fetch_add(1, Ordering::Relaxed);
            // Pairs with the fence in `open`.
            fence(Ordering::SeqCst);
            while !ready() {
                guard = self.region_started.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping_workers.fetch_sub(1, Ordering::Relaxed);
        }
        (!self.shutting_down.load(Ordering::Acquire)).then(region)
    }

    /// Joins `region` if it is still open. Returns whether it was.
    fn try_join(&self, region: u64) -> bool {
        let joined =
            |state: u64| (state / REGION == region && state & OPEN != 0).then(|| state + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, joined).is_ok()
    }
}

/// Locks a mutex of the pool. Poisoning is ignored: no thread panics while it holds such a mutex.
/// (`loom`, which checks this file, replaces the mutexes of the standard library only.)
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
