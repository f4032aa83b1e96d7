//! Wall-clock time that follows tokio's clock, so that tests with paused time control both.

use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Returns the seconds since the Unix epoch.
pub(crate) fn unix_now() -> f64 {
    static START: OnceLock<(Instant, f64)> = OnceLock::new();
    let (instant, unix) = *START.get_or_init(|| (Instant::now(), system_time()));
    unix + Instant::now().saturating_duration_since(instant).as_secs_f64()
}

/// Returns the system's wall-clock time in seconds since the Unix epoch; 0 before it.
fn system_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
