//! Runs a number of scenarios.

#[test]
fn scenarios_hold() {
    for seed in 0..200 {
        let report = tinkex_simulation::run(seed, false).unwrap();
        assert_eq!(report.failure, None, "seed {seed}");
    }
}
