//! Lost turns.

use std::sync::Arc;

use loom::future::block_on;
use loom::sync::Mutex;
use loom::thread;

use crate::model;
use crate::training::turn::{Turn, Turnstile};

#[test]
fn turns_pass_in_order_though_one_is_dropped_unused() {
    model(|| {
        let stile = Turnstile::new();
        let passed = Arc::new(Mutex::new(Vec::new()));
        let (one, two, three) = (stile.reserve(), stile.reserve(), stile.reserve());
        let walk = |name: &'static str, mut turn: Turn| {
            let passed = Arc::clone(&passed);
            thread::spawn(move || {
                block_on(turn.come());
                passed.lock().unwrap().push((name, turn.number().get()));
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
        let stile = Turnstile::new();
        let use_one = |stile: Turnstile| {
            let mut turn = stile.reserve();
            block_on(turn.come());
            turn.numbers(2).next().unwrap().get()
        };
        let other = stile.clone();
        let there = thread::spawn(move || use_one(other));
        let here = use_one(stile.clone());
        let there = there.join().unwrap();
        assert_eq!([here.min(there), here.max(there)], [1, 3]);
        // Both turns were dropped, so the line is open.
        block_on(stile.reserve().come());
    });
}
