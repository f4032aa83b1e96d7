//! [`Limit`]: how much may be on its way at once.
//!
//! A request is admitted while nothing is owed, then its amount is taken off and may leave a debt.
//! So a request of any size passes sooner or later, and the limit is overshot by one at most.
//! Waiting requests are admitted in the order they came.
//!
//! As long as nobody waits, taking and giving back are one atomic operation each: thousands of
//! samples do not pass through a lock one at a time. What is left and whether somebody waits stand
//! in one word, so that nobody can give back and overlook who just began to wait.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use tokio::sync::oneshot;

use crate::sync::{AtomicI64, Mutex, MutexGuard, Ordering};

/// Set while somebody waits; the other bits are what is left.
const WAITED_FOR: i64 = 1;
/// The largest limit and the largest amount: sums of both stay far from the end of the word.
const MOST: i64 = i64::MAX >> 3;

#[derive(Debug)]
pub(crate) struct Limit {
    state: AtomicI64,
    waiting: Mutex<VecDeque<Waiter>>,
}

#[derive(Debug)]
struct Waiter {
    amount: i64,
    admit: oneshot::Sender<Permit>,
}

/// What was taken off a limit, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    limit: Arc<Limit>,
    amount: i64,
}

impl Limit {
    /// Admits requests until this many bytes are owed.
    pub(crate) fn bytes(bytes: u64) -> Arc<Self> {
        let state = AtomicI64::new(clamped(bytes) << 1);
        Arc::new(Self { state, waiting: Mutex::new(VecDeque::new()) })
    }

    /// Admits this many requests that take 1 each.
    pub(crate) fn concurrency(places: u32) -> Arc<Self> {
        Self::bytes(u64::from(places.saturating_sub(1)))
    }

    /// Waits until nothing is owed, then takes `amount`. Dropping the future leaves no trace.
    pub(crate) async fn acquire(self: &Arc<Self>, amount: u64) -> Permit {
        let amount = clamped(amount);
        if self.admit(amount, Line::Empty) {
            return self.permit(amount);
        }
        let admitted = {
            let (admit, admitted) = oneshot::channel();
            let mut waiting = self.lock();
            if waiting.len() == waiting.capacity() {
                // Whoever gave up behind somebody who still waits is forgotten before the line
                // grows, and there is room enough then not to look again soon.
                waiting.retain(|waiter| !waiter.admit.is_closed());
                let room = waiting.len().max(8);
                waiting.reserve(room);
            }
            waiting.push_back(Waiter { amount, admit });
            self.state.fetch_or(WAITED_FOR, Ordering::AcqRel);
            // Whoever gave back before the mark was set did not see us.
            self.admit_waiting(waiting);
            admitted
        };
        admitted.await.expect("the limit outlives those who wait for it")
    }

    /// Takes `amount` if nothing is owed and, unless it is for the head of the line, nobody waits.
    fn admit(&self, amount: i64, line: Line) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state < 0 || (line == Line::Empty && state & WAITED_FOR != 0) {
                return false;
            }
            let next = state - (amount << 1);
            let swap = Ordering::AcqRel;
            match self.state.compare_exchange_weak(state, next, swap, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
    }

    /// Admits from the head of the line while nothing is owed.
    fn admit_waiting(self: &Arc<Self>, mut waiting: MutexGuard<'_, VecDeque<Waiter>>) {
        let mut admitted = Vec::new();
        loop {
            // Whoever gave up waiting must not be charged, nor hold up the line.
            while waiting.front().is_some_and(|waiter| waiter.admit.is_closed()) {
                waiting.pop_front();
            }
            let Some(head) = waiting.front() else {
                self.state.fetch_and(!WAITED_FOR, Ordering::AcqRel);
                break;
            };
            if !self.admit(head.amount, Line::Head) {
                break;
            }
            let waiter = waiting.pop_front().expect("it was just looked at");
            admitted.push((waiter.admit, self.permit(waiter.amount)));
        }
        drop(waiting);
        // A permit that nobody takes any more is dropped here, and gives its amount back.
        for (admit, permit) in admitted {
            let _ = admit.send(permit);
        }
    }

    fn permit(self: &Arc<Self>, amount: i64) -> Permit {
        Permit { limit: Arc::clone(self), amount }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiter>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many are remembered as waiting.
    #[cfg(test)]
    pub(crate) fn in_line(&self) -> usize {
        self.lock().len()
    }

    /// What is left; negative if something is owed.
    #[cfg(test)]
    pub(crate) fn left(&self) -> i64 {
        self.state.load(Ordering::Acquire) >> 1
    }
}

/// For whom something is taken.
#[derive(Clone, Copy, PartialEq)]
enum Line {
    /// Somebody new, who must not overtake those who wait.
    Empty,
    /// Whoever has waited longest.
    Head,
}

fn clamped(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(MOST).min(MOST)
}

impl Drop for Permit {
    fn drop(&mut self) {
        let before = self.limit.state.fetch_add(self.amount << 1, Ordering::AcqRel);
        if before & WAITED_FOR != 0 {
            self.limit.admit_waiting(self.limit.lock());
        }
    }
}
