//! Registration of custom losses with the server.

use crate::call_options::ApplyOptions as _;
use crate::error::Result;
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::future::{Poller, Submitted};
use crate::loss::CustomLoss;
use crate::session::Session;
use crate::transport::CallOptions;

/// Registers a loss with the server of `session` and returns a loss that the server computes.
///
/// Returns the loss unchanged if the server does not compute custom losses. A loss that was
/// registered before is not sent again.
pub(super) async fn create_custom_loss(
    session: &Session,
    loss: &CustomLoss,
    options: &CallOptions,
) -> Result<CustomLoss> {
    if !session.config().custom_loss_server_side {
        return Ok(loss.clone());
    }
    let fingerprint = loss.fingerprint();
    // Hold the lock during the request: concurrent callers must not register the same loss twice.
    let mut registered = session.losses().lock().await;
    if let Some(id) = registered.get(&fingerprint) {
        return Ok(loss.on_server(session.id().clone(), id.clone()));
    }
    let request = loss.registration(session.id().clone(), session.next_loss());
    let submitted = Submitted::send(session, &request, &options.request_options()).await?;
    let log = QueueLog::new(QueuedWork::LossCreation, loss.name(), session.queue_observer());
    let poller = Poller::new(session, &log).with_options(options);
    let created = poller.result::<tinkex_wire::CreateCustomLoss>(&submitted).await?;
    registered.insert(fingerprint, created.loss_id.clone());
    Ok(loss.on_server(session.id().clone(), created.loss_id))
}
