//! [`CallOrder`]: keeps a model's requests in call order.
//!
//! The server executes a model's requests by sequence number and waits for gaps, so numbers must be
//! assigned in the order in which the user made the calls, even though each call is sent by its own
//! task. [`CallOrder::reserve`] runs synchronously inside the call and fixes its position;
//! [`Reservation::wait`] resolves once all earlier reservations are released. A reservation is
//! released on drop, so a failed or cancelled call never blocks later ones.
//!
//! A number is consumed once the server may have read a request with it. After a 5xx, a timeout or
//! a lost connection the client cannot know whether the server has read the request. If the next
//! request got the same number, a server that has accepted the failed request would treat the next
//! request as a retry and not execute it. If the server has not read the failed request, it waits
//! for the number until a timeout and then skips the number.
//!
//! The number of a request that the server has certainly not read is assigned again, so that the
//! server does not wait for the number. This is the case if the connection was refused, if the
//! server refused the credential or limited the rate, or if the runtime ended before the request
//! was sent.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tinkex_wire::Seq;
use tokio::sync::oneshot;

use crate::sync::{Mutex, MutexGuard};
use crate::transport::request::sent_flag::SentFlag;

/// Largest sequence number of a model.
const MAX_SEQ: u64 = (1 << 31) - 1;

/// Assigns positions in call order.
#[derive(Clone, Debug)]
pub(crate) struct CallOrder(Arc<Mutex<OrderState>>);

/// Reservations and sequence numbers of one model.
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
    /// Assigned sequence numbers, in order.
    assigned: Vec<AssignedSeq>,
}

/// Sequence number of one request.
#[derive(Clone, Debug)]
pub(crate) struct AssignedSeq {
    pub(crate) seq: Seq,
    /// Whether the server may have read the request. The code that sends the request sets it.
    pub(crate) sent: SentFlag,
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
        Reservation { order: self.clone(), position, assigned: Vec::new() }
    }

    fn lock(&self) -> MutexGuard<'_, OrderState> {
        self.0.lock()
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
    pub(crate) fn assign(&mut self, count: usize) -> &[AssignedSeq] {
        let mut state = self.order.lock();
        debug_assert_eq!(state.current, self.position, "assign was called before wait");
        let first = state.next_seq;
        state.next_seq += count as u64;
        assert!(state.next_seq <= MAX_SEQ, "the model has used all sequence numbers");
        let numbers = (first..state.next_seq).map(Seq::new);
        let start = self.assigned.len();
        self.assigned.extend(numbers.map(|seq| AssignedSeq { seq, sent: SentFlag::default() }));
        &self.assigned[start..]
    }

    /// Assigns the next sequence number. Must be called after [`wait`](Self::wait).
    pub(crate) fn assign_one(&mut self) -> AssignedSeq {
        self.assign(1)[0].clone()
    }

    /// Returns the first sequence number after the consumed ones, or `None` if this reservation has
    /// assigned no number.
    fn next_seq(&self) -> Option<u64> {
        let first = self.assigned.first()?.seq.get();
        let last_sent = self.assigned.iter().rev().find(|assigned| assigned.sent.get());
        Some(last_sent.map_or(first, |assigned| assigned.seq.get() + 1))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let next_seq = self.next_seq();
        let mut state = self.order.lock();
        if let Some(next_seq) = next_seq {
            // Safe to reset: no other reservation has assigned numbers in the meantime, because
            // this one is current.
            state.next_seq = next_seq;
        }
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
            // Fails if the `wait` future was dropped. Its reservation still becomes current, and
            // releases the position when the reservation is dropped.
            let _ = waiter.send(());
        }
    }
}
