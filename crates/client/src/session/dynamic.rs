//! Settings that the server may change while a session is open.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

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
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Fetches the settings at the interval that they name, at least 10 seconds. A failure leaves them
/// unchanged.
pub(super) async fn refresh(transport: Arc<Transport>, settings: Arc<DynamicSettings>) {
    loop {
        let interval = Duration::from_secs(settings.get().refresh_interval_sec);
        sleep(interval.max(MIN_INTERVAL)).await;
        let options = RequestOptions { single_attempt: true, ..RequestOptions::default() };
        match transport.send(&DynamicConfigRequest::default(), &options).await {
            Ok(new) => *settings.0.write().unwrap_or_else(PoisonError::into_inner) = new,
            Err(error) => tracing::debug!(%error, "cannot refresh dynamic settings"),
        }
    }
}
