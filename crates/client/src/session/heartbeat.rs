//! Telling the server that we are still here.

use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{SessionHeartbeat, SessionId};
use tokio::time::{Instant, sleep};

use crate::transport::{RequestOptions, Transport};

const PERIOD: Duration = Duration::from_secs(10);
const WORRY_AFTER: Duration = Duration::from_secs(120);

/// Beats until the server says that the session is over (410), or for ever.
pub(super) async fn keep_alive(transport: Arc<Transport>, session_id: SessionId) {
    let beat = SessionHeartbeat::new(session_id);
    let mut last_seen = Instant::now();
    loop {
        sleep(PERIOD).await;
        match transport.send(&beat, &RequestOptions::default()).await {
            Ok(_) => last_seen = Instant::now(),
            Err(error) if error.status() == Some(410) => {
                tracing::info!(session = %beat.session_id, "the server has ended the session");
                return;
            }
            Err(error) if last_seen.elapsed() > WORRY_AFTER => {
                let silent_for = last_seen.elapsed();
                tracing::warn!(session = %beat.session_id, ?silent_for, %error, "no heartbeat");
            }
            Err(error) => tracing::debug!(%error, "a heartbeat was lost"),
        }
    }
}
