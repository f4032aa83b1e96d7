//! Determines the encoding of training passes that a server accepts: protobuf or JSON.
//!
//! Servers of the current protocol accept protobuf only, and servers of the first protocol version
//! accept JSON only. The server's configuration does not contain the version; only the response to
//! a pass shows it. The first pass of a connection therefore determines the encoding of all later
//! passes:
//!
//! * A server with a dynamic configuration is sent protobuf. If the server
//!   [refuses](refuses_proto) the encoding, the sender may repeat the pass as JSON.
//! * A server without a dynamic configuration (SkyRL, TuFT) is first sent an empty pass as
//!   protobuf, by [`probe_pass_encoding`]. Servers of both versions reject the empty pass, with
//!   different errors. The real pass cannot serve as the probe: SkyRL 0.3.0 responds to protobuf
//!   with 500 if the bytes are not UTF-8, and the transport would retry after a 500.

use bytes::Bytes;
use tinkex_wire::{ApiRequest, ForwardBackward, InvalidInput, RequestBody, Route, SubmitResponse};

use crate::connection::PassEncoding;
use crate::error::{Error, Result};
use crate::session::Session;
use crate::transport::RequestOptions;

/// Training pass without model, data or loss, which every server rejects.
struct EmptyPass;

impl ApiRequest for EmptyPass {
    type Response = SubmitResponse;
    const ROUTE: Route = ForwardBackward::ROUTE;

    fn encode_body(&self) -> std::result::Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Proto(Bytes::new()))
    }
}

/// Sends an empty pass to determine the encoding that the server accepts.
///
/// Sends nothing if the encoding is known, or if the server has a dynamic configuration. In the
/// latter case the first real pass determines the encoding.
///
/// # Errors
/// If the server cannot be reached, or its response does not show which encoding it accepts.
pub async fn probe_pass_encoding(session: &Session, options: &RequestOptions) -> Result<()> {
    let connection = session.connection();
    if connection.pass_encoding().is_some() || connection.has_dynamic_config() {
        return Ok(());
    }
    match session.transport().send(&EmptyPass, options).await {
        Err(error) if refuses_proto(&error) => connection.set_pass_encoding(PassEncoding::Json),
        // The server could read the protobuf: it accepted the pass, or rejected its content.
        Ok(_) => connection.set_pass_encoding(PassEncoding::Proto),
        Err(error) if matches!(error.status(), Some(400 | 404 | 422)) => {
            connection.set_pass_encoding(PassEncoding::Proto);
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Returns whether the server refused the encoding, rather than the content, of a protobuf pass.
#[must_use]
pub fn refuses_proto(error: &Error) -> bool {
    error.status() == Some(415) || error.is_missing_endpoint() || is_unreadable_body(error)
}

/// Returns whether `error` comes from a server that expects JSON and could not parse the body at
/// all. In the validation errors of such a server, `loc` is the path of the invalid value; the path
/// `["body"]` refers to the whole body.
fn is_unreadable_body(error: &Error) -> bool {
    let body = error.body().filter(|_| error.status() == Some(422));
    let Some(Ok(body)) = body.map(serde_json::from_str::<serde_json::Value>) else { return false };
    let faults = body["detail"].as_array().map(Vec::as_slice).unwrap_or_default();
    faults.iter().any(|fault| fault["loc"].as_array().is_some_and(|path| path == &["body"]))
}
