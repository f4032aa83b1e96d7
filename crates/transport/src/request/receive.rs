//! [`Receive`]: receives the body of a response, as a whole or as a stream.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt as _};
use http::{Request, Response};

use crate::http::upload::UploadFile;
use crate::http::{HttpFailure, HttpService, Lane, ResponseBody};
use crate::instrument::stats::RequestStats;
use crate::instrument::{RequestEvents, StreamEvents};

/// Maximum number of bytes to read from the body of an error response.
const MAX_ERROR_BODY: usize = 64 << 10;

/// Method by which the transport receives the body of a response.
pub(crate) trait Receive: Copy + Send {
    type Body: Send;

    /// Returns the timeout of an attempt. `default` is the timeout of the route.
    fn timeout(self, default: Duration) -> Duration;

    /// Sends a request once, with the content of `file` after the bytes of its body.
    fn send(
        self,
        http: &dyn HttpService,
        lane: Lane,
        request: Request<Bytes>,
        file: Option<UploadFile>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Self::Body>, HttpFailure>>;

    /// Records the end of a request, or makes the body of its response record it.
    fn record(
        sent: Result<Response<Self::Body>, HttpFailure>,
        events: RequestEvents<'_>,
        stats: &Arc<RequestStats>,
    ) -> Result<Response<Self::Body>, HttpFailure>;

    /// Returns the body of an error response, or the start of the body.
    fn error_body(body: &Self::Body) -> &[u8];

    /// Returns whether an error response with this status is never retried.
    fn is_final(status: u16) -> bool;
}

/// Receives the complete body. `timeout` limits the time until the complete body has arrived.
#[derive(Clone, Copy)]
pub(crate) struct WholeBody;

impl Receive for WholeBody {
    type Body = Bytes;

    fn timeout(self, default: Duration) -> Duration {
        default
    }

    fn send(
        self,
        http: &dyn HttpService,
        lane: Lane,
        request: Request<Bytes>,
        file: Option<UploadFile>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        match file {
            None => http.send(lane, request, timeout),
            Some(file) => http.send_upload(lane, request, file, timeout),
        }
    }

    fn record(
        sent: Result<Response<Bytes>, HttpFailure>,
        events: RequestEvents<'_>,
        stats: &Arc<RequestStats>,
    ) -> Result<Response<Bytes>, HttpFailure> {
        events.stop(&sent, stats);
        sent
    }

    fn error_body(body: &Bytes) -> &[u8] {
        body
    }

    fn is_final(_: u16) -> bool {
        false
    }
}

/// Receives the first part of the body and streams the rest.
///
/// A response whose body breaks before its first byte is a lost connection, which the transport
/// retries. Afterwards the stream itself reports failures, and the request is not retried: the
/// caller may have used the bytes that arrived.
#[derive(Clone, Copy)]
pub(crate) struct StreamedBody {
    /// Maximum time without new data.
    pub(crate) idle_timeout: Duration,
}

/// Body of a streamed response.
pub(crate) enum PartialBody {
    /// Start of the body of an error response.
    Error(Bytes),
    Stream(ResponseBody),
}

impl PartialBody {
    /// Records the end of a streamed body in `events`.
    fn instrumented(self, events: StreamEvents) -> Self {
        match self {
            Self::Stream(body) => Self::Stream(body.instrumented(events)),
            error @ Self::Error(_) => error,
        }
    }

    pub(crate) fn into_stream(self) -> ResponseBody {
        match self {
            Self::Error(start) => start.into(),
            Self::Stream(body) => body,
        }
    }
}

impl Receive for StreamedBody {
    type Body = PartialBody;

    fn timeout(self, _: Duration) -> Duration {
        self.idle_timeout
    }

    fn send(
        self,
        http: &dyn HttpService,
        lane: Lane,
        request: Request<Bytes>,
        file: Option<UploadFile>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<PartialBody>, HttpFailure>> {
        Box::pin(async move {
            let request = match file {
                None => request,
                Some(file) => file.append_to(request).await?,
            };
            let (head, body) = http.send_streaming(lane, request, timeout).await?.into_parts();
            let body = if head.status.is_success() {
                PartialBody::Stream(with_first_part(body).await?)
            } else {
                PartialBody::Error(start_of(body).await)
            };
            Ok(Response::from_parts(head, body))
        })
    }

    fn record(
        sent: Result<Response<PartialBody>, HttpFailure>,
        events: RequestEvents<'_>,
        stats: &Arc<RequestStats>,
    ) -> Result<Response<PartialBody>, HttpFailure> {
        match sent {
            Ok(response) if matches!(response.body(), PartialBody::Stream(_)) => {
                let events = events.response_started(response.status().as_u16(), stats);
                Ok(response.map(|body| body.instrumented(events)))
            }
            sent => {
                events.stop(&sent, stats);
                sent
            }
        }
    }

    fn error_body(body: &PartialBody) -> &[u8] {
        match body {
            PartialBody::Error(start) => start,
            PartialBody::Stream(_) => &[],
        }
    }

    /// Returns true for 501: the server does not have the endpoint, and endpoints that stream are
    /// optional. Other requests retry 501 like any other 5xx status, as the Python SDK does.
    fn is_final(status: u16) -> bool {
        status == 501
    }
}

/// Waits for the first part of a body, and returns the whole body including that part.
async fn with_first_part(mut body: ResponseBody) -> Result<ResponseBody, HttpFailure> {
    let first = body.next().await.transpose()?;
    Ok(ResponseBody::new(stream::iter(first.map(Ok)).chain(body)))
}

/// Returns at most [`MAX_ERROR_BODY`] bytes of a body. If reading fails, returns the bytes read so
/// far, because the caller reports the status of the response as the error.
async fn start_of(mut body: ResponseBody) -> Bytes {
    let mut start = BytesMut::new();
    while let Some(Ok(part)) = body.next().await {
        start.extend_from_slice(&part[..part.len().min(MAX_ERROR_BODY - start.len())]);
        if start.len() == MAX_ERROR_BODY {
            break;
        }
    }
    start.freeze()
}
