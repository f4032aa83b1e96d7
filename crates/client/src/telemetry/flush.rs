//! Sends the events of an [`EventQueue`]. Errors are logged and never end the task.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::transport::{RequestOptions, Transport};

use super::EventQueue;

/// Time between two flushes.
const INTERVAL: Duration = Duration::from_secs(10);
/// Number of attempts to send a batch.
const ATTEMPTS: u32 = 3;

/// Sends queued events every 10 seconds, or sooner on request, until the task is aborted.
pub(super) async fn run(events: Arc<EventQueue>, transport: Arc<Transport>) {
    loop {
        events.wait_for_flush(INTERVAL).await;
        send_all(&events, &transport).await;
    }
}

/// Sends all queued events, batch by batch. A batch is dropped after three failed attempts, so that
/// closing a client does not depend on telemetry.
pub(super) async fn send_all(events: &EventQueue, transport: &Transport) {
    while let Some(batch) = events.batch() {
        for attempt in 1..=ATTEMPTS {
            let Err(error) = transport.send(&batch, &RequestOptions::default()).await else {
                break;
            };
            tracing::debug!(%error, attempt, "cannot send telemetry");
            if attempt < ATTEMPTS {
                let delay = Duration::from_secs(1 << (attempt - 1));
                sleep(delay.mul_f64(1.0 + 0.1 * fastrand::f64())).await;
            }
        }
        events.remove(batch.events.len());
    }
}
