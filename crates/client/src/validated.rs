//! [`Validated`]: a request that was validated when the caller made it.
//!
//! Training and sampling requests are validated inside the call, so that invalid input fails at
//! once and is never queued. They are encoded later, by another task. The type records that
//! validation has succeeded, so that the encoder does not validate megabytes of examples a second
//! time.

use tinkex_wire::{
    ApiRequest, DecodeError, ForwardBackward, InvalidInput, OptimStep, RequestBody, ResultPayload,
    Route, SampleRequest, Seq, SubmitRequest,
};

/// Request that passed [`ApiRequest::validate`].
///
/// [`ApiRequest::validate`] of this type always succeeds, so that sending the request only encodes
/// it.
#[derive(Clone, Debug)]
pub(crate) struct Validated<R>(R);

/// Request whose sequence number is assigned after validation.
///
/// The sequence number must not affect the validity of the request, because the request is not
/// validated again after the number is set.
pub(crate) trait Numbered {
    fn set_seq(&mut self, seq: Seq);
}

impl<R: ApiRequest> Validated<R> {
    /// Validates `request`.
    ///
    /// # Errors
    /// Returns the error of [`ApiRequest::validate`].
    pub(crate) fn new(request: R) -> Result<Self, InvalidInput> {
        request.validate()?;
        Ok(Self(request))
    }

    pub(crate) fn get(&self) -> &R {
        &self.0
    }
}

impl<R: Numbered> Validated<R> {
    pub(crate) fn set_seq(&mut self, seq: Seq) {
        self.0.set_seq(seq);
    }
}

impl<R: ApiRequest> ApiRequest for Validated<R> {
    type Response = R::Response;
    const ROUTE: Route = R::ROUTE;

    fn params(&self) -> Vec<&str> {
        self.0.params()
    }

    fn query(&self) -> Result<String, InvalidInput> {
        self.0.query()
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        self.0.encode_body()
    }

    fn target(&self) -> Result<String, InvalidInput> {
        self.0.target()
    }
}

impl<R: SubmitRequest> SubmitRequest for Validated<R> {
    type Output = R::Output;
    const PROTO_OUTPUT: bool = R::PROTO_OUTPUT;

    fn request_type(&self) -> &'static str {
        self.0.request_type()
    }

    fn decode_output(payload: &ResultPayload) -> Result<Self::Output, DecodeError> {
        R::decode_output(payload)
    }
}

impl Numbered for ForwardBackward {
    fn set_seq(&mut self, seq: Seq) {
        self.seq_id = Some(seq);
    }
}

impl Numbered for OptimStep {
    fn set_seq(&mut self, seq: Seq) {
        self.seq_id = Some(seq);
    }
}

impl Numbered for SampleRequest {
    fn set_seq(&mut self, seq: Seq) {
        self.seq_id = Some(seq);
    }
}
