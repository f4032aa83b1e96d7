//! Apart from the file they test, because `tests/model` compiles that too.

use futures_util::FutureExt as _;

use super::turn::{Turn, Turnstile};

/// Covers X3.
#[test]
fn numbers_of_one_call_are_never_interleaved() {
    let stile = Turnstile::new();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let stile = stile.clone();
            std::thread::spawn(move || {
                (0..500).map(|i| stile.reserve(1 + i % 3)).collect::<Vec<_>>()
            })
        })
        .collect();
    let mut turns: Vec<Turn> =
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    turns.sort_by_key(|turn| turn.first);
    let mut next = 1;
    for turn in &turns {
        assert_eq!(turn.first, next);
        next += turn.count;
    }
}

/// Covers X2.
#[test]
fn a_turn_that_is_dropped_early_passes_on_when_its_time_comes() {
    let stile = Turnstile::new();
    let (mut one, two, mut three) = (stile.reserve(2), stile.reserve(1), stile.reserve(1));
    assert!(one.come().now_or_never().is_some());
    drop(two);
    assert!(three.come().now_or_never().is_none(), "the first has not passed yet");
    drop(one);
    assert!(three.come().now_or_never().is_some());
    assert_eq!(three.seq(0).get(), 4);
}

#[test]
fn a_wait_that_was_given_up_can_be_taken_up_again() {
    let stile = Turnstile::new();
    let (one, mut two) = (stile.reserve(1), stile.reserve(1));
    assert!(two.come().now_or_never().is_none());
    let mut waiting = Box::pin(two.come());
    assert!((&mut waiting).now_or_never().is_none());
    drop(one);
    assert!(waiting.now_or_never().is_some());
}
