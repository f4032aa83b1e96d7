//! What a request type knows about its own call.
//!
//! [`ApiRequest`] ties a request to its route and its reply, [`SubmitRequest`] adds the result that comes later.
//! A client needs nothing else to send any of them; a server reads the same types.

use bytes::Bytes;
use serde::Serialize;

use crate::codec::json;
use crate::future::{ResultPayload, SubmitResponse};
use crate::route::Route;
use crate::{DecodeError, InvalidInput};

/// The content type of JSON bodies.
pub const JSON: &str = "application/json";
/// The content type of protobuf bodies.
pub const PROTO: &str = "application/x-protobuf";

/// One call of the API: what to send, and what comes back at once.
pub trait ApiRequest {
    /// What the server answers with.
    type Response: ApiResponse;

    /// The endpoint.
    const ROUTE: Route;

    /// Refuses a request that the server could not understand.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    fn validate(&self) -> Result<(), InvalidInput> {
        Ok(())
    }

    /// The path parameters, in the order of the route's template.
    fn params(&self) -> Vec<&str> {
        Vec::new()
    }

    /// The query, without its `?`; empty for none.
    ///
    /// # Errors
    /// If a value cannot be written as a query.
    fn query(&self) -> Result<String, InvalidInput> {
        Ok(String::new())
    }

    /// The body.
    ///
    /// # Errors
    /// If [`ApiRequest::validate`] does not pass.
    fn body(&self) -> Result<RequestBody, InvalidInput>;

    /// Path and query.
    ///
    /// # Errors
    /// If a path parameter cannot stand in a URL.
    fn target(&self) -> Result<String, InvalidInput> {
        let mut target = Self::ROUTE.path(&self.params())?;
        let query = self.query()?;
        if !query.is_empty() {
            target.push('?');
            target.push_str(&query);
        }
        Ok(target)
    }
}

/// A call that is answered with a [`SubmitResponse`]: its result is polled for.
pub trait SubmitRequest: ApiRequest<Response = SubmitResponse> {
    /// The result.
    type Output;

    /// What the poll says it is waiting for.
    fn request_type(&self) -> &'static str;

    /// Whether the result may come as protobuf.
    const PROTO_OUTPUT: bool = false;

    /// Reads the result.
    ///
    /// # Errors
    /// If the bytes are not such a result.
    fn decode_output(payload: &ResultPayload) -> Result<Self::Output, DecodeError>;
}

/// Something the server answers with at once.
pub trait ApiResponse: Sized {
    /// Reads it from a successful reply's body.
    ///
    /// # Errors
    /// If the bytes are not such a reply.
    fn from_body(body: &Bytes) -> Result<Self, DecodeError>;
}

/// A reply that nobody looks at.
impl ApiResponse for () {
    fn from_body(_: &Bytes) -> Result<Self, DecodeError> {
        Ok(())
    }
}

/// A request body, encoded once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestBody {
    /// None.
    Empty,
    /// JSON.
    Json(Bytes),
    /// Protobuf.
    Proto(Bytes),
}

impl RequestBody {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Empty => Bytes::new(),
            Self::Json(bytes) | Self::Proto(bytes) => bytes.clone(),
        }
    }

    /// The content type to send.
    #[must_use]
    pub const fn content_type(&self) -> &'static str {
        match self {
            Self::Empty | Self::Json(_) => JSON,
            Self::Proto(_) => PROTO,
        }
    }
}

/// The body of a call that is checked and sent as JSON.
pub(crate) fn json_body<T: ApiRequest + Serialize>(call: &T) -> Result<RequestBody, InvalidInput> {
    call.validate()?;
    Ok(RequestBody::Json(json::encode(call)?))
}

/// Implements [`ApiResponse`] for types that are plain JSON, with the `type` tag they must not
/// contradict.
macro_rules! json_response {
    ($($type:ty $(= $tag:literal)?),* $(,)?) => {$(
        impl $crate::request::ApiResponse for $type {
            fn from_body(body: &bytes::Bytes) -> Result<Self, $crate::DecodeError> {
                $($crate::codec::json::expect_tag(body, $tag)?;)?
                $crate::codec::json::decode(body)
            }
        }
    )*};
}

/// Implements [`ApiRequest`] for a request that is a JSON body and nothing else.
macro_rules! json_request {
    ($($type:ty: $route:ident => $reply:ty $(, check $check:path)?;)*) => {$(
        impl $crate::request::ApiRequest for $type {
            type Response = $reply;
            const ROUTE: $crate::Route = $crate::Route::$route;

            $(fn validate(&self) -> Result<(), $crate::InvalidInput> {
                $check(self)
            })?

            fn body(&self) -> Result<$crate::RequestBody, $crate::InvalidInput> {
                $crate::request::json_body(self)
            }
        }
    )*};
}

/// Implements [`SubmitRequest`] for a result that is plain JSON.
macro_rules! json_output {
    ($($type:ty: $request_type:literal => $output:ty $(= $tag:literal)?;)*) => {$(
        impl $crate::request::SubmitRequest for $type {
            type Output = $output;

            fn request_type(&self) -> &'static str {
                $request_type
            }

            fn decode_output(payload: &$crate::ResultPayload) -> Result<$output, $crate::DecodeError> {
                let body = payload.json()?;
                $($crate::codec::json::expect_tag(body, $tag)?;)?
                $crate::codec::json::decode(body)
            }
        }
    )*};
}

/// Implements [`ApiRequest`] for a call without a body: path parameters and a query struct.
macro_rules! bare_request {
    ($($type:ty: $route:ident => $reply:ty, |$call:ident| params [$($param:expr),*] $(, query $query:expr)?;)*) => {$(
        impl $crate::request::ApiRequest for $type {
            type Response = $reply;
            const ROUTE: $crate::Route = $crate::Route::$route;

            fn params(&self) -> Vec<&str> {
                let $call = self;
                let _ = $call;
                vec![$($param),*]
            }

            $(fn query(&self) -> Result<String, $crate::InvalidInput> {
                let $call = self;
                $crate::codec::query::encode($query)
            })?

            fn body(&self) -> Result<$crate::RequestBody, $crate::InvalidInput> {
                Ok($crate::RequestBody::Empty)
            }
        }
    )*};
}

pub(crate) use {bare_request, json_output, json_request, json_response};
