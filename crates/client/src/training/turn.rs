//! [`Turnstile`]: calls leave in the order they were made.
//!
//! A call reserves its numbers at once, when it is made; the numbers are its place in the line and
//! its sequence numbers on the wire. When all before it have passed, it may send. A turn that is
//! dropped, used or not, passes on: nobody can hold up the line for good.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError};

use tinkex_wire::Seq;
use tokio::sync::oneshot;

use crate::sync::{Mutex, MutexGuard};

#[derive(Clone, Debug)]
pub(crate) struct Turnstile(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// The next number to give out.
    next: u64,
    /// The number whose turn it is.
    now: u64,
    /// Turns that passed before their time came: from their first number to behind their last.
    passed: BTreeMap<u64, u64>,
    waiting: HashMap<u64, oneshot::Sender<()>>,
}

/// A place in the line, for one or more requests.
#[derive(Debug)]
pub(crate) struct Turn {
    stile: Turnstile,
    pub(super) first: u64,
    pub(super) count: u64,
}

impl Turnstile {
    /// An empty line; the first number is the first operation on a model.
    pub(crate) fn new() -> Self {
        let first = Seq::FIRST.get();
        let (passed, waiting) = (BTreeMap::new(), HashMap::new());
        Self(Arc::new(Mutex::new(State { next: first, now: first, passed, waiting })))
    }

    /// Takes the next `count` numbers, which nobody else's come between.
    pub(crate) fn reserve(&self, count: usize) -> Turn {
        let count = count as u64;
        let mut state = self.lock();
        let first = state.next;
        state.next += count;
        drop(state);
        Turn { stile: self.clone(), first, count }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// The sequence number of the `i`th request of this turn.
    pub(crate) fn seq(&self, i: usize) -> Seq {
        Seq::new(self.first + i as u64)
    }

    /// Waits until all before have passed.
    pub(crate) async fn come(&mut self) {
        let called = {
            let mut state = self.stile.lock();
            if state.now == self.first {
                return;
            }
            let (sender, called) = oneshot::channel();
            state.waiting.insert(self.first, sender);
            called
        };
        called.await.expect("the line outlives those who stand in it");
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.stile.lock();
        state.waiting.remove(&self.first);
        state.passed.insert(self.first, self.first + self.count);
        let mut now = state.now;
        while let Some(behind) = state.passed.remove(&now) {
            now = behind;
        }
        state.now = now;
        let called = state.waiting.remove(&now);
        drop(state);
        if let Some(called) = called {
            // Whoever does not listen any more drops its own turn.
            let _ = called.send(());
        }
    }
}
