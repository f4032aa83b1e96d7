//! Reservations are served in order and none is lost.

use std::sync::Arc;

use loom::future::block_on;
use loom::sync::Mutex;
use loom::thread;

use crate::model;
use crate::training::call_order::{CallOrder, Reservation};

/// Assigns a number and sends a request with it.
fn send_one(reservation: &mut Reservation) -> u64 {
    let assigned = reservation.assign_one();
    assigned.sent.set();
    assigned.seq.get()
}

#[test]
fn reservations_are_served_in_order_if_one_is_dropped_unused() {
    model(|| {
        let order = CallOrder::new();
        let served = Arc::new(Mutex::new(Vec::new()));
        let first = order.reserve();
        let second = order.reserve();
        let third = order.reserve();
        let serve = |name: &'static str, mut reservation: Reservation| {
            let served = Arc::clone(&served);
            thread::spawn(move || {
                block_on(reservation.wait());
                served.lock().unwrap().push((name, send_one(&mut reservation)));
            })
        };
        let threads = [serve("first", first), serve("third", third)];
        drop(second);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*served.lock().unwrap(), [("first", 1), ("third", 2)]);
    });
}

#[test]
fn concurrent_reservations_get_distinct_numbers() {
    model(|| {
        let order = CallOrder::new();
        let assign_two = |order: CallOrder| {
            let mut reservation = order.reserve();
            block_on(reservation.wait());
            let numbers = reservation.assign(2);
            numbers[1].sent.set();
            numbers[0].seq.get()
        };
        let other = order.clone();
        let thread = thread::spawn(move || assign_two(other));
        let here = assign_two(order.clone());
        let there = thread.join().unwrap();
        assert_eq!([here.min(there), here.max(there)], [1, 3]);
        // Both reservations were dropped, so the next one is current.
        block_on(order.reserve().wait());
    });
}
