//! Checks periodically whether an upstream responds, and which base models it offers.

use std::sync::Arc;
use std::time::Duration;

use tinkex_store::log;

use crate::upstream_session::UpstreamSession;
use crate::{LEGACY_LOSSES, Upstream};

/// Interval between checks of an upstream that responds.
const INTERVAL: Duration = Duration::from_secs(15);
/// Interval between checks of an upstream that does not respond.
const DOWN_INTERVAL: Duration = Duration::from_secs(2);

/// Checks the upstream periodically.
pub(super) async fn watch(upstream: Arc<Upstream>) {
    loop {
        let is_up = upstream.handle.status().down.is_none();
        tokio::time::sleep(if is_up { INTERVAL } else { DOWN_INTERVAL }).await;
        check_once(&upstream).await;
    }
}

/// Requests the list of the upstream's base models, and records whether the upstream responds.
pub(super) async fn check_once(upstream: &Upstream) {
    let checked = check(upstream).await;
    upstream.report(checked.err().map(|error| error.to_string()));
}

async fn check(upstream: &Upstream) -> tinkex::Result<()> {
    let capabilities = upstream.service.server_capabilities().await?;
    if upstream.protocol_is_unknown() {
        let session = UpstreamSession::open(&upstream.service).await?;
        let losses = (!session.has_current_protocol()).then_some(LEGACY_LOSSES);
        session.finish().await;
        if losses.is_some() {
            upstream.inspect_slots().await;
        }
        upstream.handle.status().losses = losses;
    }
    for model in capabilities.supported_models {
        let Some(name) = model.model_name else { continue };
        let context = model.max_context_length.and_then(|length| usize::try_from(length).ok());
        upstream.handle.offer_model(&name, context);
    }
    Ok(())
}

impl Upstream {
    /// Returns whether the upstream has not responded yet, so that its protocol is not known.
    fn protocol_is_unknown(&self) -> bool {
        !self.handle.status().was_reached
    }

    /// Records whether the upstream responds, and logs a change. `down` is the error of the check;
    /// `None` if the upstream responds.
    fn report(&self, down: Option<String>) {
        let mut status = self.handle.status();
        match (&status.down, &down) {
            (Some(_), None) => {
                tracing::info!(target: log::MODEL, upstream = %self.handle.name, "upstream responds");
            }
            (None, Some(error)) => tracing::warn!(
                target: log::MODEL,
                upstream = %self.handle.name,
                error,
                "upstream does not respond"
            ),
            (None, None) => {}
            (Some(_), Some(error)) if status.was_reached => tracing::debug!(
                target: log::MODEL,
                upstream = %self.handle.name,
                error,
                "upstream still does not respond"
            ),
            (Some(_), Some(error)) => tracing::warn!(
                target: log::MODEL,
                upstream = %self.handle.name,
                error,
                "upstream has not responded yet"
            ),
        }
        status.was_reached |= down.is_none();
        status.down = down;
    }
}
