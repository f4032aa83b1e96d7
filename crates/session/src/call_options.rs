//! Applies [`CallOptions`] to the calls of a client.

use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::transport::{CallOptions, RequestOptions};

/// Applies [`CallOptions`] to a request or to a whole call.
pub trait ApplyOptions {
    /// Returns request options that carry these call options.
    fn request_options(&self) -> RequestOptions;

    /// Runs `call` within the maximum duration of these options. Dropping `call` must be safe: when
    /// the duration is over, its future is dropped.
    ///
    /// # Errors
    /// An error of kind [`Timeout`](tinkex_transport::ErrorKind::Timeout) if `call` takes longer
    /// than the maximum duration, else the error of `call`.
    fn limit<T>(
        &self,
        call: impl Future<Output = Result<T>> + Send,
    ) -> impl Future<Output = Result<T>> + Send;
}

impl ApplyOptions for CallOptions {
    fn request_options(&self) -> RequestOptions {
        RequestOptions { call: Some(*self), ..RequestOptions::default() }
    }

    async fn limit<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        match self.call_limit() {
            None => call.await,
            Some(limit) => match timeout(limit, call).await {
                Ok(result) => result,
                Err(_) => Err(Error::call_deadline(limit)),
            },
        }
    }
}
