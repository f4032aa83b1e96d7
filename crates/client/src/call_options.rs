//! [`CallOptions`]: retry policy and time limits of single calls.

use std::time::Duration;

use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::settings::ClientSettings;
use crate::transport::RequestOptions;
use crate::transport::retry_policy::RetryPolicy;

/// Retry policy and time limits of the calls of one client value.
///
/// Every client has a method `with_options` that returns a clone with these options. The clone
/// shares everything else with the original: connection, session, call order and limits. Options
/// that are not set keep the values of the [`ServiceClientBuilder`](crate::ServiceClientBuilder).
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// use std::time::Duration;
/// use tinkex::{CallOptions, RetryPolicy};
///
/// let quick = CallOptions::new().retry(RetryPolicy::disabled()).timeout(Duration::from_secs(5));
/// let capabilities = service.with_options(quick).server_capabilities().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "options have no effect until they are passed to a client"]
pub struct CallOptions {
    retry: Option<RetryPolicy>,
    timeout: Option<Duration>,
    poll_timeout: Option<Duration>,
}

impl CallOptions {
    /// Creates options that change nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how often and how long the requests of a call are repeated after failures.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// Sets the maximum duration of a call, from its start to its result, with all waits and
    /// retries. Unlimited by default.
    ///
    /// A sample that takes longer is cancelled. A training request that takes longer continues: see
    /// [`ApiFuture::timeout`](crate::ApiFuture::timeout).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the maximum time to wait for the result of a request once the server has accepted it.
    /// Unlimited by default.
    pub fn poll_timeout(mut self, timeout: Duration) -> Self {
        self.poll_timeout = Some(timeout);
        self
    }

    /// Returns the maximum duration of a call.
    pub(crate) fn call_limit(&self) -> Option<Duration> {
        self.timeout
    }

    /// Returns the retry policy: the one of these options, else that of the client.
    pub(crate) fn retry_policy<'a>(&'a self, settings: &'a ClientSettings) -> &'a RetryPolicy {
        self.retry.as_ref().unwrap_or(&settings.retry)
    }

    /// Returns the maximum time to wait for a result: the one of these options, else the client's.
    pub(crate) fn poll_limit(&self, settings: &ClientSettings) -> Option<Duration> {
        self.poll_timeout.or(settings.poll_timeout)
    }

    /// Returns request options with the retry policy.
    pub(crate) fn request_options(&self) -> RequestOptions {
        RequestOptions { retry: self.retry, ..RequestOptions::default() }
    }

    /// Runs a call that has no effect on the server after its future is dropped, within the maximum
    /// duration.
    ///
    /// # Errors
    /// An error of kind [`Timeout`](crate::ErrorKind::Timeout) if the duration is over, else that
    /// of `call`.
    pub(crate) async fn limit<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        match self.timeout {
            None => call.await,
            Some(limit) => match timeout(limit, call).await {
                Ok(result) => result,
                Err(_) => Err(Error::call_deadline(limit)),
            },
        }
    }
}
