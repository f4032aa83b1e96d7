//! Registration of custom losses with the server.

use crate::call_options::ApplyOptions as _;
use crate::error::Result;
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::future::{Poller, Submitted};
use crate::loss::CustomLoss;
use crate::transport::CallOptions;

use super::Session;

impl Session {
    /// Registers a loss with the server and returns a loss that the server computes.
    ///
    /// Returns the loss unchanged if the server does not compute custom losses. A loss that was
    /// registered before is not sent again.
    pub(crate) async fn create_custom_loss(
        &self,
        loss: &CustomLoss,
        options: &CallOptions,
    ) -> Result<CustomLoss> {
        if !self.config().custom_loss_server_side {
            return Ok(loss.clone());
        }
        let fingerprint = loss.fingerprint();
        // Hold the lock during the request: concurrent callers must not register the same loss
        // twice.
        let mut registered = self.losses.lock().await;
        if let Some(id) = registered.get(&fingerprint) {
            return Ok(loss.on_server(self.id.clone(), id.clone()));
        }
        let request = loss.registration(self.id.clone(), self.next_loss());
        let submitted = Submitted::send(self, &request, &options.request_options()).await?;
        let log = QueueLog::new(QueuedWork::LossCreation, loss.name(), self.queue_observer());
        let poller = Poller::new(self, &log).with_options(options);
        let created = poller.result::<tinkex_wire::CreateCustomLoss>(&submitted).await?;
        registered.insert(fingerprint, created.loss_id.clone());
        Ok(loss.on_server(self.id.clone(), created.loss_id))
    }
}
