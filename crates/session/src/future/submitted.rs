//! [`Submitted`]: a request that the server has accepted.

use std::time::Duration;

use tinkex_wire::{SubmitRequest, SubmitResponse};
use tokio::time::Instant;

use crate::error::Result;
use crate::session::Session;
use crate::transport::RequestOptions;
use crate::transport::http::Lane;
use crate::transport::retry::call_progress::CallProgress;

/// Request that the server has accepted.
#[derive(Clone, Debug)]
pub struct Submitted {
    /// Acknowledgement of the server.
    pub response: SubmitResponse,
    /// Type of the request, for logs and headers, for example `Sample`.
    pub request_type: &'static str,
    /// Time from the start of the submission until the server accepted the request. The first poll
    /// reports it to the server.
    pub submit_duration: Duration,
    /// When the call started.
    pub call_start: Instant,
    /// Number of times the request was sent.
    pub attempts: u32,
}

impl Submitted {
    /// Sends a request and measures how long the server takes to accept it.
    ///
    /// # Errors
    /// If the server does not accept the request.
    pub async fn send<S: SubmitRequest>(
        session: &Session,
        request: &S,
        options: &RequestOptions,
    ) -> Result<Self> {
        let start = Instant::now();
        let mut call = CallProgress::new();
        let transport = session.transport();
        let response = transport.send_in_call(request, options, &mut call).await;
        transport.retry_log().ended(&call, Lane::Train, &response);
        Ok(Self::new(response?, request, start, &call))
    }

    /// Creates the record of a request that the server accepted in `call`. `start` is the time at
    /// which the submission started; the submission ends now.
    pub fn new<S: SubmitRequest>(
        response: SubmitResponse,
        request: &S,
        start: Instant,
        call: &CallProgress,
    ) -> Self {
        Self {
            response,
            request_type: request.request_type(),
            submit_duration: start.elapsed(),
            call_start: call.start(),
            attempts: call.attempts(),
        }
    }
}
