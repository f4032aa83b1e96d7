//! [`UpstreamSession`]: single requests to a server, for a gateway that keeps the state of the runs.
//!
//! [`TrainingClient`](crate::TrainingClient) repeats a request until the server has accepted it,
//! which relies on sequence numbers: the server executes a number once. Servers of older protocols
//! execute a repeated request again. A gateway therefore sends each request at most once, stores the
//! id under which the server accepted it, and creates the model again if it does not know whether
//! the server accepted a request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tinkex_loss::{CustomLoss, LocalLoss, LossResult, forward_data, token_loss};
use tinkex_session::pass_encoding::probe_pass_encoding;
use tinkex_wire::{
    Datum, FinishReason, ForwardBackward, ForwardBackwardOutput, JsonForwardBackward, LossFn,
    PassMode, RequestId, SessionHeartbeat, SessionId, SubmitRequest, SubmitResponse,
};
use tokio::time::Instant;

use crate::connection::PassEncoding;
use crate::error::{Error, Result};
use crate::future::queue_log::{QueueLog, QueuedWork};
use crate::future::{Poller, Submitted};
use crate::sampling::{SamplingClient, SamplingWeights};
use crate::service::ServiceClient;
use crate::session::Session;
use crate::transport::CallOptions;
use crate::transport::RequestOptions;
use crate::transport::request::sent_flag::SentFlag;

/// Session whose training requests are sent one by one, each at most once.
///
/// Heartbeats keep the session alive until it is finished or dropped.
///
/// ```no_run
/// use tinkex::wire::CreateModel;
/// use tinkex::upstream::UpstreamSession;
/// use tinkex::{LoraConfig, ServiceClient};
///
/// # async fn run(service: ServiceClient) -> Result<(), Box<dyn std::error::Error>> {
/// let session = UpstreamSession::open(&service).await?;
/// let request = CreateModel::new(session.id().clone(), 0, "Qwen/Qwen3-8B")
///     .lora_config(Some(LoraConfig::default()));
/// let accepted = session.submit(&request).await?;
/// // Store `accepted.request_id` here: another process can then fetch the result.
/// let created = session.result::<CreateModel>(&accepted.request_id).await?;
/// println!("{}", created.model_id);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct UpstreamSession {
    service: ServiceClient,
    session: Arc<Session>,
    log: Arc<QueueLog>,
}

/// Error of a request that the server has not accepted, as far as is known.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SubmitError {
    /// The failure of the only attempt.
    pub error: Error,
    /// Whether the server may have accepted the request all the same: it may have read the request,
    /// and did not reject it.
    pub in_doubt: bool,
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for SubmitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl UpstreamSession {
    /// Creates a session on the server, with a connection of its own and the settings of `service`.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses the session.
    pub async fn open(service: &ServiceClient) -> Result<Self> {
        let service = service.with_new_session();
        let session = service.session().await?;
        Ok(Self::new(service, session))
    }

    /// Continues a session that another process created.
    ///
    /// # Errors
    /// If the server cannot be reached. The server does not check here whether it still has the
    /// session.
    pub async fn adopt(service: &ServiceClient, id: SessionId) -> Result<Self> {
        let service = service.with_new_session();
        let session = service.adopt_session(id).await?;
        Ok(Self::new(service, session))
    }

    fn new(service: ServiceClient, session: Arc<Session>) -> Self {
        let log = QueueLog::new(
            QueuedWork::Training,
            session.id().as_str().to_owned(),
            session.queue_observer(),
        );
        Self { service, session, log: Arc::new(log) }
    }

    /// Returns the id of the session.
    #[must_use]
    pub fn id(&self) -> &SessionId {
        self.session.id()
    }

    /// Returns the client whose session this is, for requests that may be repeated.
    #[must_use]
    pub fn service(&self) -> &ServiceClient {
        &self.service
    }

    /// Sends a request at most once and returns the server's acknowledgement.
    ///
    /// # Errors
    /// [`SubmitError`] tells whether the server may have accepted the request.
    ///
    /// # Cancel safety
    /// Not cancel safe: if the future is dropped, the server may have accepted the request.
    pub async fn submit<S: SubmitRequest>(
        &self,
        request: &S,
    ) -> std::result::Result<SubmitResponse, SubmitError> {
        self.send(request, false).await
    }

    /// Sends a training pass like [`submit`](Self::submit), in the encoding that the server accepts.
    ///
    /// # Errors
    /// Like [`submit`](Self::submit).
    ///
    /// # Cancel safety
    /// Like [`submit`](Self::submit).
    pub async fn submit_pass(
        &self,
        pass: &ForwardBackward,
    ) -> std::result::Result<SubmitResponse, SubmitError> {
        let options = RequestOptions::default();
        probe_pass_encoding(&self.session, &options)
            .await
            .map_err(|error| SubmitError { error, in_doubt: false })?;
        match self.session.connection().pass_encoding() {
            Some(PassEncoding::Json) => self.send(&JsonForwardBackward(pass), false).await,
            _ => self.send(pass, self.session.config().proto_compress_fwdbwd).await,
        }
    }

    async fn send<S: SubmitRequest>(
        &self,
        request: &S,
        compress: bool,
    ) -> std::result::Result<SubmitResponse, SubmitError> {
        let sent = SentFlag::default();
        let options = RequestOptions {
            compress,
            single_attempt: true,
            sent: Some(sent.clone()),
            ..RequestOptions::default()
        };
        let accepted = Submitted::send(&self.session, request, &options).await;
        accepted.map(|submitted| submitted.response).map_err(|error| {
            let rejected = error.status().is_some_and(|status| (400..500).contains(&status));
            SubmitError { in_doubt: sent.get() && !rejected, error }
        })
    }

    /// Waits for the result of a request that the server accepted, also from another process.
    ///
    /// Polls that get no response are repeated as the retry policy of the client says.
    ///
    /// # Errors
    /// If the request failed, or the server does not know it any more.
    ///
    /// # Cancel safety
    /// Cancel safe: the result can be fetched by a later call.
    pub async fn result<S: SubmitRequest>(&self, id: &RequestId) -> Result<S::Output> {
        let submitted = Submitted {
            response: SubmitResponse::new(id.clone()),
            request_type: "request",
            submit_duration: Duration::ZERO,
            call_start: Instant::now(),
            attempts: 1,
        };
        Poller::new(&self.session, &self.log).result::<S>(&submitted).await
    }

    /// Waits for the result of a training pass, like [`result`](Self::result). A server of the first
    /// protocol reports no total loss; it is computed from the losses of the tokens.
    ///
    /// # Errors
    /// Like [`result`](Self::result).
    ///
    /// # Cancel safety
    /// Like [`result`](Self::result).
    pub async fn pass_result(&self, id: &RequestId) -> Result<ForwardBackwardOutput> {
        let mut output = self.result::<ForwardBackward>(id).await?;
        if !output.metrics.contains_key("loss:sum")
            && let Some(loss) = token_loss(&output.loss_fn_outputs)
        {
            output.metrics.insert("loss:sum".to_owned(), loss);
        }
        Ok(output)
    }

    /// Creates a client that samples in this session from a base model, or from the checkpoint with
    /// the path `path` on the server.
    ///
    /// # Errors
    /// If the server does not accept the weights.
    pub async fn sampling_client(
        &self,
        base_model: &str,
        path: Option<&str>,
    ) -> Result<SamplingClient> {
        let weights = match path {
            Some(path) => SamplingWeights::Checkpoint(path.to_owned()),
            None => SamplingWeights::Base(base_model.to_owned()),
        };
        SamplingClient::create(Arc::clone(&self.session), weights, &CallOptions::default()).await
    }

    /// Checks that the server still has the session.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if it does not; any other kind if the
    /// server cannot be reached.
    pub async fn check(&self) -> Result<()> {
        let heartbeat = SessionHeartbeat::new(self.id().clone());
        self.session.transport().send(&heartbeat, &RequestOptions::default()).await.map(drop)
    }

    /// Returns whether the server implements the current protocol. Servers of older protocols
    /// (SkyRL, TuFT) have no dynamic configuration.
    #[must_use]
    pub fn has_current_protocol(&self) -> bool {
        self.session.connection().has_dynamic_config()
    }

    /// Ends the session on the server.
    pub async fn finish(&self) {
        self.session.close(FinishReason::Success, None).await;
    }

    /// Stops the heartbeats without ending the session, so that another process can
    /// [`adopt`](Self::adopt) it.
    pub async fn leave(&self) {
        self.session.leave().await;
    }
}

/// Custom loss of one pass, computed from the log-probabilities of a forward pass.
///
/// ```no_run
/// # async fn run(
/// #     session: tinkex::upstream::UpstreamSession, loss: tinkex::loss::CustomLoss,
/// #     pass: tinkex::wire::ForwardBackward,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use tinkex::upstream::CustomLossPass;
///
/// let forward = CustomLossPass::forward(&pass)?;
/// let accepted = session.submit_pass(&forward).await?;
/// let output = session.pass_result(&accepted.request_id).await?;
/// let computed = CustomLossPass::compute(loss, pass, &output).await?;
/// let accepted = session.submit_pass(computed.backward()).await?;
/// let output = session.pass_result(&accepted.request_id).await?;
/// println!("{:?}", computed.output(output).metrics["loss:sum"]);
/// # Ok(()) }
/// ```
pub struct CustomLossPass {
    backward: ForwardBackward,
    loss: LossResult,
}

impl CustomLossPass {
    /// Returns the pass that computes the log-probabilities for a pass with a custom loss.
    ///
    /// # Errors
    /// If a datum has no target tokens.
    pub fn forward(pass: &ForwardBackward) -> Result<ForwardBackward> {
        let data = forward_data(&pass.data)?;
        Ok(cross_entropy(pass, data, PassMode::Forward))
    }

    /// Computes the loss of `pass` from the output of its [`forward`](Self::forward) pass.
    ///
    /// # Errors
    /// If the output has no log-probabilities, or the loss cannot be computed or is not finite.
    pub async fn compute(
        loss: CustomLoss,
        mut pass: ForwardBackward,
        forward: &ForwardBackwardOutput,
    ) -> Result<Self> {
        let data = std::mem::take(&mut pass.data);
        let local = LocalLoss::new(move |data, logprobs| Ok(loss.evaluate(data, logprobs)?));
        let (loss, data) = local.compute(&forward.loss_fn_outputs, data).await?;
        Ok(Self { backward: cross_entropy(&pass, data, PassMode::ForwardBackward), loss })
    }

    /// Returns the pass that accumulates the gradient of the loss.
    #[must_use]
    pub fn backward(&self) -> &ForwardBackward {
        &self.backward
    }

    /// Returns the output of the pass with the custom loss, from that of the last pass that was
    /// made for it.
    #[must_use]
    pub fn output(self, mut output: ForwardBackwardOutput) -> ForwardBackwardOutput {
        self.loss.add_to(&mut output.metrics);
        output
    }
}

impl fmt::Debug for CustomLossPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomLossPass").field("loss", &self.loss).finish_non_exhaustive()
    }
}

/// Returns `pass` with other data and cross entropy as its loss.
fn cross_entropy(pass: &ForwardBackward, data: Vec<Datum>, mode: PassMode) -> ForwardBackward {
    let mut request =
        ForwardBackward::new(pass.model_id.clone(), data, LossFn::CrossEntropy).mode(mode);
    request.seq_id = pass.seq_id;
    request
}

impl fmt::Debug for UpstreamSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamSession").field("id", self.id()).finish_non_exhaustive()
    }
}
