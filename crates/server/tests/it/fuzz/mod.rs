//! Fuzzes every route with mutated recordings. Each request must be accepted or rejected, and a
//! rejection must change nothing. The test suite has a short run; `cargo xtask fuzz server` has a
//! longer one.

mod mutation;
mod recording;
mod server;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tinkex_wire::Route;

use self::mutation::FuzzRequest;
use self::recording::Recording;
use self::server::{FuzzServer, Verdict};
use crate::harness::setting;

/// Number of cases after which a new server replaces the current one. The check of a case lists all
/// objects, which accumulate; and once a case has ended the session, the server rejects most later
/// requests.
const CASES_PER_SERVER: usize = 250;

/// Number of cases by route and verdict.
#[derive(Default)]
struct Tally {
    accepted: BTreeMap<String, usize>,
    rejected: BTreeMap<String, usize>,
}

impl Tally {
    fn count(&mut self, recording: &Recording, verdict: Verdict) {
        let path = recording.path.split('?').next().unwrap();
        let route = Route::find(&recording.method, path).unwrap().route.to_string();
        let routes = match verdict {
            Verdict::Accepted => &mut self.accepted,
            Verdict::Rejected => &mut self.rejected,
        };
        *routes.entry(route).or_default() += 1;
    }

    /// Checks that the cases have covered all routes, and that at least a tenth of them were
    /// accepted and a tenth rejected.
    fn check_coverage(&self) {
        let total = |routes: &BTreeMap<String, usize>| routes.values().sum::<usize>();
        let accepted = total(&self.accepted);
        let rejected = total(&self.rejected);
        eprintln!("{accepted} cases accepted, {rejected} rejected");
        let is_missing = |route: &String| {
            !self.accepted.contains_key(route) && !self.rejected.contains_key(route)
        };
        let missing: Vec<String> =
            Route::ALL.iter().map(ToString::to_string).filter(is_missing).collect();
        assert!(missing.is_empty(), "routes without a case: {missing:?}");
        let tenth = (accepted + rejected) / 10;
        assert!(accepted > tenth && rejected > tenth, "{accepted} accepted, {rejected} rejected");
    }
}

/// Runs cases while `runs_another` returns true for the number of cases so far.
async fn fuzz(seed: u64, runs_another: impl Fn(usize) -> bool) {
    let recordings = Recording::all();
    let mut rng = Rng::with_seed(seed);
    let mut tally = Tally::default();
    let mut server = FuzzServer::new().await;
    for case in (0..).take_while(|case| runs_another(*case)) {
        if case > 0 && case % CASES_PER_SERVER == 0 {
            server = FuzzServer::new().await;
        }
        let recording = &recordings[case % recordings.len()];
        let request = FuzzRequest::mutated(recording, &server.session, &mut rng);
        let verdict = server.check(&request, &format!("seed {seed}, case {case}")).await;
        tally.count(recording, verdict);
    }
    assert!(server.is_healthy().await);
    tally.check_coverage();
}

#[tokio::test(flavor = "multi_thread")]
async fn mutated_requests_are_accepted_or_rejected_without_side_effects() {
    fuzz(1, |cases| cases < 600).await;
}

/// Fuzzes for `TINKEX_FUZZ_SECONDS` seconds; run by `cargo xtask fuzz server`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes TINKEX_FUZZ_SECONDS; cargo xtask fuzz server runs it"]
async fn a_long_run_finds_nothing() {
    let number = |name: &str| setting(name).map(|text| text.parse::<u64>().unwrap());
    let seconds = number("TINKEX_FUZZ_SECONDS").unwrap_or(60);
    let seed = number("TINKEX_FUZZ_SEED").unwrap_or_else(|| Rng::new().u64(..));
    eprintln!("seed {seed}");
    let until = Instant::now() + Duration::from_secs(seconds);
    fuzz(seed, |cases| cases < 500 || Instant::now() < until).await;
}
