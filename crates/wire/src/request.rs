//! Traits that connect a request type to its route, its encoding and its response.
//!
//! [`ApiRequest`] describes a request and its immediate response. [`SubmitRequest`] adds the result
//! of a request that the server executes asynchronously. A client can send every request through
//! these two traits; a server decodes the same types.

use std::path::Path;

use bytes::Bytes;

use crate::future::{ResultPayload, SubmitResponse};
use crate::route::Route;
use crate::{DecodeError, InvalidInput};

/// Content type of JSON bodies.
pub const JSON: &str = "application/json";
/// Content type of protobuf bodies.
pub const PROTO: &str = "application/x-protobuf";
/// Content type of binary bodies.
const BINARY: &str = "application/octet-stream";

/// A request of the API, with its route, its encoding and the type of its response.
///
/// A request is validated once. Senders call [`body`](Self::body), which validates and encodes. A
/// sender that has already called [`validate`](Self::validate), for example to report invalid input
/// before it queues the request, calls [`encode_body`](Self::encode_body) instead. Servers call
/// `validate` after decoding.
pub trait ApiRequest {
    /// Response that the server sends immediately.
    type Response: ApiResponse;

    /// Route of the request.
    const ROUTE: Route;

    /// Checks the rules that the types do not enforce.
    ///
    /// # Errors
    /// Returns an error that names the first invalid field.
    fn validate(&self) -> Result<(), InvalidInput> {
        Ok(())
    }

    /// Returns the path parameters in the order of the route's template.
    fn params(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Returns the query string without its `?`; empty if the request has no query.
    ///
    /// # Errors
    /// Returns an error if a value has no query encoding.
    fn query(&self) -> Result<String, InvalidInput> {
        Ok(String::new())
    }

    /// Encodes the body without validating the request.
    ///
    /// The content of the body is unspecified for a request that [`validate`](Self::validate)
    /// rejects.
    ///
    /// # Errors
    /// Returns an error if a value has no encoding.
    fn encode_body(&self) -> Result<RequestBody, InvalidInput>;

    /// Returns a file whose content follows the encoded body. A sender reads it while it sends the
    /// request, so that it need not fit into memory.
    fn body_file(&self) -> Option<&Path> {
        None
    }

    /// Validates the request and encodes its body.
    ///
    /// # Errors
    /// Returns the error of [`validate`](Self::validate) or [`encode_body`](Self::encode_body).
    fn body(&self) -> Result<RequestBody, InvalidInput> {
        self.validate()?;
        self.encode_body()
    }

    /// Returns the path and query.
    ///
    /// # Errors
    /// Returns an error if a path parameter is empty, `.` or `..`, or if a query value has no
    /// encoding.
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

/// A request that the server executes asynchronously: the response is a future, and the client
/// polls for the result.
pub trait SubmitRequest: ApiRequest<Response = SubmitResponse> {
    /// Result of the request.
    type Output;

    /// Returns the name of the operation, which polls send in
    /// [`header::REQUEST_TYPE`](crate::header::REQUEST_TYPE).
    fn request_type(&self) -> &'static str;

    /// Whether the server may encode the result as protobuf.
    const PROTO_OUTPUT: bool = false;

    /// Decodes the result.
    ///
    /// # Errors
    /// Returns an error if the payload is not a valid encoding of [`Output`](Self::Output).
    fn decode_output(payload: &ResultPayload) -> Result<Self::Output, DecodeError>;
}

/// A response that the server sends immediately.
pub trait ApiResponse: Sized {
    /// Decodes the body of a successful response.
    ///
    /// # Errors
    /// Returns an error if the body is not a valid encoding of the response.
    fn from_body(body: &Bytes) -> Result<Self, DecodeError>;
}

/// Ignores the body.
impl ApiResponse for () {
    fn from_body(_: &Bytes) -> Result<Self, DecodeError> {
        Ok(())
    }
}

/// Encoded body of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestBody {
    /// No body.
    Empty,
    /// JSON body.
    Json(Bytes),
    /// Protobuf body.
    Proto(Bytes),
    /// Binary body.
    Binary(Bytes),
}

impl RequestBody {
    /// Returns the bytes; empty for [`RequestBody::Empty`].
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Empty => Bytes::new(),
            Self::Json(bytes) | Self::Proto(bytes) | Self::Binary(bytes) => bytes.clone(),
        }
    }

    /// Returns the value of the `Content-Type` header. An empty body has the type of JSON.
    #[must_use]
    pub const fn content_type(&self) -> &'static str {
        match self {
            Self::Empty | Self::Json(_) => JSON,
            Self::Proto(_) => PROTO,
            Self::Binary(_) => BINARY,
        }
    }
}

/// Implements [`ApiResponse`] for JSON responses. A response with a tag is rejected if its `type`
/// field has another value.
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

/// Implements [`ApiRequest`] for requests that consist of a JSON body.
macro_rules! json_request {
    ($($type:ty: $route:ident => $response:ty $(, validate $validate:path)?;)*) => {$(
        impl $crate::request::ApiRequest for $type {
            type Response = $response;
            const ROUTE: $crate::Route = $crate::Route::$route;

            $(fn validate(&self) -> Result<(), $crate::InvalidInput> {
                $validate(self)
            })?

            fn encode_body(&self) -> Result<$crate::RequestBody, $crate::InvalidInput> {
                Ok($crate::RequestBody::Json($crate::codec::json::encode(self)?))
            }
        }
    )*};
}

/// Implements [`SubmitRequest`] for requests whose result is JSON.
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

/// Implements [`ApiRequest`] for requests without a body, from path parameters and a query struct.
macro_rules! bare_request {
    ($($type:ty: $route:ident => $response:ty, |$request:ident| params [$($param:expr),*] $(, query $query:expr)?;)*) => {$(
        impl $crate::request::ApiRequest for $type {
            type Response = $response;
            const ROUTE: $crate::Route = $crate::Route::$route;

            fn params(&self) -> Vec<&str> {
                let $request = self;
                let _ = $request;
                vec![$($param),*]
            }

            $(fn query(&self) -> Result<String, $crate::InvalidInput> {
                let $request = self;
                $crate::codec::query::encode($query)
            })?

            fn encode_body(&self) -> Result<$crate::RequestBody, $crate::InvalidInput> {
                Ok($crate::RequestBody::Empty)
            }
        }
    )*};
}

pub(crate) use {bare_request, json_output, json_request, json_response};
