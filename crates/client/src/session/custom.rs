//! Handing losses to the server.

use tokio::time::Instant;

use tinkex_wire::SubmitRequest as _;

use crate::error::Result;
use crate::future::poll::{Poller, Submitted};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::loss::CustomLoss;
use crate::transport::RequestOptions;

use super::Session;

impl Session {
    /// The same loss, computed by the server if it does that. One that it has already is not handed
    /// over again.
    pub(crate) async fn create_custom_loss(&self, loss: &CustomLoss) -> Result<CustomLoss> {
        if !self.config().custom_loss_server_side {
            return Ok(loss.clone());
        }
        let fingerprint = loss.fingerprint();
        // Held while one is handed over, so that two callers do not hand over the same.
        let mut known = self.losses.lock().await;
        if let Some(id) = known.get(&fingerprint) {
            return Ok(loss.on_server(self.id.clone(), id.clone()));
        }
        let request = loss.upload(self.id.clone(), self.next_loss());
        let start = Instant::now();
        let ticket = self.transport().send(&request, &RequestOptions::default()).await?;
        let request_type = request.request_type();
        let taken = Submitted { response: ticket, request_type, submit_duration: start.elapsed() };
        let log = QueueLog::new(QueuedWork::LossCreation, loss.name());
        let created =
            Poller::new(self, &log).result::<tinkex_wire::CreateCustomLoss>(&taken).await?;
        known.insert(fingerprint, created.loss_id.clone());
        Ok(loss.on_server(self.id.clone(), created.loss_id))
    }
}
