//! Settings that the server may change while we run.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tinkex_wire::{DynamicConfig, DynamicConfigRequest};
use tokio::time::sleep;

use crate::transport::{RequestOptions, Transport};

const SHORTEST_INTERVAL: Duration = Duration::from_secs(10);

/// The settings as they are now.
#[derive(Debug)]
pub(crate) struct Dynamic(RwLock<DynamicConfig>);

impl Dynamic {
    pub(super) fn new(config: DynamicConfig) -> Arc<Self> {
        Arc::new(Self(RwLock::new(config)))
    }

    pub(super) fn get(&self) -> DynamicConfig {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Asks for the settings now and then; a failure leaves them as they are.
pub(super) async fn refresh(transport: Arc<Transport>, dynamic: Arc<Dynamic>) {
    loop {
        let interval = Duration::from_secs(dynamic.get().refresh_interval_sec);
        sleep(interval.max(SHORTEST_INTERVAL)).await;
        let once = RequestOptions { single_attempt: true, ..RequestOptions::default() };
        match transport.send(&DynamicConfigRequest::default(), &once).await {
            Ok(new) => *dynamic.0.write().unwrap_or_else(PoisonError::into_inner) = new,
            Err(error) => tracing::debug!(%error, "settings were not refreshed"),
        }
    }
}
