//! [`ChunkRequest`]: the request of one chunk, as protobuf or JSON.

use tinkex_wire::{
    ApiRequest, DecodeError, ForwardBackward, ForwardBackwardOutput, InvalidInput,
    JsonForwardBackward, RequestBody, ResultPayload, Route, Seq, SubmitRequest, SubmitResponse,
};

use crate::validated::Numbered;

/// Request for one chunk, in an encoding that the server reads.
pub(super) enum ChunkRequest {
    Proto(ForwardBackward),
    /// For servers of the first protocol, which have no protobuf.
    Json(ForwardBackward),
}

impl ApiRequest for ChunkRequest {
    type Response = SubmitResponse;
    const ROUTE: Route = ForwardBackward::ROUTE;

    fn validate(&self) -> Result<(), InvalidInput> {
        match self {
            Self::Proto(request) => request.validate(),
            Self::Json(request) => JsonForwardBackward(request).validate(),
        }
    }

    fn target(&self) -> Result<String, InvalidInput> {
        match self {
            Self::Proto(request) => request.target(),
            Self::Json(request) => JsonForwardBackward(request).target(),
        }
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        match self {
            Self::Proto(request) => request.encode_body(),
            Self::Json(request) => JsonForwardBackward(request).encode_body(),
        }
    }
}

impl SubmitRequest for ChunkRequest {
    type Output = ForwardBackwardOutput;
    const PROTO_OUTPUT: bool = ForwardBackward::PROTO_OUTPUT;

    fn request_type(&self) -> &'static str {
        match self {
            Self::Proto(request) | Self::Json(request) => request.request_type(),
        }
    }

    fn decode_output(payload: &ResultPayload) -> Result<Self::Output, DecodeError> {
        ForwardBackward::decode_output(payload)
    }
}

impl Numbered for ChunkRequest {
    fn set_seq(&mut self, seq: Seq) {
        match self {
            Self::Proto(request) | Self::Json(request) => request.seq_id = Some(seq),
        }
    }
}
