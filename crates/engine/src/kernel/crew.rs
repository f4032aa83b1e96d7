//! [`Crew`]: threads that do the same work as their caller, at the same time.
//!
//! A token passes through hundreds of products of a few dozen microseconds. A thread that has to be
//! woken for each comes too late, so these stay awake for a moment after their last work.

#![expect(
    unsafe_code,
    reason = "threads borrow what lives on their caller's stack; see `Crew::run`"
)]

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread with nothing to do stays awake: longer than what lies between two products,
/// shorter than anybody else would mind.
const AWAKE: Duration = Duration::from_micros(200);
/// How often it looks before it asks for the time.
const LOOKS: u32 = 64;

/// A piece of work that many do together: whoever calls it takes a share, until there is none left.
type Work<'a> = &'a (dyn Fn() + Sync);

/// Threads beside the caller's.
pub(super) struct Crew {
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

thread_local! {
    /// Whether this thread is at some crew's work.
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

impl Crew {
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
            let thread = std::thread::Builder::new()
                .name(format!("tinkex-engine-{index}"))
                .spawn(move || shared.serve())?;
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    /// Calls `work` on this thread, and on as many others as come in time. Returns when all of them
    /// are back; panics if one did. Inside other work there is nobody to help.
    pub(super) fn run(&self, work: Work<'_>) {
        if WORKING.get() {
            return work();
        }
        let turn = lock(&self.turn);
        // SAFETY: only the lifetime changes. Threads use it between joining and leaving; joining
        // ends with `close` below and all have left when `wait` returns, on every way out: nothing
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

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
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
    WORKING.set(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    WORKING.set(false);
    done
}

impl Shared {
    /// Lets threads join.
    fn open(&self, work: *mut Work<'static>) {
        self.work.store(work, Ordering::Relaxed);
        // Nobody is inside, so the lower half is zero. Whoever sees the new state sees the work.
        let before = self.state.load(Ordering::Relaxed);
        self.state.store(before.wrapping_add(ROUND) | OPEN, Ordering::SeqCst);
        // Either this sees a sleeper, or the sleeper saw the new state before it lay down.
        if self.asleep.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.panic));
            self.called.notify_all();
        }
    }

    /// Lets nobody join any more, and waits until all have left.
    fn close(&self) {
        self.state.fetch_and(!OPEN, Ordering::SeqCst);
        let empty = || self.state.load(Ordering::SeqCst) & INSIDE == 0;
        if awake_until(empty) {
            return;
        }
        let mut guard = lock(&self.panic);
        self.waiting.store(true, Ordering::SeqCst);
        while !empty() {
            guard = self.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.store(false, Ordering::SeqCst);
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
            let before = self.state.fetch_sub(1, Ordering::SeqCst);
            if before & INSIDE == 1 && self.waiting.load(Ordering::SeqCst) {
                drop(lock(&self.panic));
                self.left.notify_all();
            }
        }
    }

    /// Waits for another round than `seen`; none when the crew is dismissed.
    fn next(&self, seen: u64) -> Option<u64> {
        let round = || self.state.load(Ordering::SeqCst) / ROUND;
        let called = || round() != seen || self.closing.load(Ordering::SeqCst);
        if !awake_until(called) {
            let mut guard = lock(&self.panic);
            self.asleep.fetch_add(1, Ordering::SeqCst);
            while !called() {
                guard = self.called.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.asleep.fetch_sub(1, Ordering::SeqCst);
        }
        (!self.closing.load(Ordering::SeqCst)).then(round)
    }

    /// Joins the work of a round, if that is still open.
    fn join(&self, round: u64) -> bool {
        let open = |state: u64| (state / ROUND == round && state & OPEN != 0).then(|| state + 1);
        self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, open).is_ok()
    }
}

/// Waits without sleeping for as long as that is worth it.
fn awake_until(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > AWAKE {
            return false;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number below `count` once, by whoever comes.
    fn shares(crew: &Crew, count: usize, task: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        crew.run(&|| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                task(index);
            }
        });
    }

    #[test]
    fn every_task_is_done_once_and_before_the_caller_goes_on() {
        for threads in [0, 1, 3] {
            let crew = Crew::new(threads).unwrap();
            for round in 0..2_000 {
                let count = round % 17;
                let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                shares(&crew, count, |index| {
                    done[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.into_iter().all(|done| done.into_inner() == 1), "round {round}");
            }
        }
    }

    #[test]
    fn a_thread_that_fell_asleep_is_woken() {
        let crew = Crew::new(2).unwrap();
        for _ in 0..20 {
            while crew.shared.asleep.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            // Three tasks that wait for each other need three threads.
            let all = std::sync::Barrier::new(3);
            shares(&crew, 3, |_| {
                all.wait();
            });
        }
    }

    #[test]
    fn a_caller_that_fell_asleep_is_woken() {
        let crew = Crew::new(1).unwrap();
        let both = std::sync::Barrier::new(2);
        let caller = std::thread::current().id();
        shares(&crew, 2, |_| {
            both.wait();
            if std::thread::current().id() != caller {
                while !crew.shared.waiting.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
            }
        });
    }

    #[test]
    fn many_callers_take_turns_and_work_inside_work_is_done_alone() {
        let crew = Crew::new(2).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        shares(&crew, 5, |_| {
                            shares(&crew, 3, |_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 200 * 5 * 3);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_crew_goes_on() {
        let crew = Crew::new(2).unwrap();
        for bad in 0..6 {
            let run = || shares(&crew, 6, |index| assert_ne!(index, bad, "task {bad}"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            let done = AtomicUsize::new(0);
            shares(&crew, 6, |_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 6);
        }
    }
}
