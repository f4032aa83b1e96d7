//! Heartbeats that keep a session alive on the server.

use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{SessionHeartbeat, SessionId};
use tokio::time::{Instant, sleep};

use crate::transport::{RequestOptions, Transport};

/// Time between two heartbeats.
const PERIOD: Duration = Duration::from_secs(10);
/// Time without a successful heartbeat after which failures are logged as warnings.
const WARN_AFTER: Duration = Duration::from_secs(120);

/// Sends a heartbeat every 10 seconds until the server reports the end of the session (410).
pub(super) async fn keep_alive(transport: Arc<Transport>, session_id: SessionId) {
    let heartbeat = SessionHeartbeat::new(session_id);
    let mut last_success = Instant::now();
    loop {
        sleep(PERIOD).await;
        match transport.send(&heartbeat, &RequestOptions::default()).await {
            Ok(_) => last_success = Instant::now(),
            Err(error) if error.status() == Some(410) => {
                tracing::info!(session = %heartbeat.session_id, "server ended the session");
                return;
            }
            Err(error) if last_success.elapsed() > WARN_AFTER => {
                let failing_for = last_success.elapsed().as_secs_f64();
                let session = &heartbeat.session_id;
                tracing::warn!(%session, failing_for, %error, "heartbeats are failing");
            }
            Err(error) => tracing::debug!(%error, "heartbeat failed"),
        }
    }
}
