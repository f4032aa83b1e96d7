//! [`Pulse`]: whether the server is still there while its answers are waited for.
//!
//! The client asks for an answer for as long as it takes, also while nobody is there to give one.
//! Somebody who sits in front of a run wants to know.

use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::future::{BoxFuture, Either, FutureExt as _, select};
use tinkex::{ErrorKind, ServiceClient};
use tokio::time::{Instant, sleep};

use crate::failure::Failure;

/// Ends what waits for a server that is gone.
pub(super) struct Pulse(BoxFuture<'static, Failure>);

impl Pulse {
    /// Looks after a server that may be gone for so long; the client must try everything once.
    pub(super) fn new(client: ServiceClient, patience: Duration) -> Self {
        Self(gone(client, patience).boxed())
    }

    /// Waits for something, unless the server goes.
    pub(super) async fn keeps<T>(
        &mut self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match select(pin!(work), Pin::new(&mut self.0)).await {
            Either::Left((done, _)) => done,
            Either::Right((gone, _)) => Err(gone),
        }
    }
}

async fn gone(client: ServiceClient, patience: Duration) -> Failure {
    let rhythm = (patience / 6).clamp(Duration::from_secs(1), Duration::from_secs(10));
    let mut since = None;
    loop {
        sleep(rhythm).await;
        match client.server_capabilities().await {
            Err(error) if matches!(error.kind(), ErrorKind::Connect | ErrorKind::Timeout) => {
                if since.get_or_insert_with(Instant::now).elapsed() >= patience {
                    return error.into();
                }
            }
            _ => since = None,
        }
    }
}
