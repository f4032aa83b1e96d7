//! The route table, shared by client and server.

use std::fmt;

use crate::InvalidInput;

/// HTTP method of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// `GET`.
    Get,
    /// `POST`.
    Post,
    /// `PUT`.
    Put,
    /// `DELETE`.
    Delete,
}

impl Method {
    /// Returns the name of the method in upper case.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Delete => "DELETE",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Encoding of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BodyCodec {
    /// No body.
    Empty,
    /// JSON.
    Json,
    /// Protobuf, optionally compressed.
    Proto,
    /// Bytes of any length, which a server writes to a file while they arrive.
    Binary,
}

/// Encoding of a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResponseCodec {
    /// Clients ignore the body.
    Ignored,
    /// JSON.
    Json,
    /// JSON of a [`SubmitResponse`](crate::SubmitResponse).
    SubmitResponse,
    /// A [`PollResponse`](crate::PollResponse): JSON or protobuf, depending on its content type.
    PollResponse,
    /// Server-sent events, or JSON, as the request asks.
    EventStream,
}

macro_rules! routes {
    (
        $($(#[$doc:meta])* $name:ident: $method:ident $path:literal, $body:ident => $response:ident;)*
        [extensions]
        $($(#[$ext_doc:meta])* $ext:ident: $ext_method:ident $ext_path:literal, $ext_body:ident => $ext_response:ident;)*
    ) => {
        /// Endpoint of the API.
        ///
        /// The enum is exhaustive, so that a server that matches on it fails to compile when the
        /// protocol gains a route.
        ///
        /// ```
        /// use tinkex_wire::Route;
        ///
        /// let path = Route::GetSession.path(&["s-1"])?;
        /// assert_eq!(path, "/api/v1/sessions/s-1");
        /// assert_eq!(Route::find("GET", &path).unwrap().route, Route::GetSession);
        /// # Ok::<_, tinkex_wire::InvalidInput>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Route {
            $($(#[$doc])* $name,)*
            $($(#[$ext_doc])* $ext,)*
        }

        impl Route {
            /// All routes of the Tinker API.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Routes that are not part of the Tinker API of SDK 0.36: additions of `tinkex`
            /// servers, and routes that only servers of older protocols have.
            pub const EXTENSIONS: &[Self] = &[$(Self::$ext),*];

            const fn spec(self) -> RouteSpec {
                match self {
                    $(Self::$name => RouteSpec {
                        name: stringify!($name),
                        method: Method::$method,
                        template: concat!("/api/v1", $path),
                        body: BodyCodec::$body,
                        response: ResponseCodec::$response,
                    },)*
                    $(Self::$ext => RouteSpec {
                        name: stringify!($ext),
                        method: Method::$ext_method,
                        template: $ext_path,
                        body: BodyCodec::$ext_body,
                        response: ResponseCodec::$ext_response,
                    },)*
                }
            }
        }
    };
}

struct RouteSpec {
    name: &'static str,
    method: Method,
    template: &'static str,
    body: BodyCodec,
    response: ResponseCodec,
}

routes! {
    /// Returns the client configuration.
    ClientConfig: Post "/client/config", Json => Json;
    /// Returns the dynamic client configuration.
    DynamicConfig: Post "/client/dynamic_config", Json => Json;
    /// Exchanges an API key for a short-lived token.
    AuthToken: Post "/auth/token", Json => Json;
    /// Creates a session.
    CreateSession: Post "/create_session", Json => Json;
    /// Keeps a session alive.
    SessionHeartbeat: Post "/session_heartbeat", Json => Json;
    /// Finishes a session.
    FinishSession: Post "/sessions/{session_id}/finish", Json => Ignored;
    /// Creates a model.
    CreateModel: Post "/create_model", Json => SubmitResponse;
    /// Returns the properties of a model.
    GetInfo: Post "/get_info", Json => Json;
    /// Computes the loss of a batch and optionally its gradient.
    ForwardBackward: Post "/forward_backward", Proto => SubmitResponse;
    /// Performs an optimizer step.
    OptimStep: Post "/optim_step", Json => SubmitResponse;
    /// Saves weights and optimizer state.
    SaveWeights: Post "/save_weights", Json => SubmitResponse;
    /// Saves weights for sampling.
    SaveWeightsForSampler: Post "/save_weights_for_sampler", Json => SubmitResponse;
    /// Saves weights for download.
    SaveWeightsExternal: Post "/save_weights_external", Json => SubmitResponse;
    /// Loads weights and optionally optimizer state.
    LoadWeights: Post "/load_weights", Json => SubmitResponse;
    /// Uploads a custom loss.
    CreateCustomLoss: Post "/create_custom_loss", Json => SubmitResponse;
    /// Creates a sampling session.
    CreateSamplingSession: Post "/create_sampling_session", Json => Json;
    /// Registers another client of a sampling session.
    JoinSamplingSession: Post "/join_sampling_session", Json => Json;
    /// Samples completions.
    Sample: Post "/asample", Json => SubmitResponse;
    /// Polls a future.
    RetrieveFuture: Post "/retrieve_future", Json => PollResponse;
    /// Polls all futures of a sampling client.
    RetrieveFutures: Post "/retrieve_futures", Json => Json;
    /// Cancels a future.
    CancelFuture: Post "/cancel_future", Json => Ignored;
    /// Reports telemetry events.
    Telemetry: Post "/telemetry", Json => Json;
    /// Lists the base models.
    ServerCapabilities: Get "/get_server_capabilities", Empty => Json;
    /// Checks that the server is running.
    Health: Get "/healthz", Empty => Json;
    /// Returns the training configuration of a checkpoint.
    WeightsInfo: Post "/weights_info", Json => Json;
    /// Copies a checkpoint to another project.
    CopyWeights: Post "/copy_weights", Json => Json;
    /// Lists training runs.
    ListTrainingRuns: Get "/training_runs", Empty => Json;
    /// Returns a training run.
    GetTrainingRun: Get "/training_runs/{run_id}", Empty => Json;
    /// Lists the checkpoints of a training run.
    ListCheckpoints: Get "/training_runs/{run_id}/checkpoints", Empty => Json;
    /// Deletes a checkpoint.
    DeleteCheckpoint: Delete "/training_runs/{run_id}/checkpoints/{kind}/{name}", Empty => Ignored;
    /// Publishes a checkpoint.
    PublishCheckpoint: Post "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", Empty => Ignored;
    /// Makes a published checkpoint private.
    UnpublishCheckpoint: Delete "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", Empty => Ignored;
    /// Sets the time to live of a checkpoint.
    SetCheckpointTtl: Put "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", Json => Ignored;
    /// Returns download URLs of a checkpoint.
    ExternalWeightsUrls: Get "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls", Empty => Json;
    /// Lists the checkpoints of the caller.
    ListUserCheckpoints: Get "/checkpoints", Empty => Json;
    /// Lists sessions.
    ListSessions: Get "/sessions", Empty => Json;
    /// Returns a session.
    GetSession: Get "/sessions/{session_id}", Empty => Json;
    /// Searches sessions.
    SearchSessions: Post "/sessions/search", Json => Json;
    /// Moves a session to a project.
    AssignSessionProject: Put "/sessions/{session_id}/project", Json => Ignored;
    /// Exports the trace of a session.
    TraceExport: Get "/sessions/{session_id}/trace_export", Empty => Json;
    /// Returns a sampling session.
    GetSampler: Get "/samplers/{sampler_id}", Empty => Json;
    /// Returns usage by hour.
    BillingUsage: Get "/billing/usage/events", Empty => Json;
    /// Returns the size of the stored checkpoints.
    StorageUsage: Get "/billing/usage/checkpoints/current", Empty => Json;
    /// Returns the audit log.
    AuditLog: Get "/audit", Empty => Json;
    /// Describes the API key of the request.
    GetApiKey: Get "/auth/apikey/me", Empty => Json;
    /// Revokes the API key of the request.
    DeleteApiKey: Delete "/auth/apikey/me", Empty => Ignored;

    [extensions]
    /// Imports a PEFT adapter as checkpoints.
    ImportAdapter: Put "/api/v1/imports/{import_id}", Binary => Json;
    /// Deletes a training run and its checkpoints.
    DeleteTrainingRun: Delete "/api/v1/training_runs/{run_id}", Empty => Ignored;
    /// Discards the accumulated gradient of a model.
    DiscardGradient: Post "/api/v1/discard_gradient", Json => SubmitResponse;
    /// Ends a sampling session, and releases the weights that were saved for it.
    CloseSampler: Delete "/api/v1/samplers/{sampler_id}", Empty => Ignored;
    /// Samples completions through the OpenAI-compatible endpoint, which can stream their tokens.
    Completions: Post "/oai/api/v1/completions", Json => EventStream;
    /// Lists the API keys of the server.
    ListKeys: Get "/api/v1/keys", Empty => Json;
    /// Creates an API key.
    CreateKey: Post "/api/v1/keys", Json => Json;
    /// Revokes an API key.
    RevokeKey: Delete "/api/v1/keys/{key}", Empty => Ignored;
    /// Replaces an API key.
    RotateKey: Post "/api/v1/keys/{key}/rotate", Empty => Json;
    /// Lists the users of the server.
    ListUsers: Get "/api/v1/users", Empty => Json;
    /// Sets the limits of a user.
    SetUserLimits: Put "/api/v1/users/{user}/limits", Json => Ignored;
    /// Shares a training run with other users.
    ShareRun: Put "/api/v1/training_runs/{run_id}/share", Empty => Ignored;
    /// Ends the sharing of a training run.
    UnshareRun: Delete "/api/v1/training_runs/{run_id}/share", Empty => Ignored;
    /// Removes a model from memory, on servers of older protocols.
    UnloadModel: Post "/api/v1/unload_model", Json => SubmitResponse;
    /// Makes the server refuse new work, before it is stopped.
    StartDrain: Post "/api/v1/server/drain", Empty => Json;
    /// Makes the server accept new work again.
    CancelDrain: Delete "/api/v1/server/drain", Empty => Json;
    /// Returns whether the server refuses new work, and what it still executes.
    GetDrainStatus: Get "/api/v1/server/drain", Empty => Json;
    /// Starts a backup of the data folder.
    StartBackup: Post "/api/v1/server/backup", Json => Json;
    /// Returns the status of the last backup.
    GetBackupStatus: Get "/api/v1/server/backup", Empty => Json;
    /// Returns the sizes of the files in the data folder.
    GetDiskUsage: Get "/api/v1/server/disk_usage", Empty => Json;
}

impl Route {
    /// Returns the name of the route, for logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    /// Returns the HTTP method.
    #[must_use]
    pub const fn method(self) -> Method {
        self.spec().method
    }

    /// Returns the path template, for example `/api/v1/sessions/{session_id}`.
    #[must_use]
    pub const fn template(self) -> &'static str {
        self.spec().template
    }

    /// Returns the encoding of the request body.
    #[must_use]
    pub const fn body(self) -> BodyCodec {
        self.spec().body
    }

    /// Returns the encoding of the response body.
    #[must_use]
    pub const fn response(self) -> ResponseCodec {
        self.spec().response
    }

    /// Returns the path with the given parameters, percent-encoded where necessary. A `:`, which is
    /// common in ids, is not encoded.
    ///
    /// # Errors
    /// Returns an error if a parameter is empty, `.` or `..`, which would change the path.
    ///
    /// # Panics
    /// Panics if the number of parameters differs from the template.
    pub fn path(self, params: &[&str]) -> Result<String, InvalidInput> {
        let mut params = params.iter();
        let mut path = String::with_capacity(64);
        for segment in self.template().split('/').skip(1) {
            path.push('/');
            match parameter(segment) {
                None => path.push_str(segment),
                Some(name) => {
                    let value =
                        params.next().expect("the number of parameters matches the template");
                    if matches!(*value, "" | "." | "..") {
                        let reason = format!("{value:?} is not a valid path segment");
                        return Err(InvalidInput::new(name, reason));
                    }
                    percent_encode(&mut path, value);
                }
            }
        }
        assert!(params.next().is_none(), "the number of parameters matches the template");
        Ok(path)
    }

    /// Returns the route and path parameters of a request. `target` may include a query.
    #[must_use]
    pub fn find(method: &str, target: &str) -> Option<RouteMatch> {
        let path = target.split(['?', '#']).next().unwrap_or(target);
        // Prefer fixed segments to parameters: `search` in `/sessions/search` is not a session id.
        Self::ALL
            .iter()
            .chain(Self::EXTENSIONS)
            .filter(|route| route.method().as_str() == method)
            .filter_map(|route| Some(RouteMatch { route: *route, params: route.captures(path)? }))
            .min_by_key(|matched| matched.params.len())
    }

    fn captures(self, path: &str) -> Option<Vec<String>> {
        let mut segments = self.template().split('/');
        let mut values = path.split('/');
        let mut params = Vec::new();
        loop {
            match (segments.next(), values.next()) {
                (None, None) => return Some(params),
                (Some(segment), Some(text)) if parameter(segment).is_some() => {
                    params.push(percent_decode(text).filter(|text| !text.is_empty())?);
                }
                (Some(segment), Some(text)) if segment == text => {}
                _ => return None,
            }
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method(), self.template())
    }
}

/// Route and path parameters of a request: the result of [`Route::find`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteMatch {
    /// Matched route.
    pub route: Route,
    /// Decoded path parameters in the order of the template.
    pub params: Vec<String>,
}

fn parameter(segment: &str) -> Option<&str> {
    segment.strip_prefix('{')?.strip_suffix('}')
}

fn percent_encode(out: &mut String, text: &str) {
    for byte in text.bytes() {
        // The characters of RFC 3986 `pchar` need no encoding.
        if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
}

/// Decodes a percent-encoded path segment; `None` if an escape is not two hexadecimal digits, or
/// the decoded bytes are not UTF-8.
///
/// ```
/// assert_eq!(tinkex_wire::percent_decode("a%2Fb").as_deref(), Some("a/b"));
/// ```
#[must_use]
pub fn percent_decode(text: &str) -> Option<String> {
    if !text.contains('%') {
        return Some(text.to_owned());
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        if *byte != b'%' {
            out.push(*byte);
            continue;
        }
        let (hex, tail) = rest.split_first_chunk::<2>()?;
        rest = tail;
        let digit = |d: u8| char::from(d).to_digit(16).and_then(|d| u8::try_from(d).ok());
        out.push(digit(hex[0])? * 16 + digit(hex[1])?);
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_46_distinct_routes() {
        assert_eq!(Route::ALL.len(), 46);
        let mut lines: Vec<_> = Route::ALL.iter().map(ToString::to_string).collect();
        lines.sort();
        lines.dedup();
        assert_eq!(lines.len(), 46, "duplicate route");
    }

    #[test]
    fn generated_paths_match_their_route() {
        for route in Route::ALL.iter().chain(Route::EXTENSIONS) {
            let n = route.template().matches('{').count();
            let values: Vec<String> = (0..n).map(|i| format!("a:b {i}/ü?%")).collect();
            let params: Vec<&str> = values.iter().map(String::as_str).collect();
            let path = route.path(&params).unwrap();
            let found = Route::find(route.method().as_str(), &format!("{path}?x=1")).unwrap();
            assert_eq!((found.route, found.params), (*route, values), "{path}");
        }
    }

    #[test]
    fn path_parameters_cannot_change_the_path() {
        for bad in ["", ".", ".."] {
            assert_eq!(Route::GetSession.path(&[bad]).unwrap_err().field(), "session_id");
        }
        assert_eq!(Route::GetSession.path(&["../x"]).unwrap(), "/api/v1/sessions/..%2Fx");
        assert_eq!(Route::find("GET", "/api/v1/sessions/"), None);
        assert_eq!(Route::find("GET", "/api/v1/sessions/%FF"), None);
        assert_eq!(Route::find("GET", "/api/v1/sessions/%4"), None);
        assert_eq!(Route::find("PATCH", "/api/v1/sessions"), None);
    }

    #[test]
    fn fixed_segments_take_precedence_over_parameters() {
        let found = Route::find("POST", "/api/v1/sessions/search").unwrap();
        assert_eq!(found.route, Route::SearchSessions);
    }
}
