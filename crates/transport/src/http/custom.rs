//! [`CustomHttp`]: the caller's own [`HttpService`].

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, TryFutureExt as _};
use futures_util::stream::StreamExt as _;
use http::{Request, Response};

use crate::error::panic_message;

use super::upload::UploadFile;
use super::{HttpFailure, HttpFailureKind, HttpService, Lane, ResponseBody};
use crate::retry::backoff_registry::BackoffRegistry;

/// HTTP service that the caller passed to a builder, and the backoffs of the clients that use the
/// service.
///
/// A custom service is often a fake for tests. Two fakes with the same URL and key are different
/// servers, so a 429 of one fake must not delay requests to the other.
#[derive(Clone)]
pub struct CustomHttp {
    /// The service, wrapped so that a panic becomes a failure of kind
    /// [`HttpFailureKind::Panicked`].
    pub service: Arc<dyn HttpService>,
    /// Backoffs of the clients that use the service.
    pub backoffs: Arc<BackoffRegistry>,
}

impl fmt::Debug for CustomHttp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CustomHttp")
    }
}

impl CustomHttp {
    /// Wraps `service`, with backoffs of its own.
    pub fn new(service: impl HttpService) -> Self {
        Self { service: CatchPanics::wrap(service), backoffs: Arc::default() }
    }
}

/// Converts panics of a service to failures of kind [`HttpFailureKind::Panicked`]. Otherwise a
/// panic would end the background task of the client that sent the request.
pub struct CatchPanics<S>(S);

impl<S> fmt::Debug for CatchPanics<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CatchPanics")
    }
}

impl<S: HttpService> CatchPanics<S> {
    /// Wraps `service`.
    pub fn wrap(service: S) -> Arc<dyn HttpService> {
        Arc::new(Self(service))
    }
}

impl<S: HttpService> HttpService for CatchPanics<S> {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        // `send` itself may panic, not only the future that it returns: call it inside the block.
        Box::pin(catching_panics(async move { self.0.send(lane, request, timeout).await }))
    }

    fn send_upload(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        file: UploadFile,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let sent = async move { self.0.send_upload(lane, request, file, timeout).await };
        Box::pin(catching_panics(sent))
    }

    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        let sent = async move { self.0.send_streaming(lane, request, timeout).await };
        let with_body = |response: Response<ResponseBody>| response.map(catching_body_panics);
        Box::pin(catching_panics(sent).map_ok(with_body))
    }
}

fn catching_panics<T>(
    sent: impl Future<Output = Result<T, HttpFailure>>,
) -> impl Future<Output = Result<T, HttpFailure>> {
    AssertUnwindSafe(sent).catch_unwind().map(or_failure)
}

fn catching_body_panics(body: ResponseBody) -> ResponseBody {
    let parts = AssertUnwindSafe(body).catch_unwind();
    ResponseBody::new(parts.map(or_failure))
}

/// Converts a panic to a failure.
fn or_failure<T>(outcome: thread::Result<Result<T, HttpFailure>>) -> Result<T, HttpFailure> {
    outcome.unwrap_or_else(|payload| {
        Err(HttpFailure::new(HttpFailureKind::Panicked, panic_message(&*payload)))
    })
}
