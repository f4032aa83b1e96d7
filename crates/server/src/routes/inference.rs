//! Inference endpoints: paths, access from web pages, and errors in the shape of each API.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, CACHE_CONTROL, CONTENT_TYPE,
    HeaderName, ORIGIN, VARY,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body_util::Either;
use tinkex_inference::{
    EndpointRequest, ErrorClass, InferenceBody, InferenceResponse, anthropic, openai,
};
use tinkex_store::error::ServerError;
use tinkex_wire::{BodyCodec, JSON, percent_decode};

use super::body::ReceivedBody;
use super::dashboard::session_key;
use super::error::HttpError;
use super::event_body::EventBody;
use super::{
    Caller, IncomingBody, ResponseBody, RouteResult, authenticate, check_worker,
    mark_authenticated, respond, to_json, while_valid,
};
use crate::inference::{ModelGenerator, NamedModel};
use crate::state::ServerState;

/// Prefixes of the paths of the OpenAI API.
const OPENAI: [&str; 2] = ["/oai/api/v1/", "/v1/"];
/// Prefixes of the paths of the Anthropic API.
const ANTHROPIC: [&str; 2] = ["/anthropic/api/v1/", "/v1/"];

/// Cost of rendering and tokenizing one byte of a prompt, relative to decoding one byte of JSON.
const TOKENIZING_COST: usize = 16;

/// An inference endpoint.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    ChatCompletions,
    Completions,
    Messages,
    CountTokens,
    Models,
    /// Describes the model of this name.
    Model(String),
    /// A path under a prefix of an API without an endpoint of that name.
    Unknown(Api),
}

/// An API with its own form of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    OpenAi,
    Anthropic,
}

impl Api {
    /// Returns the name of the header with the id of a request.
    fn request_id_header(self) -> HeaderName {
        HeaderName::from_static(match self {
            Self::OpenAi => "x-request-id",
            Self::Anthropic => "request-id",
        })
    }
}

impl Endpoint {
    /// Returns the endpoint of a path; `None` for paths outside of the inference APIs.
    pub(super) fn find(path: &str) -> Option<Self> {
        let name =
            |prefixes: [&str; 2]| prefixes.iter().find_map(|prefix| path.strip_prefix(prefix));
        match name(ANTHROPIC) {
            Some("messages") => return Some(Self::Messages),
            Some("messages/count_tokens") => return Some(Self::CountTokens),
            _ => {}
        }
        let Some(name) = name(OPENAI) else {
            return name(ANTHROPIC).map(|_| Self::Unknown(Api::Anthropic));
        };
        Some(match name {
            "chat/completions" => Self::ChatCompletions,
            "completions" => Self::Completions,
            "models" => Self::Models,
            _ => match name.strip_prefix("models/").and_then(percent_decode) {
                Some(model) if !model.is_empty() => Self::Model(model),
                _ => Self::Unknown(Api::OpenAi),
            },
        })
    }

    fn method(&self) -> Method {
        match self {
            Self::ChatCompletions | Self::Completions | Self::Messages | Self::CountTokens => {
                Method::POST
            }
            Self::Models | Self::Model(_) | Self::Unknown(_) => Method::GET,
        }
    }

    fn api(&self) -> Api {
        match self {
            Self::Messages | Self::CountTokens => Api::Anthropic,
            Self::ChatCompletions | Self::Completions | Self::Models | Self::Model(_) => {
                Api::OpenAi
            }
            Self::Unknown(api) => *api,
        }
    }

    /// Converts an error to a response in the shape of the endpoint's API.
    pub(super) fn error_response(&self, error: HttpError) -> Response<ResponseBody> {
        let class = error.class.unwrap_or_else(|| ErrorClass::of_status(error.status.as_u16()));
        let body = match self.api() {
            Api::OpenAi => {
                let param = error.param.as_deref();
                serde_json::to_vec(&openai::error_document(class, &error.detail, param))
            }
            Api::Anthropic => serde_json::to_vec(&anthropic::error_document(class, &error.detail)),
        };
        let body = body.unwrap_or_default();
        error.into_response_with(body.into())
    }
}

/// Authorizes a request to an inference endpoint, reads its body and handles it.
pub(super) async fn dispatch(
    state: &Arc<ServerState>,
    parts: &Parts,
    body: &mut impl IncomingBody,
    endpoint: &Endpoint,
) -> RouteResult {
    check_worker(state)?;
    let from_allowed_page = allowed_origin(state, &parts.headers).is_some();
    if parts.method == Method::OPTIONS && from_allowed_page {
        // Respond before the key is checked: a browser sends no key with a preflight request.
        return Ok(preflight(&parts.headers));
    }
    let key = match session_key(state, &parts.headers) {
        Some(key) => key,
        None => authenticate(state, &parts.headers, from_allowed_page)?,
    };
    mark_authenticated(parts);
    let caller = Caller { state, principal: &key.principal };
    while_valid(&key, handle(caller, parts, body, endpoint)).await
}

/// Handles an authenticated request.
async fn handle(
    caller: Caller<'_>,
    parts: &Parts,
    body: &mut impl IncomingBody,
    endpoint: &Endpoint,
) -> RouteResult {
    let Caller { state, principal } = caller;
    let path = parts.uri.path();
    if let Endpoint::Unknown(api) = endpoint {
        let path: String = path.chars().take(200).collect();
        let known = match api {
            Api::OpenAi => "chat/completions, completions and models",
            Api::Anthropic => "messages and messages/count_tokens",
        };
        let message = format!("{path} does not exist; this server has {known}");
        return Err(ServerError::not_found(message).into());
    }
    if parts.method != endpoint.method() {
        let detail = format!("{path} accepts {}, not {}", endpoint.method(), parts.method);
        return Err(HttpError::method_not_allowed(detail));
    }
    let response = match endpoint {
        Endpoint::Models => {
            let models = NamedModel::list(&state.inference, principal)
                .into_iter()
                .map(NamedModel::description);
            return to_json(&models.collect::<openai::ModelList>());
        }
        Endpoint::Model(name) => {
            let model = NamedModel::resolve(&state.inference, principal, name)?.description();
            return to_json(&openai::ModelObject::from(model));
        }
        _ if state.drain.is_active() => return Err(HttpError::draining()),
        _ => {
            caller.require_write()?;
            let limit = state.options.limits.body_bytes;
            let body = ReceivedBody::read(state, parts, body, limit, BodyCodec::Json).await?;
            let body = body.into_bytes();
            match endpoint {
                Endpoint::ChatCompletions => {
                    respond_to::<openai::ChatCompletionRequest>(caller, body).await?
                }
                Endpoint::Messages => {
                    respond_to::<anthropic::MessagesRequest>(caller, body).await?
                }
                Endpoint::CountTokens => {
                    respond_to::<anthropic::CountTokensRequest>(caller, body).await?
                }
                _ => respond_to::<openai::CompletionRequest>(caller, body).await?,
            }
        }
    };
    let id = response.id;
    let mut response = match response.body {
        InferenceBody::Json(json) => respond(JSON, json),
        InferenceBody::Events(mut source) => {
            let body = EventBody::new(move |context| source.poll_events(context));
            let mut response = Response::new(Either::Right(Either::Right(body)));
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            // The header asks reverse proxies not to buffer the response: buffering would delay the
            // tokens.
            let buffering = HeaderName::from_static("x-accel-buffering");
            headers.insert(buffering, HeaderValue::from_static("no"));
            response
        }
    };
    if let Some(id) = id.and_then(|id| HeaderValue::try_from(id).ok()) {
        response.headers_mut().insert(endpoint.api().request_id_header(), id);
    }
    Ok(response)
}

/// Reads a request, starts it on the model that it names, and waits for the response. Large bodies
/// are read, and long prompts tokenized, on the blocking pool.
async fn respond_to<R: EndpointRequest>(
    Caller { state, principal }: Caller<'_>,
    body: Bytes,
) -> Result<InferenceResponse, HttpError> {
    let size = body.len();
    // The body keeps its share of the body budget until the request is enqueued: the parsed request
    // is about as large as the body.
    let read_body = body.clone();
    let read = move || R::read(&read_body).map_err(HttpError::from);
    let request = state.decode_jobs.run(size, read).await?;
    let model = NamedModel::resolve(&state.inference, principal, request.model())?;
    model.load_text_files(&state.executor, R::USES_CHAT).await?;
    let generator = ModelGenerator { inference: Arc::clone(&state.inference), model };
    let created = state.clock.now().div_euclid(1_000_000);
    let start = move || {
        let started = request.start(&generator, created).map_err(HttpError::from);
        drop(body);
        started
    };
    let cost = size.saturating_mul(TOKENIZING_COST);
    Ok(state.decode_jobs.run(cost, start).await?.await?)
}

/// Adds the header with the id of the request, unless the response has that header.
pub(super) fn add_request_id(endpoint: &Endpoint, response: &mut Response<ResponseBody>) {
    let id = format!("req_{}", uuid::Uuid::new_v4().simple());
    if let Ok(id) = HeaderValue::try_from(id) {
        response.headers_mut().entry(endpoint.api().request_id_header()).or_insert(id);
    }
}

/// Returns the origin of a request from a web page that may use the inference endpoints.
fn allowed_origin<'a>(state: &ServerState, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
    let origin = headers.get(ORIGIN)?;
    let allowed = &state.options.allow_origins;
    allowed.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then_some(origin)
}

/// Responds to a preflight request, with which a browser asks whether a page may send a request.
fn preflight(headers: &HeaderMap) -> Response<ResponseBody> {
    let mut response = respond(JSON, Bytes::new());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let out = response.headers_mut();
    out.remove(CONTENT_TYPE);
    out.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    out.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    if let Some(requested) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        out.insert(ACCESS_CONTROL_ALLOW_HEADERS, requested.clone());
    }
    response
}

/// Adds the headers that let an allowed web page read a response.
pub(super) fn add_cors(
    state: &ServerState,
    request: &HeaderMap,
    response: &mut Response<ResponseBody>,
) {
    if state.options.allow_origins.is_empty() {
        return;
    }
    let headers = response.headers_mut();
    headers.insert(VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = allowed_origin(state, request) {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_prefixes_lead_to_the_same_endpoints() {
        for prefix in OPENAI {
            let find = |path: &str| Endpoint::find(&format!("{prefix}{path}")).unwrap();
            assert_eq!(find("completions"), Endpoint::Completions);
            assert_eq!(find("models"), Endpoint::Models);
            let name = "Qwen/Qwen3-8B".to_owned();
            assert_eq!(find("models/Qwen%2FQwen3-8B"), Endpoint::Model(name.clone()));
            assert_eq!(find("models/Qwen/Qwen3-8B"), Endpoint::Model(name));
            assert_eq!(find("chat/completions"), Endpoint::ChatCompletions);
            for unknown in ["", "models/", "models/%zz", "embeddings", "completions/"] {
                assert_eq!(find(unknown), Endpoint::Unknown(Api::OpenAi), "{unknown}");
            }
        }
        for prefix in ANTHROPIC {
            let find = |path: &str| Endpoint::find(&format!("{prefix}{path}")).unwrap();
            assert_eq!(find("messages"), Endpoint::Messages);
            assert_eq!(find("messages/count_tokens"), Endpoint::CountTokens);
        }
        let batches = Endpoint::find("/anthropic/api/v1/messages/batches");
        assert_eq!(batches, Some(Endpoint::Unknown(Api::Anthropic)));
        assert_eq!(Endpoint::find("/api/v1/asample"), None);
        assert_eq!(Endpoint::find("/oai"), None);
    }
}
