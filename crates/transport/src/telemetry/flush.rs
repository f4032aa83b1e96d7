//! Background task that sends the events of an [`EventQueue`]. Errors are logged and do not end the
//! task.

use std::sync::Arc;
use std::time::Duration;

use tinkex_backoff::{Backoff, Jitter};
use tokio::time::sleep;

use crate::{RequestOptions, Transport};

use super::EventQueue;

/// Time between two flushes.
const INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of attempts to send a batch.
const ATTEMPTS: u32 = 3;
/// Delays between the attempts to send a batch.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1)).jitter(Jitter::Lengthen(0.1));

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
        let mut backoff = BACKOFF;
        for attempt in 1..=ATTEMPTS {
            let Err(error) = transport.send(&batch, &RequestOptions::default()).await else {
                break;
            };
            tracing::debug!(%error, attempt, "cannot send telemetry");
            if attempt < ATTEMPTS {
                sleep(backoff.next_delay()).await;
            }
        }
        events.remove(batch.events.len());
    }
}
