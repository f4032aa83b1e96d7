//! [`RestClient`] and [`AdminClient`]: requests whose result is in the response itself.

mod admin;
mod checkpoint;
#[cfg(feature = "export")]
mod import;
mod key;
mod page;
mod run;
mod session;

use ::http::HeaderMap;
use tinkex_wire::{ApiRequest, header as wire_header};

use crate::call_options::ApplyOptions as _;
use crate::error::Result;
use crate::future::RequestFuture;
use crate::service::ServiceClient;
use crate::transport::CallOptions;
use crate::transport::RequestOptions;
use crate::transport::request::header;

pub use admin::AdminClient;
pub use checkpoint::CopyCheckpoint;
#[cfg(feature = "export")]
pub use import::AdapterImport;

/// Client for training runs, checkpoints and sessions; made by [`ServiceClient::rest`]. Cheap to
/// clone.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// use futures_util::TryStreamExt;
///
/// let rest = service.rest();
/// let mut runs = std::pin::pin!(rest.training_runs(Default::default()));
/// while let Some(run) = runs.try_next().await? {
///     println!("{} of {}", run.training_run_id, run.base_model);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RestClient {
    service: ServiceClient,
}

impl RestClient {
    pub(crate) fn new(service: ServiceClient) -> Self {
        Self { service }
    }

    /// Returns a client whose calls have these options.
    #[must_use]
    pub fn with_options(&self, options: CallOptions) -> Self {
        Self { service: self.service.with_options(options) }
    }

    pub(crate) fn service(&self) -> &ServiceClient {
        &self.service
    }

    /// Starts a request; see [`start`].
    fn call<R>(&self, method: &'static str, request: R) -> RequestFuture<R::Response>
    where
        R: ApiRequest<Response: Send> + Send + Sync + 'static,
    {
        start(&self.service, method, request)
    }

    /// Starts a request, unless its arguments are invalid.
    fn try_call<R>(&self, method: &'static str, request: Result<R>) -> RequestFuture<R::Response>
    where
        R: ApiRequest<Response: Send> + Send + Sync + 'static,
    {
        match request {
            Ok(request) => self.call(method, request),
            Err(error) => RequestFuture::failed(error),
        }
    }
}

/// Starts a request. `method` names the SDK method in a header, as the Python SDK does.
fn start<R>(service: &ServiceClient, method: &'static str, request: R) -> RequestFuture<R::Response>
where
    R: ApiRequest<Response: Send> + Send + Sync + 'static,
{
    let headers = method_headers(method);
    let options = RequestOptions { headers, ..service.options().request_options() };
    let sender = service.clone();
    service.start(async move { send(&sender, &request, &options).await })
}

/// Sends a request.
async fn send<R: ApiRequest>(
    service: &ServiceClient,
    request: &R,
    options: &RequestOptions,
) -> Result<R::Response> {
    let connection = service.connection().await?;
    connection.record_failure(connection.transport().send(request, options).await)
}

fn method_headers(method: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    header::put(&mut headers, wire_header::SDK_VERSION, tinkex_wire::SDK_VERSION);
    header::put(&mut headers, wire_header::SDK_METHOD, method);
    headers
}
