//! Sends training passes in the encoding that the server accepts: protobuf or JSON.
//!
//! [`tinkex_session::pass_encoding`] determines the encoding. If a server with a dynamic
//! configuration refuses the first pass in protobuf, the pass is sent once more, as JSON. No pass is
//! trained twice: a pass is repeated in JSON only if the server refused it in protobuf.

use tinkex_session::pass_encoding::{probe_pass_encoding, refuses_proto};
use tinkex_wire::{ApiRequest as _, JsonForwardBackward, SubmitRequest};

use crate::call_options::ApplyOptions as _;
use crate::connection::PassEncoding;
use crate::error::{Error, Result};
use crate::future::Submitted;
use crate::transport::RequestOptions;

use super::TrainingShared;
use super::datum_index::DatumIndices as _;
use super::forward_backward::ChunkRequest;

impl TrainingShared {
    /// Determines the encoding that the server accepts, if [`probe_pass_encoding`] has to send an
    /// empty pass for this server, and checks that `batch` can be encoded.
    pub(super) async fn choose_pass_encoding(&self, batch: &[ChunkRequest]) -> Result<()> {
        let connection = self.session.connection();
        let known = connection.pass_encoding().is_some();
        probe_pass_encoding(&self.session, &self.options.request_options()).await?;
        if !known && connection.pass_encoding() == Some(PassEncoding::Json) {
            validate_json(batch)?;
        }
        Ok(())
    }

    /// Sends one chunk of `batch`.
    pub(super) async fn submit_chunk(
        &self,
        chunk: &ChunkRequest,
        batch: &[ChunkRequest],
    ) -> Result<Submitted> {
        let _permit = self.session.upload_budget().acquire(chunk.bytes).await;
        let connection = self.session.connection();
        if connection.pass_encoding() == Some(PassEncoding::Json) {
            return self.submit_json(chunk).await;
        }
        let refusal = match self.submit_proto(chunk).await {
            Err(error) if connection.pass_encoding().is_none() && refuses_proto(&error) => error,
            submitted => return submitted,
        };
        // Check all chunks before the first one is sent as JSON, so that the server does not
        // accumulate the gradients of a part of the batch.
        validate_json(batch)?;
        match self.submit_json(chunk).await {
            // The server accepts neither encoding of this pass.
            Err(error) if refuses_json(&error) => Err(refusal),
            submitted => submitted,
        }
    }

    async fn submit_proto(&self, chunk: &ChunkRequest) -> Result<Submitted> {
        let compress = self.session.config().proto_compress_fwdbwd;
        let options = RequestOptions { compress, ..self.options.request_options() };
        self.submit_encoded(&chunk.request, PassEncoding::Proto, chunk, options).await
    }

    async fn submit_json(&self, chunk: &ChunkRequest) -> Result<Submitted> {
        let request = JsonForwardBackward(chunk.request.get());
        self.submit_encoded(&request, PassEncoding::Json, chunk, self.options.request_options())
            .await
    }

    /// Sends `request`, the encoded `chunk`, and records its encoding if the server accepts it.
    async fn submit_encoded(
        &self,
        request: &impl SubmitRequest,
        encoding: PassEncoding,
        chunk: &ChunkRequest,
        options: RequestOptions,
    ) -> Result<Submitted> {
        let options = RequestOptions { sent: Some(chunk.sent.clone()), ..options };
        let submitted = self.submit(request, &options).await;
        let submitted = submitted.map_err(|error| error.in_datums(&chunk.datums))?;
        self.session.connection().set_pass_encoding(encoding);
        Ok(submitted)
    }
}

/// Checks that all chunks can be encoded as JSON.
pub(super) fn validate_json(batch: &[ChunkRequest]) -> Result<()> {
    batch.iter().try_for_each(|chunk| {
        let valid = JsonForwardBackward(chunk.request.get()).validate();
        valid.map_err(|error| Error::from(error).in_datums(&chunk.datums))
    })
}

/// Returns whether the server refused the encoding of a JSON pass. A server of the current protocol
/// lacks the endpoint for passes without gradient that JSON requests use.
fn refuses_json(error: &Error) -> bool {
    error.status() == Some(415) || error.is_missing_endpoint()
}
