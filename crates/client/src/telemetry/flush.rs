//! The task that sends a events. It outlives every error.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::transport::{RequestOptions, Transport};

use super::EventQueue;

const INTERVAL: Duration = Duration::from_secs(10);
const ATTEMPTS: u32 = 3;

/// Sends what there is every now and then, for ever.
pub(super) async fn run(events: Arc<EventQueue>, transport: Arc<Transport>) {
    loop {
        events.next_round(INTERVAL).await;
        send_all(&events, &transport).await;
    }
}

/// Sends everything, batch by batch. A batch that cannot be sent is dropped after a while, so that
/// nobody waits for it.
pub(super) async fn send_all(events: &EventQueue, transport: &Transport) {
    while let Some(batch) = events.batch() {
        for attempt in 1..=ATTEMPTS {
            let Err(error) = transport.send(&batch, &RequestOptions::default()).await else {
                break;
            };
            tracing::debug!(%error, attempt, "telemetry was not taken");
            if attempt < ATTEMPTS {
                let pause = Duration::from_secs(1 << (attempt - 1));
                sleep(pause.mul_f64(1.0 + 0.1 * fastrand::f64())).await;
            }
        }
        events.gone(batch.events.len());
    }
}
