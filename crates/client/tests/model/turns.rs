//! Lost turns.

use std::sync::Arc;

use loom::future::block_on;
use loom::sync::Mutex;
use loom::thread;

use crate::model;
use crate::training::call_order::{CallOrder, Reservation};

#[test]
fn turns_pass_in_order_though_one_is_dropped_unused() {
    model(|| {
        let order = CallOrder::new();
        let passed = Arc::new(Mutex::new(Vec::new()));
        let (one, two, three) = (order.reserve(), order.reserve(), order.reserve());
        let walk = |name: &'static str, mut reservation: Reservation| {
            let passed = Arc::clone(&passed);
            thread::spawn(move || {
                block_on(reservation.wait());
                passed.lock().unwrap().push((name, reservation.assign_one().get()));
            })
        };
        let (first, last) = (walk("one", one), walk("three", three));
        drop(two);
        first.join().unwrap();
        last.join().unwrap();
        assert_eq!(*passed.lock().unwrap(), [("one", 1), ("three", 2)]);
    });
}

#[test]
fn places_taken_at_the_same_time_are_never_the_same() {
    model(|| {
        let order = CallOrder::new();
        let use_one = |order: CallOrder| {
            let mut reservation = order.reserve();
            block_on(reservation.wait());
            reservation.assign(2).next().unwrap().get()
        };
        let other = order.clone();
        let there = thread::spawn(move || use_one(other));
        let here = use_one(order.clone());
        let there = there.join().unwrap();
        assert_eq!([here.min(there), here.max(there)], [1, 3]);
        // Both turns were dropped, so the line is open.
        block_on(order.reserve().wait());
    });
}
