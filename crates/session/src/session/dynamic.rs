//! [`DynamicSettings`]: settings that the server may change while a session is open.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use tinkex_transport::ErrorKind;
use tinkex_wire::{DynamicConfig, DynamicConfigRequest};
use tokio::time::sleep;

use crate::transport::{RequestOptions, Transport};

/// Minimum time between two requests for the settings.
const MIN_INTERVAL: Duration = Duration::from_secs(10);

/// Current dynamic configuration of a session.
#[derive(Debug)]
pub(crate) struct DynamicSettings(RwLock<DynamicConfig>);

impl DynamicSettings {
    pub(super) fn new(config: DynamicConfig) -> Arc<Self> {
        Arc::new(Self(RwLock::new(config)))
    }

    pub(super) fn get(&self) -> DynamicConfig {
        self.0.read().clone()
    }
}

/// Fetches the settings periodically. The settings themselves contain the interval, which is at
/// least 10 seconds. A failed request leaves the settings unchanged. Ends if the server has no such
/// route, as servers with an earlier protocol do.
pub(super) async fn refresh(transport: Arc<Transport>, settings: Arc<DynamicSettings>) {
    loop {
        let interval = Duration::from_secs(settings.get().refresh_interval_sec);
        sleep(interval.max(MIN_INTERVAL)).await;
        let options = RequestOptions { single_attempt: true, ..RequestOptions::default() };
        match transport.send(&DynamicConfigRequest::default(), &options).await {
            Ok(new) => *settings.0.write() = new,
            Err(error) if error.kind() == ErrorKind::NotFound => return,
            Err(error) => tracing::debug!(%error, "cannot refresh dynamic settings"),
        }
    }
}
