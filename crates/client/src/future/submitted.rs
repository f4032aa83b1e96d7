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
pub(crate) struct Submitted {
    pub(crate) response: SubmitResponse,
    pub(crate) request_type: &'static str,
    /// Time that submitting the request took. Reported to the server with the first poll.
    pub(crate) submit_duration: Duration,
    /// When the call started.
    pub(crate) call_start: Instant,
    /// Number of times the request was sent.
    pub(crate) attempts: u32,
}

impl Submitted {
    /// Sends a request and measures how long the server takes to accept it.
    pub(crate) async fn send<S: SubmitRequest>(
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

    /// Creates the record of a request that the server accepted in `call`. `start` is when its
    /// submission started.
    pub(crate) fn new<S: SubmitRequest>(
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
