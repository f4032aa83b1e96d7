//! Sends training passes in the encoding that the server accepts: protobuf or JSON.
//!
//! Servers of the current protocol accept protobuf only, and servers of the first protocol version
//! accept JSON only. No setting reports the version, only the response to a pass. The first pass of
//! a connection therefore determines the encoding of all later passes:
//!
//! * A server with a dynamic configuration is sent protobuf. If it refuses the encoding, the pass
//!   is sent once more, as JSON.
//! * A server without a dynamic configuration (SkyRL, TuFT) is first sent an empty pass as
//!   protobuf. Servers of both versions reject the empty pass, with different errors. The real pass
//!   cannot be used for this: SkyRL 0.3.0 responds to protobuf with 500 if the bytes are not UTF-8,
//!   and a 500 would be retried.
//!
//! No pass is trained twice: a pass is repeated in JSON only if the server refused it in protobuf.

use bytes::Bytes;
use tinkex_wire::{
    ApiRequest, ForwardBackward, InvalidInput, JsonForwardBackward, RequestBody, Route,
    SubmitRequest, SubmitResponse,
};

use crate::call_options::ApplyOptions as _;
use crate::connection::PassEncoding;
use crate::error::{Error, Result};
use crate::future::Submitted;
use crate::session::Session;
use crate::transport::RequestOptions;

use super::TrainingShared;
use super::datum_index::DatumIndices as _;
use super::forward_backward::ChunkRequest;

/// Training pass without model, data or loss, which every server rejects.
struct EmptyPass;

impl ApiRequest for EmptyPass {
    type Response = SubmitResponse;
    const ROUTE: Route = ForwardBackward::ROUTE;

    fn encode_body(&self) -> std::result::Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Proto(Bytes::new()))
    }
}

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

/// Sends an empty pass to determine the encoding that the server accepts. Sends nothing if the
/// encoding is known or the server has a dynamic configuration: then the first real pass determines
/// the encoding.
pub(crate) async fn probe_pass_encoding(session: &Session, options: &RequestOptions) -> Result<()> {
    let connection = session.connection();
    if connection.pass_encoding().is_some() || connection.has_dynamic_config() {
        return Ok(());
    }
    match session.transport().send(&EmptyPass, options).await {
        Err(error) if refuses_proto(&error) => connection.set_pass_encoding(PassEncoding::Json),
        // The server read the protobuf and rejected the pass for its content.
        Ok(_) => connection.set_pass_encoding(PassEncoding::Proto),
        Err(error) if matches!(error.status(), Some(400 | 404 | 422)) => {
            connection.set_pass_encoding(PassEncoding::Proto);
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Checks that all chunks can be encoded as JSON.
pub(super) fn validate_json(batch: &[ChunkRequest]) -> Result<()> {
    batch.iter().try_for_each(|chunk| {
        let valid = JsonForwardBackward(chunk.request.get()).validate();
        valid.map_err(|error| Error::from(error).in_datums(&chunk.datums))
    })
}

/// Returns whether the server refused the encoding, rather than the content, of a protobuf pass.
fn refuses_proto(error: &Error) -> bool {
    error.status() == Some(415) || error.is_missing_endpoint() || is_unreadable_body(error)
}

/// Returns whether the server refused the encoding of a JSON pass. A server of the current protocol
/// lacks the endpoint for passes without gradient that JSON requests use.
fn refuses_json(error: &Error) -> bool {
    error.status() == Some(415) || error.is_missing_endpoint()
}

/// Returns whether a server that expects JSON could not parse the body at all. In the validation
/// errors of such a server, `loc` is the path of the invalid value; the path `["body"]` refers to
/// the whole body.
fn is_unreadable_body(error: &Error) -> bool {
    let body = error.body().filter(|_| error.status() == Some(422));
    let Some(Ok(body)) = body.map(serde_json::from_str::<serde_json::Value>) else { return false };
    let faults = body["detail"].as_array().map(Vec::as_slice).unwrap_or_default();
    faults.iter().any(|fault| fault["loc"].as_array().is_some_and(|path| path == &["body"]))
}
