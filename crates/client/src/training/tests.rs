//! Apart from the file they test, because `tests/model` compiles that too.

use futures_util::FutureExt as _;

use super::call_order::{CallOrder, Reservation};

fn numbers(reservation: &mut Reservation, count: usize) -> Vec<u64> {
    assert!(reservation.wait().now_or_never().is_some(), "it is not their turn");
    reservation.assign(count).map(tinkex_wire::Seq::get).collect()
}

/// Covers X3.
#[test]
fn numbers_of_one_call_are_never_interleaved() {
    let order = CallOrder::new();
    let (mut one, mut two) = (order.reserve(), order.reserve());
    assert_eq!(numbers(&mut one, 3), [1, 2, 3]);
    assert!(two.wait().now_or_never().is_none());
    drop(one);
    assert_eq!(numbers(&mut two, 2), [4, 5]);
}

/// Covers X2.
#[test]
fn a_turn_that_is_dropped_early_passes_on_and_leaves_no_hole() {
    let order = CallOrder::new();
    let (mut one, two, mut three) = (order.reserve(), order.reserve(), order.reserve());
    assert_eq!(numbers(&mut one, 2), [1, 2]);
    drop(two);
    assert!(three.wait().now_or_never().is_none(), "the first has not passed yet");
    drop(one);
    assert_eq!(numbers(&mut three, 1), [3]);
}

#[test]
fn a_wait_that_was_given_up_can_be_taken_up_again() {
    let order = CallOrder::new();
    let (one, mut two) = (order.reserve(), order.reserve());
    assert!(two.wait().now_or_never().is_none());
    let mut waiting = Box::pin(two.wait());
    assert!((&mut waiting).now_or_never().is_none());
    drop(one);
    assert!(waiting.now_or_never().is_some());
}
