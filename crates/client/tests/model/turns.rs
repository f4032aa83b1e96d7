//! Lost turns.

use std::sync::Arc;

use loom::future::block_on;
use loom::sync::Mutex;
use loom::thread;

use crate::model;
use crate::training::turn::Turnstile;

#[test]
fn turns_pass_in_order_though_one_is_dropped_unused() {
    model(|| {
        let stile = Turnstile::new();
        let passed = Arc::new(Mutex::new(Vec::new()));
        let (one, two, three) = (stile.reserve(1), stile.reserve(2), stile.reserve(1));
        let walk = |mut turn: crate::training::turn::Turn| {
            let passed = Arc::clone(&passed);
            thread::spawn(move || {
                block_on(turn.come());
                passed.lock().unwrap().push(turn.seq(0).get());
            })
        };
        let (first, last) = (walk(one), walk(three));
        drop(two);
        first.join().unwrap();
        last.join().unwrap();
        assert_eq!(*passed.lock().unwrap(), [1, 4]);
    });
}

#[test]
fn numbers_taken_at_the_same_time_are_never_the_same() {
    model(|| {
        let stile = Turnstile::new();
        let other = stile.clone();
        let there = thread::spawn(move || other.reserve(2).seq(0).get());
        let here = stile.reserve(2).seq(0).get();
        let there = there.join().unwrap();
        assert_eq!([here.min(there), here.max(there)], [1, 3]);
        // Both turns were dropped, so the line is open.
        block_on(stile.reserve(1).come());
    });
}
