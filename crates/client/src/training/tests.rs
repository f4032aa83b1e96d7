//! Unit tests of [`CallOrder`].
//!
//! They are not in `call_order.rs` because `tests/model` compiles that file a second time, with
//! loom.

use futures_util::FutureExt as _;

use super::call_order::{CallOrder, Reservation};

fn assign(reservation: &mut Reservation, count: usize) -> Vec<u64> {
    assert!(reservation.wait().now_or_never().is_some(), "an earlier reservation is held");
    reservation.assign(count).map(tinkex_wire::Seq::get).collect()
}

/// Covers X3.
#[test]
fn sequence_numbers_of_two_calls_do_not_interleave() {
    let order = CallOrder::new();
    let (mut first, mut second) = (order.reserve(), order.reserve());
    assert_eq!(assign(&mut first, 3), [1, 2, 3]);
    assert!(second.wait().now_or_never().is_none());
    drop(first);
    assert_eq!(assign(&mut second, 2), [4, 5]);
}

/// Covers X2.
#[test]
fn reservation_released_early_leaves_no_gap() {
    let order = CallOrder::new();
    let (mut first, second, mut third) = (order.reserve(), order.reserve(), order.reserve());
    assert_eq!(assign(&mut first, 2), [1, 2]);
    drop(second);
    assert!(third.wait().now_or_never().is_none(), "the first reservation is still held");
    drop(first);
    assert_eq!(assign(&mut third, 1), [3]);
}

#[test]
fn cancelled_wait_can_be_repeated() {
    let order = CallOrder::new();
    let (first, mut second) = (order.reserve(), order.reserve());
    assert!(second.wait().now_or_never().is_none());
    let mut waiting = Box::pin(second.wait());
    assert!((&mut waiting).now_or_never().is_none());
    drop(first);
    assert!(waiting.now_or_never().is_some());
}
