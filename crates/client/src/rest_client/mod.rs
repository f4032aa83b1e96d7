//! Looking things up and tidying: plain calls, each one request and one reply.

mod admin;
mod checkpoint;
mod key;
mod page;
mod run;
mod session;

use ::http::HeaderMap;
use tinkex_wire::{ApiRequest, header as wire_header};

use crate::error::Result;
use crate::service::ServiceClient;
use crate::transport::{RequestOptions, header};

pub use admin::AdminClient;
pub use checkpoint::CopyCheckpoint;

/// Looks things up and tidies: runs, checkpoints, sessions.
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

    pub(crate) fn service(&self) -> &ServiceClient {
        &self.service
    }

    async fn call<C: ApiRequest>(&self, method: &'static str, call: &C) -> Result<C::Response> {
        send(&self.service, method, call).await
    }
}

/// Makes a call under the name of the method that was called, as the service likes to know.
async fn send<C: ApiRequest>(
    service: &ServiceClient,
    method: &'static str,
    call: &C,
) -> Result<C::Response> {
    let options = RequestOptions { headers: named(method), ..RequestOptions::default() };
    let connection = service.connection().await?;
    connection.record_failure(connection.transport().send(call, &options).await)
}

fn named(method: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    header::put(&mut headers, wire_header::SDK_VERSION, tinkex_wire::SDK_VERSION);
    header::put(&mut headers, wire_header::SDK_METHOD, method);
    headers
}
