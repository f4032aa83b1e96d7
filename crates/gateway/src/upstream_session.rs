//! [`UpstreamSession`]: single requests to an upstream.
//!
//! [`TrainingClient`](tinkex::TrainingClient) repeats a request until the server has accepted it,
//! which relies on sequence numbers: the server executes only one request with the same number.
//! Legacy servers execute a repeated request again. The gateway therefore sends each request at
//! most once and stores the id under which the server accepted it. If the gateway does not know
//! whether the server accepted a request, it creates the model again.

use std::sync::Arc;
use std::time::Duration;

use tinkex::{CallOptions, Error, Result, SamplingClient, ServiceClient};
use tinkex_loss::token_loss;
use tinkex_session::connection::{Connection, PassEncoding};
use tinkex_session::future::queue_log::{QueueLog, QueuedWork};
use tinkex_session::future::{Poller, Submitted};
use tinkex_session::pass_encoding::probe_pass_encoding;
use tinkex_session::session::Session;
use tinkex_session::{SamplingWeights, SessionSampler as _, SessionSettings as _};
use tinkex_transport::RequestOptions;
use tinkex_transport::request::sent_flag::SentFlag;
use tinkex_wire::{
    FinishReason, ForwardBackward, ForwardBackwardOutput, JsonForwardBackward, RequestId,
    SessionHeartbeat, SessionId, SubmitRequest, SubmitResponse,
};
use tokio::time::Instant;

/// Session whose training requests are sent one by one, each at most once.
///
/// Heartbeats keep the session alive until it is finished or left, or until the last clone is
/// dropped.
#[derive(Clone)]
pub(crate) struct UpstreamSession {
    session: Arc<Session>,
    log: Arc<QueueLog>,
}

/// Error of a request for which the server has sent no acknowledgement.
#[derive(Debug)]
pub(crate) struct SubmitError {
    /// The failure of the only attempt.
    pub(crate) error: Error,
    /// Whether the server may still have accepted the request: the server may have read the request
    /// and has not rejected it.
    pub(crate) in_doubt: bool,
}

impl UpstreamSession {
    /// Creates a session on the server, with a connection of its own and the settings of `service`.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses the session.
    pub(crate) async fn open(service: &ServiceClient) -> Result<Self> {
        let settings = service.session_settings();
        let connection = Connection::open(settings).await?;
        Ok(Self::new(Session::open(settings, connection).await?))
    }

    /// Continues a session that another process created.
    ///
    /// # Errors
    /// If the server cannot be reached. A session that the server no longer has is no error here;
    /// [`check`](Self::check) reports it.
    pub(crate) async fn adopt(service: &ServiceClient, id: SessionId) -> Result<Self> {
        let settings = service.session_settings();
        let connection = Connection::open(settings).await?;
        Ok(Self::new(Session::start(settings, connection, id)?))
    }

    fn new(session: Arc<Session>) -> Self {
        let log = QueueLog::new(
            QueuedWork::Training,
            session.id().as_str().to_owned(),
            session.queue_observer(),
        );
        Self { session, log: Arc::new(log) }
    }

    /// Returns the id of the session.
    pub(crate) fn id(&self) -> &SessionId {
        self.session.id()
    }

    /// Sends a request at most once and returns the server's acknowledgement.
    ///
    /// # Errors
    /// A [`SubmitError`], which tells whether the server may have accepted the request.
    ///
    /// # Cancel safety
    /// Not cancel safe: if the future is dropped, the server may have accepted the request.
    pub(crate) async fn submit<S: SubmitRequest>(
        &self,
        request: &S,
    ) -> std::result::Result<SubmitResponse, SubmitError> {
        self.send(request, false).await
    }

    /// Sends a training pass like [`submit`](Self::submit), in the encoding that the server
    /// accepts.
    ///
    /// # Errors
    /// Like [`submit`](Self::submit).
    ///
    /// # Cancel safety
    /// Like [`submit`](Self::submit).
    pub(crate) async fn submit_pass(
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

    /// Waits for the result of a request that the server accepted from this process or an earlier
    /// one.
    ///
    /// Polls that get no response are repeated according to the client's retry policy.
    ///
    /// # Errors
    /// If the request failed, or the server no longer has the request.
    ///
    /// # Cancel safety
    /// Cancel safe: the result can be fetched by a later call.
    pub(crate) async fn result<S: SubmitRequest>(&self, id: &RequestId) -> Result<S::Output> {
        let submitted = Submitted {
            response: SubmitResponse::new(id.clone()),
            request_type: "request",
            submit_duration: Duration::ZERO,
            call_start: Instant::now(),
            attempts: 1,
        };
        Poller::new(&self.session, &self.log).result::<S>(&submitted).await
    }

    /// Waits for the result of a training pass, like [`result`](Self::result). A legacy server
    /// reports no total loss; this method computes it from the losses of the tokens.
    ///
    /// # Errors
    /// Like [`result`](Self::result).
    ///
    /// # Cancel safety
    /// Like [`result`](Self::result).
    pub(crate) async fn pass_result(&self, id: &RequestId) -> Result<ForwardBackwardOutput> {
        let mut output = self.result::<ForwardBackward>(id).await?;
        if !output.metrics.contains_key("loss:sum")
            && let Some(loss) = token_loss(&output.loss_fn_outputs)
        {
            output.metrics.insert("loss:sum".to_owned(), loss);
        }
        Ok(output)
    }

    /// Creates a client that samples in this session from the checkpoint with the path `path` on
    /// the server, or from the base model if `path` is `None`.
    ///
    /// # Errors
    /// If the server does not accept the weights.
    pub(crate) async fn sampling_client(
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
    /// [`ErrorKind::NotFound`](tinkex::ErrorKind::NotFound) if the server does not have the
    /// session; an error with status 410 if the session has ended; any other error if the server
    /// cannot be reached or fails.
    pub(crate) async fn check(&self) -> Result<()> {
        let heartbeat = SessionHeartbeat::new(self.id().clone());
        self.session.transport().send(&heartbeat, &RequestOptions::default()).await.map(drop)
    }

    /// Returns whether the server implements the current protocol. Legacy servers (SkyRL, TuFT)
    /// have no dynamic configuration.
    pub(crate) fn has_current_protocol(&self) -> bool {
        self.session.connection().has_dynamic_config()
    }

    /// Ends the session on the server.
    pub(crate) async fn finish(&self) {
        self.session.close(FinishReason::Success, None).await;
    }

    /// Stops the heartbeats without ending the session, so that another process can
    /// [`adopt`](Self::adopt) the session.
    pub(crate) async fn leave(&self) {
        self.session.leave().await;
    }
}
