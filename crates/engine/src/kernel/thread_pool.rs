//! [`ThreadPool`]: threads that do the same work as their caller, at the same time.
//!
//! A token passes through hundreds of products of a few dozen microseconds. A thread that has to be
//! woken for each comes too late, so these stay awake for a moment after their last work.

#![expect(
    unsafe_code,
    reason = "threads borrow what lives on their caller's stack; see `ThreadPool::run`"
)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::PoisonError;

use super::sync::{
    Arc, AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Builder, Condvar, JoinHandle, Mutex,
    MutexGuard, Ordering, awake_until, fence, is_working, set_working,
};

/// A piece of work that many do together: whoever calls it takes a share, until there is none left.
type Work<'a> = &'a (dyn Fn() + Sync);

/// Threads beside the caller's.
pub(super) struct ThreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held by the one whose work is being done.
    turn: Mutex<()>,
}

struct Shared {
    /// How often there was work (upper half), whether it may still be joined, and how many threads
    /// are at it.
    state: AtomicU64,
    /// The work of the moment; valid for whoever joined it.
    work: AtomicPtr<Work<'static>>,
    /// Threads that have to be woken.
    asleep: AtomicUsize,
    /// Whether the caller has to be.
    waiting: AtomicBool,
    closing: AtomicBool,
    /// What a task panicked with, and the lock of all who sleep.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    called: Condvar,
    left: Condvar,
}

/// One more round of work.
const ROUND: u64 = 1 << 32;
/// The work may be joined.
const OPEN: u64 = 1 << 31;
/// Threads at it.
const INSIDE: u64 = OPEN - 1;

impl ThreadPool {
    /// `threads` of them, the caller not counted.
    pub(super) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            work: AtomicPtr::new(ptr::null_mut()),
            asleep: AtomicUsize::new(0),
            waiting: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            panic: Mutex::new(None),
            called: Condvar::new(),
            left: Condvar::new(),
        });
        let mut crew = Self { shared, threads: Vec::new(), turn: Mutex::new(()) };
        for index in 0..threads {
            let shared = Arc::clone(&crew.shared);
            let thread = Builder::new()
                .name(format!("tinkex-engine-{index}"))
                .spawn(move || shared.serve())?;
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    /// Runs `task` once for every number below `count`, in any order, on any thread. Panics if a task
    /// did, when all that were begun are done.
    pub(super) fn each(&self, count: usize, task: impl Fn(usize) + Sync) {
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

    /// Calls `work` on this thread, and on as many others as come in time. Returns when all of them
    /// are back; panics if one did. Inside other work there is nobody to help.
    fn run(&self, work: Work<'_>) {
        if is_working() {
            return work();
        }
        let turn = lock(&self.turn);
        // SAFETY: only the lifetime changes. Threads use it between joining and leaving; joining
        // ends with `close` below, and all have left when that returns, on every way out: nothing
        // between here and there can panic outside of `catch_unwind`.
        let mut lasting = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        self.shared.open(&mut lasting);
        let own = at_work(work);
        self.shared.close();
        let other = lock(&self.shared.panic).take();
        drop(turn);
        if let Some(panic) = own.err().or(other) {
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
#[allow(dead_code, reason = "the model of it looks from outside")]
impl ThreadPool {
    /// How many threads sleep.
    pub(super) fn asleep(&self) -> usize {
        self.shared.asleep.load(Ordering::Relaxed)
    }

    /// Whether the caller sleeps.
    pub(super) fn is_waiting(&self) -> bool {
        self.shared.waiting.load(Ordering::Relaxed)
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        // Whoever looked before this sleeps by now, and whoever looks after it sees it.
        drop(lock(&self.shared.panic));
        self.shared.called.notify_all();
        for thread in self.threads.drain(..) {
            // A panic there was the caller's already.
            let _ = thread.join();
        }
    }
}

/// Takes a share of some work.
fn at_work(work: Work<'_>) -> Result<(), Box<dyn Any + Send>> {
    set_working(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    set_working(false);
    done
}

impl Shared {
    /// Lets threads join.
    fn open(&self, work: *mut Work<'static>) {
        self.work.store(work, Ordering::Relaxed);
        // Nobody is inside, so the lower half is zero. Whoever sees the new state sees the work.
        let before = self.state.load(Ordering::Relaxed);
        self.state.store(before.wrapping_add(ROUND) | OPEN, Ordering::Release);
        // Either this sees a sleeper, or the sleeper saw the new state before it lay down.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) > 0 {
            drop(lock(&self.panic));
            self.called.notify_all();
        }
    }

    /// Lets nobody join any more, and waits until all have left.
    fn close(&self) {
        self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let empty = || self.state.load(Ordering::Acquire) & INSIDE == 0;
        if awake_until(empty) {
            return;
        }
        let mut guard = lock(&self.panic);
        self.waiting.store(true, Ordering::Relaxed);
        // As in `open`, the other way round.
        fence(Ordering::SeqCst);
        while !empty() {
            guard = self.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.store(false, Ordering::Relaxed);
    }

    /// The life of a thread.
    fn serve(&self) {
        let mut seen = 0;
        while let Some(round) = self.next(seen) {
            seen = round;
            if !self.join(round) {
                continue;
            }
            // SAFETY: stored before the state that `join` found, and kept alive by the caller until
            // this thread has left.
            let work = unsafe { *self.work.load(Ordering::Relaxed) };
            if let Err(panic) = at_work(work) {
                lock(&self.panic).get_or_insert(panic);
            }
            let before = self.state.fetch_sub(1, Ordering::AcqRel);
            fence(Ordering::SeqCst);
            if before & INSIDE == 1 && self.waiting.load(Ordering::Relaxed) {
                drop(lock(&self.panic));
                self.left.notify_all();
            }
        }
    }

    /// Waits for another round than `seen`; none when the crew is dismissed.
    fn next(&self, seen: u64) -> Option<u64> {
        let round = || self.state.load(Ordering::Acquire) / ROUND;
        let called = || round() != seen || self.closing.load(Ordering::Acquire);
        if !awake_until(called) {
            let mut guard = lock(&self.panic);
            self.asleep.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            while !called() {
                guard = self.called.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.asleep.fetch_sub(1, Ordering::Relaxed);
        }
        (!self.closing.load(Ordering::Acquire)).then(round)
    }

    /// Joins the work of a round, if that is still open.
    fn join(&self, round: u64) -> bool {
        let open = |state: u64| (state / ROUND == round && state & OPEN != 0).then(|| state + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, open).is_ok()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
