//! [`Limit`]: an asynchronous counting semaphore that admits requests of any size.
//!
//! A request is admitted while the remaining budget is not negative. The amount of the request is
//! then subtracted, which may make the budget negative. A request larger than the limit is
//! therefore admitted eventually, and the limit is exceeded by at most one request. Waiting
//! requests are admitted in first-in, first-out order.
//!
//! Without waiters, acquiring and releasing are one atomic operation each, so that thousands of
//! samples do not serialize on a lock. The remaining budget and the "has waiters" flag share one
//! atomic word: a release that does not see the flag cannot miss a waiter that set it earlier.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::sync::{AtomicI64, Mutex, MutexGuard, Ordering};

/// Lowest bit of the state: set while the queue has waiters. The other bits are the budget.
const HAS_WAITERS: i64 = 1;
/// Maximum budget and maximum amount. The sum of two such values, shifted left by one bit, does not
/// overflow `i64`.
const MAX_AMOUNT: i64 = i64::MAX >> 3;

/// Semaphore over bytes or requests.
#[derive(Debug)]
pub struct Limit {
    state: AtomicI64,
    waiters: Mutex<VecDeque<Waiter>>,
}

#[derive(Debug)]
struct Waiter {
    amount: i64,
    admit: oneshot::Sender<Permit>,
}

/// Amount acquired from a [`Limit`]. Dropping this value returns the amount to the budget.
#[derive(Debug)]
pub struct Permit {
    limit: Arc<Limit>,
    amount: i64,
}

/// Requester on whose behalf budget is acquired.
#[derive(Clone, Copy, PartialEq)]
enum Requester {
    /// Caller of [`Limit::acquire`], who must not overtake the queue.
    New,
    /// Waiter at the head of the queue.
    HeadOfQueue,
}

impl Limit {
    /// Creates a limit with a budget of `bytes`.
    pub fn bytes(bytes: u64) -> Arc<Self> {
        let state = AtomicI64::new(clamp_amount(bytes) << 1);
        Arc::new(Self { state, waiters: Mutex::new(VecDeque::new()) })
    }

    /// Creates a limit of `max` concurrent requests, each of which acquires 1.
    pub fn concurrency(max: u32) -> Arc<Self> {
        // The budget is one less than `max`: the request that makes it negative is admitted too.
        Self::bytes(u64::from(max.saturating_sub(1)))
    }

    /// Waits until the budget is not negative, then subtracts `amount`.
    ///
    /// Cancel safe: dropping the future acquires nothing. Its entry in the queue is skipped and
    /// removed later.
    pub async fn acquire(self: &Arc<Self>, amount: u64) -> Permit {
        let amount = clamp_amount(amount);
        if self.try_subtract(amount, Requester::New) {
            return self.permit(amount);
        }
        let admitted = {
            let (admit, admitted) = oneshot::channel();
            let mut waiters = self.lock();
            if waiters.len() == waiters.capacity() {
                // Remove cancelled waiters before the queue grows, and reserve enough space that
                // the next scan is amortized over as many insertions.
                waiters.retain(|waiter| !waiter.admit.is_closed());
                let additional = waiters.len().max(8);
                waiters.reserve(additional);
            }
            waiters.push_back(Waiter { amount, admit });
            self.state.fetch_or(HAS_WAITERS, Ordering::AcqRel);
            // A permit released before the flag was set did not check the queue.
            self.admit_waiters(waiters);
            admitted
        };
        admitted.await.expect("the limit outlives its waiters")
    }

    /// Subtracts `amount` if the budget is not negative. A new requester also needs an empty queue.
    fn try_subtract(&self, amount: i64, requester: Requester) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state < 0 || (requester == Requester::New && state & HAS_WAITERS != 0) {
                return false;
            }
            let next = state - (amount << 1);
            let success = Ordering::AcqRel;
            match self.state.compare_exchange_weak(state, next, success, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(current) => state = current,
            }
        }
    }

    /// Admits waiters from the head of the queue while the budget is not negative.
    fn admit_waiters(self: &Arc<Self>, mut waiters: MutexGuard<'_, VecDeque<Waiter>>) {
        let mut admitted = Vec::new();
        loop {
            // A cancelled waiter must not consume budget or block the queue.
            while waiters.front().is_some_and(|waiter| waiter.admit.is_closed()) {
                waiters.pop_front();
            }
            let Some(head) = waiters.front() else {
                self.state.fetch_and(!HAS_WAITERS, Ordering::AcqRel);
                break;
            };
            if !self.try_subtract(head.amount, Requester::HeadOfQueue) {
                break;
            }
            let waiter = waiters.pop_front().expect("the queue has a head");
            admitted.push((waiter.admit, self.permit(waiter.amount)));
        }
        // Unlock first: `send` drops a permit whose receiver is gone, and dropping a permit takes
        // the lock.
        drop(waiters);
        for (admit, permit) in admitted {
            let _ = admit.send(permit);
        }
    }

    fn permit(self: &Arc<Self>, amount: i64) -> Permit {
        Permit { limit: Arc::clone(self), amount }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiter>> {
        self.waiters.lock()
    }

    /// Returns the length of the queue, cancelled waiters included.
    #[cfg(test)]
    pub(crate) fn queue_len(&self) -> usize {
        self.lock().len()
    }

    /// Returns the remaining budget, which may be negative.
    #[cfg(test)]
    pub(crate) fn remaining(&self) -> i64 {
        self.state.load(Ordering::Acquire) >> 1
    }
}

fn clamp_amount(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(MAX_AMOUNT).min(MAX_AMOUNT)
}

impl Drop for Permit {
    fn drop(&mut self) {
        let before = self.limit.state.fetch_add(self.amount << 1, Ordering::AcqRel);
        if before & HAS_WAITERS != 0 {
            self.limit.admit_waiters(self.limit.lock());
        }
    }
}
