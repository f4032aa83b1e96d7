//! Keeps a model's requests in call order.
//!
//! The server executes a model's requests by sequence number and waits for gaps, so numbers must be
//! assigned in the order in which the user made the calls, even though each call is sent by its own
//! task. [`CallOrder::reserve`] runs synchronously inside the call and fixes its position;
//! [`Reservation::wait`] resolves once all earlier reservations are released. A reservation is
//! released on drop, so a failed or cancelled call never blocks later ones, and a call that sends
//! nothing consumes no sequence number.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};

use tinkex_wire::Seq;
use tokio::sync::oneshot;

use crate::sync::{Mutex, MutexGuard};

/// Largest sequence number of a model.
const MAX_SEQ: u64 = (1 << 31) - 1;

/// Hands out positions in call order.
#[derive(Clone, Debug)]
pub(crate) struct CallOrder(Arc<Mutex<OrderState>>);

#[derive(Debug)]
struct OrderState {
    /// Position of the next reservation.
    next: u64,
    /// Position that currently holds the right to send.
    current: u64,
    /// Positions released before they became current.
    released_early: BTreeSet<u64>,
    /// Wakes the reservation of a position when it becomes current.
    waiters: HashMap<u64, oneshot::Sender<()>>,
    /// Next sequence number to assign.
    next_seq: u64,
}

/// Position of one call. Dropping it lets the next call send.
#[derive(Debug)]
pub(crate) struct Reservation {
    order: CallOrder,
    position: u64,
}

impl CallOrder {
    /// Creates an order without reservations, starting at the first sequence number of a model.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(OrderState {
            next: 0,
            current: 0,
            released_early: BTreeSet::new(),
            waiters: HashMap::new(),
            next_seq: Seq::FIRST.get(),
        })))
    }

    /// Reserves the position after all existing reservations.
    pub(crate) fn reserve(&self) -> Reservation {
        let mut state = self.lock();
        let position = state.next;
        state.next += 1;
        drop(state);
        Reservation { order: self.clone(), position }
    }

    fn lock(&self) -> MutexGuard<'_, OrderState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Waits until every earlier reservation has been released.
    ///
    /// Cancel safe: the position is kept, and a later call waits again.
    pub(crate) async fn wait(&mut self) {
        let current = {
            let mut state = self.order.lock();
            if state.current == self.position {
                return;
            }
            let (sender, current) = oneshot::channel();
            state.waiters.insert(self.position, sender);
            current
        };
        current.await.expect("the reservation keeps its waiter registered");
    }

    /// Assigns the next `count` sequence numbers. Must be called after [`wait`](Self::wait).
    ///
    /// # Panics
    /// Panics if the model has used all sequence numbers, which have 31 bits on the wire.
    pub(crate) fn assign(&mut self, count: usize) -> impl Iterator<Item = Seq> + use<> {
        let mut state = self.order.lock();
        debug_assert_eq!(state.current, self.position, "assign was called before wait");
        let first = state.next_seq;
        state.next_seq += count as u64;
        assert!(state.next_seq <= MAX_SEQ, "the model has used all sequence numbers");
        (first..state.next_seq).map(Seq::new)
    }

    /// Assigns the next sequence number. Must be called after [`wait`](Self::wait).
    pub(crate) fn assign_one(&mut self) -> Seq {
        self.assign(1).next().expect("one number was assigned")
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.order.lock();
        state.waiters.remove(&self.position);
        state.released_early.insert(self.position);
        let mut current = state.current;
        while state.released_early.remove(&current) {
            current += 1;
        }
        state.current = current;
        let waiter = state.waiters.remove(&current);
        drop(state);
        if let Some(waiter) = waiter {
            // Fails if the `wait` future was dropped. Its reservation is still current, and
            // releases the position when it is dropped itself.
            let _ = waiter.send(());
        }
    }
}
