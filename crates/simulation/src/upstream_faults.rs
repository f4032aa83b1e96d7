//! [`UpstreamFaults`]: how often the requests to a simulated upstream fail.

use std::time::Duration;

use fastrand::Rng;

/// Probabilities of the faults of an upstream.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamFaults {
    /// Time after which no fault happens any more.
    pub(crate) duration: Duration,
    pub(crate) lost_request: f64,
    pub(crate) lost_response: f64,
    pub(crate) duplicate: f64,
    /// A proxy answers without passing the request on.
    pub(crate) refused: f64,
    /// A proxy answers although the request has been executed.
    pub(crate) error_after: f64,
    /// A result that cannot be decoded.
    pub(crate) garbage: f64,
    /// Mean time between two restarts of the process; `None` for no restarts.
    pub(crate) restart_interval: Option<Duration>,
    pub(crate) max_delay: Duration,
}

impl UpstreamFaults {
    /// Chooses the probabilities for a scenario. No fault happens after `duration`.
    pub(crate) fn choose(rng: &mut Rng, duration: Duration) -> Self {
        let mut chance = |most: f64| if rng.bool() { rng.f64() * most } else { 0.0 };
        let lost_request = chance(0.05);
        let lost_response = chance(0.05);
        let duplicate = chance(0.1);
        let refused = chance(0.05);
        let error_after = chance(0.03);
        let garbage = chance(0.02);
        let restart_interval = rng.bool().then(|| Duration::from_secs(rng.u64(5..200)));
        let max_delay = Duration::from_millis(rng.u64(1..3_000));
        Self {
            duration,
            lost_request,
            lost_response,
            duplicate,
            refused,
            error_after,
            garbage,
            restart_interval,
            max_delay,
        }
    }

    /// Returns whether every request is executed, and its response received.
    pub(crate) fn never_loses_requests(&self) -> bool {
        let Self { lost_request, lost_response, refused, error_after, garbage, .. } = self;
        lost_request + lost_response + refused + error_after + garbage <= 0.0
    }
}
