//! Runs 200 scenarios. `cargo xtask simulate` runs more of them.

#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

use tinkex_simulation::run;

fn check(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let report = run(seed, false).unwrap();
        let repeat = format!("cargo xtask simulate --seeds 1 --seed {seed} -v");
        assert_eq!(report.failure, None, "to repeat: {repeat}");
        if seed.is_multiple_of(25) {
            let again = run(seed, false).unwrap();
            assert_eq!(report.hash, again.hash, "two runs with seed {seed} differ");
        }
    }
}

// Several tests, so that they use several cores.

#[test]
fn scenarios_0_to_49_hold() {
    check(0..50);
}

#[test]
fn scenarios_50_to_99_hold() {
    check(50..100);
}

#[test]
fn scenarios_100_to_149_hold() {
    check(100..150);
}

#[test]
fn scenarios_150_to_199_hold() {
    check(150..200);
}
