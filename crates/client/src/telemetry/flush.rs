//! The task that sends a journal. It outlives every error.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::transport::{Extras, Transport};

use super::Journal;

const INTERVAL: Duration = Duration::from_secs(10);
const ATTEMPTS: u32 = 3;

/// Sends what there is every now and then, for ever.
pub(super) async fn run(journal: Arc<Journal>, transport: Arc<Transport>) {
    loop {
        journal.next_round(INTERVAL).await;
        send_all(&journal, &transport).await;
    }
}

/// Sends everything, batch by batch. A batch that cannot be sent is dropped after a while, so that
/// nobody waits for it.
pub(super) async fn send_all(journal: &Journal, transport: &Transport) {
    while let Some(batch) = journal.batch() {
        for attempt in 1..=ATTEMPTS {
            let Err(error) = transport.call(&batch, &Extras::default()).await else { break };
            tracing::debug!(%error, attempt, "telemetry was not taken");
            if attempt < ATTEMPTS {
                let pause = Duration::from_secs(1 << (attempt - 1));
                sleep(pause.mul_f64(1.0 + 0.1 * fastrand::f64())).await;
            }
        }
        journal.gone(batch.events.len());
    }
}
