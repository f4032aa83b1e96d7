//! [`CallOrder`]: calls leave in the order they were made.
//!
//! A call takes its place in the line at once, when it is made. When all before it have passed, it
//! numbers its requests and sends them. A place that is dropped, used or not, passes on: nobody can
//! hold up the line for good, and a call that sends nothing leaves no hole in the numbers, which a
//! server would wait for.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};

use tinkex_wire::Seq;
use tokio::sync::oneshot;

use crate::sync::{Mutex, MutexGuard};

#[derive(Clone, Debug)]
pub(crate) struct CallOrder(Arc<Mutex<OrderState>>);

#[derive(Debug)]
struct OrderState {
    /// The next place to give out.
    next: u64,
    /// The place whose turn it is.
    now: u64,
    /// Places that were left before their turn came.
    passed: BTreeSet<u64>,
    waiting: HashMap<u64, oneshot::Sender<()>>,
    /// The number of the next request.
    seq: u64,
}

/// A place in the line.
#[derive(Debug)]
pub(crate) struct Reservation {
    order: CallOrder,
    place: u64,
}

impl CallOrder {
    /// An empty line; the first number is the first operation on a model.
    pub(crate) fn new() -> Self {
        let (passed, waiting) = (BTreeSet::new(), HashMap::new());
        let state = OrderState { next: 0, now: 0, passed, waiting, seq: Seq::FIRST.get() };
        Self(Arc::new(Mutex::new(state)))
    }

    /// The last place in the line.
    pub(crate) fn reserve(&self) -> Reservation {
        let mut state = self.lock();
        let place = state.next;
        state.next += 1;
        drop(state);
        Reservation { order: self.clone(), place }
    }

    fn lock(&self) -> MutexGuard<'_, OrderState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Waits until all before have passed.
    pub(crate) async fn wait(&mut self) {
        let called = {
            let mut state = self.order.lock();
            if state.now == self.place {
                return;
            }
            let (sender, called) = oneshot::channel();
            state.waiting.insert(self.place, sender);
            called
        };
        called.await.expect("the line outlives those who stand in it");
    }

    /// Numbers for this many requests, one after the other. Only whoever's turn it is may ask.
    pub(crate) fn assign(&mut self, count: usize) -> impl Iterator<Item = Seq> + use<> {
        let mut state = self.order.lock();
        debug_assert_eq!(state.now, self.place, "it is another's turn");
        let first = state.seq;
        state.seq += count as u64;
        (first..state.seq).map(Seq::new)
    }

    /// The number for one request.
    pub(crate) fn assign_one(&mut self) -> Seq {
        self.assign(1).next().expect("one was asked for")
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.order.lock();
        state.waiting.remove(&self.place);
        state.passed.insert(self.place);
        let mut now = state.now;
        while state.passed.remove(&now) {
            now += 1;
        }
        state.now = now;
        let called = state.waiting.remove(&now);
        drop(state);
        if let Some(called) = called {
            // Whoever does not listen any more drops its own reservation.
            let _ = called.send(());
        }
    }
}
