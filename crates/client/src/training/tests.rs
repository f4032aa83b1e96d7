//! Unit tests of [`CallOrder`].
//!
//! They are not in `call_order.rs` because `tests/model` compiles that file a second time, with
//! loom.

use futures_util::FutureExt as _;

use super::call_order::{AssignedSeq, CallOrder, Reservation};

/// Assigns numbers and sends requests with them.
fn assign(reservation: &mut Reservation, count: usize) -> Vec<u64> {
    let assigned = assign_unsent(reservation, count);
    let send = |assigned: AssignedSeq| {
        assigned.sent.set();
        assigned.seq.get()
    };
    assigned.into_iter().map(send).collect()
}

fn assign_unsent(reservation: &mut Reservation, count: usize) -> Vec<AssignedSeq> {
    assert!(reservation.wait().now_or_never().is_some(), "an earlier reservation is held");
    reservation.assign(count).to_vec()
}

/// Covers X3.
#[test]
fn sequence_numbers_of_two_calls_do_not_interleave() {
    let order = CallOrder::new();
    let mut first = order.reserve();
    let mut second = order.reserve();
    assert_eq!(assign(&mut first, 3), [1, 2, 3]);
    assert!(second.wait().now_or_never().is_none());
    drop(first);
    assert_eq!(assign(&mut second, 2), [4, 5]);
}

/// Covers X2.
#[test]
fn reservation_released_early_leaves_no_gap() {
    let order = CallOrder::new();
    let mut first = order.reserve();
    let second = order.reserve();
    let mut third = order.reserve();
    assert_eq!(assign(&mut first, 2), [1, 2]);
    drop(second);
    assert!(third.wait().now_or_never().is_none(), "the first reservation is still held");
    drop(first);
    assert_eq!(assign(&mut third, 1), [3]);
}

#[test]
fn cancelled_wait_can_be_repeated() {
    let order = CallOrder::new();
    let first = order.reserve();
    let mut second = order.reserve();
    assert!(second.wait().now_or_never().is_none());
    let mut waiting = Box::pin(second.wait());
    assert!((&mut waiting).now_or_never().is_none());
    drop(first);
    assert!(waiting.now_or_never().is_some());
}

#[test]
fn numbers_after_the_last_one_that_was_sent_are_assigned_again() {
    let order = CallOrder::new();
    let mut first = order.reserve();
    let mut second = order.reserve();
    let assigned = assign_unsent(&mut first, 4);
    // The chunks of a batch are not sent in the order of their numbers.
    assigned[1].sent.set();
    assigned[3].sent.set();
    assigned[3].sent.reset();
    drop(first);
    let assigned = assign_unsent(&mut second, 2);
    assert_eq!(assigned[0].seq.get(), 3);
    drop(second);
    assert_eq!(assign(&mut order.reserve(), 1), [3], "nothing was sent");
}
