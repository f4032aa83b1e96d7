//! Encodes requests: URL, body and headers.

use std::io;
use std::path::{Path, PathBuf};

use ::http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use bytes::Bytes;
use tinkex_wire::codec::compress;
use tinkex_wire::{ApiRequest, BodyCodec, RequestBody, Route, Secret, header as wire_header};
use url::Url;

use crate::call_options::CallOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::http::upload::UploadFile;
use crate::request::header;
use crate::retry::RetryState;
use crate::retry::request_policy::RequestPolicy;
use crate::{RequestOptions, Transport};

/// Maximum number of headers that the transport adds to the default headers and to the headers of
/// the request options.
const OWN_HEADERS: usize = 9;

/// Route, target and body of a request.
///
/// The code that sends a request takes the parts instead of the request, so that the compiler
/// generates this code once and not for every type of request.
pub(crate) struct RequestParts {
    pub(crate) route: Route,
    /// Path and query.
    target: String,
    body: RequestBody,
    /// File whose content follows the body.
    file: Option<PathBuf>,
}

impl RequestParts {
    /// Validates and encodes a request.
    pub(crate) fn new<R: ApiRequest>(request: &R) -> Result<Self> {
        Ok(Self {
            route: R::ROUTE,
            target: request.target()?,
            body: request.body()?,
            file: request.body_file().map(Path::to_owned),
        })
    }
}

/// Encoded request. All attempts of a request send the same encoded request.
pub(crate) struct EncodedRequest {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) body: EncodedBody,
    pub(crate) content_type: &'static str,
    pub(crate) policy: RequestPolicy,
}

/// Encoded body of a request. The variant with a file is boxed to keep the enum small.
#[derive(Clone)]
pub(crate) enum EncodedBody {
    Bytes(Bytes),
    /// Bytes, then the content of a file.
    WithFile(Box<(Bytes, UploadFile)>),
}

impl Transport {
    /// Encodes a request once, for all its attempts: URL, compressed body and policy.
    pub(crate) async fn encode(
        &self,
        parts: RequestParts,
        options: &RequestOptions,
    ) -> Result<EncodedRequest> {
        let RequestParts { route, target, body, file } = parts;
        let uri = parse_uri(&self.base_url.join(&target))?;
        let method = match route.method() {
            tinkex_wire::Method::Get => Method::GET,
            tinkex_wire::Method::Post => Method::POST,
            tinkex_wire::Method::Put => Method::PUT,
            tinkex_wire::Method::Delete => Method::DELETE,
        };
        let mut bytes = body.bytes();
        let call_options = if options.single_attempt {
            CallOptions::without_retries()
        } else {
            options.call.unwrap_or(self.options)
        };
        let policy = call_options.apply(RequestPolicy::for_route(route));
        debug_assert!(route.body() != BodyCodec::Empty || bytes.is_empty());
        if options.compress {
            bytes = Box::pin(compress_off_thread(bytes)).await?;
        }
        let content_type = body.content_type();
        let body = match file {
            None => EncodedBody::Bytes(bytes),
            Some(path) => {
                let failed = |error: io::Error| {
                    let message = format!("cannot read {}: {error}", path.display());
                    Error::new(ErrorKind::InvalidInput, message)
                };
                let file = UploadFile::new(path.clone()).map_err(failed)?;
                EncodedBody::WithFile(Box::new((bytes, file)))
            }
        };
        Ok(EncodedRequest { method, uri, body, content_type, policy })
    }

    /// Builds the headers of one attempt. The headers are built again for a retry: retries are
    /// rare, and keeping a copy for them would cost every request more.
    pub(crate) fn headers(
        &self,
        encoded: &EncodedRequest,
        options: &RequestOptions,
        state: &RetryState<'_>,
        secret: &Secret,
    ) -> Result<HeaderMap> {
        // Allocate the final capacity: growing the map would rehash all names.
        let capacity = self.headers.len() + options.headers.len() + OWN_HEADERS;
        let mut headers = HeaderMap::with_capacity(capacity);
        headers.insert(ACCEPT, HeaderValue::from_static(tinkex_wire::JSON));
        if encoded.method != Method::GET {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(encoded.content_type));
        }
        let timeout = HeaderValue::from(encoded.policy.timeout.as_secs());
        headers.insert(HeaderName::from_static(header::READ_TIMEOUT), timeout);
        if options.compress {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(compress::ZSTD));
        }
        // Headers set on the builder replace the defaults, and headers of this request replace
        // both.
        for (name, value) in self.headers.iter().chain(&options.headers) {
            headers.insert(name.clone(), value.clone());
        }
        header::put_secret(&mut headers, wire_header::API_KEY, secret)?;
        let retry_count = HeaderValue::from(state.retry_count());
        headers.insert(HeaderName::from_static(header::RETRY_COUNT), retry_count);
        if encoded.method != Method::GET {
            header::put(&mut headers, wire_header::IDEMPOTENCY_KEY, state.idempotency_key());
        }
        #[cfg(feature = "opentelemetry")]
        crate::instrument::trace_context::inject(&mut headers);
        Ok(headers)
    }
}

/// Compresses a body on a blocking thread: compression takes milliseconds, which is too long for an
/// async worker thread.
async fn compress_off_thread(body: Bytes) -> Result<Bytes> {
    let compressed = tokio::task::spawn_blocking(move || compress::compress(&body)).await;
    match compressed {
        Ok(compressed) => Ok(compressed?),
        Err(error) if error.is_panic() => Err(Error::panicked(&*error.into_panic())),
        Err(_) => Err(Error::runtime_ended()),
    }
}

/// Parses a URL. `Url` escapes characters that `Uri` rejects, but is ten times slower, so `Url` is
/// used only if `Uri` fails.
fn parse_uri(url: &str) -> Result<Uri> {
    let invalid = |error: String| {
        Error::new(ErrorKind::InvalidInput, format!("invalid request URL {url:?}: {error}"))
    };
    url.parse().or_else(|_| {
        let url = Url::parse(url).map_err(|error| invalid(error.to_string()))?;
        url.as_str().parse().map_err(|error: ::http::uri::InvalidUri| invalid(error.to_string()))
    })
}
