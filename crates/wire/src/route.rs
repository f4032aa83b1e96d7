//! The one table of routes: what client and server agree on by compiling the same lines.

use std::fmt;

use crate::InvalidInput;

/// An HTTP method of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Read.
    Get,
    /// Do.
    Post,
    /// Set.
    Put,
    /// Remove.
    Delete,
}

impl Method {
    /// The word in a request line.
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

/// How a request body is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BodyCodec {
    /// There is none.
    Empty,
    /// JSON.
    Json,
    /// Protobuf, perhaps compressed.
    Proto,
}

/// How a reply body is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResponseCodec {
    /// Whatever it is, nobody looks.
    Ignored,
    /// JSON that is the answer.
    Json,
    /// JSON with a [`SubmitResponse`](crate::SubmitResponse): the answer comes later.
    SubmitResponse,
    /// The answer behind a ticket: JSON or protobuf, by its content type.
    PollResponse,
}

macro_rules! routes {
    ($($(#[$doc:meta])* $name:ident: $method:ident $path:literal, $body:ident => $reply:ident;)*) => {
        /// An endpoint of the API.
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
        }

        impl Route {
            /// Every endpoint, in the order of the protocol's own index.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            const fn row(self) -> Row {
                match self {
                    $(Self::$name => Row {
                        name: stringify!($name),
                        method: Method::$method,
                        template: concat!("/api/v1", $path),
                        body: BodyCodec::$body,
                        reply: ResponseCodec::$reply,
                    },)*
                }
            }
        }
    };
}

struct Row {
    name: &'static str,
    method: Method,
    template: &'static str,
    body: BodyCodec,
    reply: ResponseCodec,
}

routes! {
    /// What this server wants of its clients.
    ClientConfig: Post "/client/config", Json => Json;
    /// The part of it that may change while a client runs.
    DynamicConfig: Post "/client/dynamic_config", Json => Json;
    /// A key for a short-lived token.
    AuthToken: Post "/auth/token", Json => Json;
    /// A new session.
    CreateSession: Post "/create_session", Json => Json;
    /// The session is still there.
    SessionHeartbeat: Post "/session_heartbeat", Json => Json;
    /// The session is over.
    FinishSession: Post "/sessions/{session_id}/finish", Json => Ignored;
    /// A new model to train.
    CreateModel: Post "/create_model", Json => SubmitResponse;
    /// What a model is.
    GetInfo: Post "/get_info", Json => Json;
    /// Loss, and perhaps its gradient.
    ForwardBackward: Post "/forward_backward", Proto => SubmitResponse;
    /// Apply the gradient.
    OptimStep: Post "/optim_step", Json => SubmitResponse;
    /// Save weights and optimizer.
    SaveWeights: Post "/save_weights", Json => SubmitResponse;
    /// Save weights to sample from.
    SaveWeightsForSampler: Post "/save_weights_for_sampler", Json => SubmitResponse;
    /// Save weights to download.
    SaveWeightsExternal: Post "/save_weights_external", Json => SubmitResponse;
    /// Load weights, and perhaps the optimizer.
    LoadWeights: Post "/load_weights", Json => SubmitResponse;
    /// Upload a loss.
    CreateCustomLoss: Post "/create_custom_loss", Json => SubmitResponse;
    /// Weights to sample from.
    CreateSamplingSession: Post "/create_sampling_session", Json => Json;
    /// Another client of the same weights.
    JoinSamplingSession: Post "/join_sampling_session", Json => Json;
    /// Sample.
    Sample: Post "/asample", Json => SubmitResponse;
    /// The answer behind a ticket.
    RetrieveFuture: Post "/retrieve_future", Json => PollResponse;
    /// Which tickets of a sampling session have answers.
    RetrieveFutures: Post "/retrieve_futures", Json => Json;
    /// Nobody waits for this ticket any more.
    CancelFuture: Post "/cancel_future", Json => Ignored;
    /// How the client is doing.
    Telemetry: Post "/telemetry", Json => Json;
    /// Which models there are.
    ServerCapabilities: Get "/get_server_capabilities", Empty => Json;
    /// Whether the server is up.
    Health: Get "/healthz", Empty => Json;
    /// What a checkpoint holds.
    WeightsInfo: Post "/weights_info", Json => Json;
    /// A checkpoint into another project.
    CopyWeights: Post "/copy_weights", Json => Json;
    /// Training runs, by page.
    ListTrainingRuns: Get "/training_runs", Empty => Json;
    /// One training run.
    GetTrainingRun: Get "/training_runs/{run_id}", Empty => Json;
    /// The checkpoints of a run.
    ListCheckpoints: Get "/training_runs/{run_id}/checkpoints", Empty => Json;
    /// Delete a checkpoint.
    DeleteCheckpoint: Delete "/training_runs/{run_id}/checkpoints/{kind}/{name}", Empty => Ignored;
    /// Let everyone read a checkpoint.
    PublishCheckpoint: Post "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", Empty => Ignored;
    /// Take that back.
    UnpublishCheckpoint: Delete "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", Empty => Ignored;
    /// When a checkpoint expires.
    SetCheckpointTtl: Put "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", Json => Ignored;
    /// Where to download a checkpoint's files.
    ExternalWeightsUrls: Get "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls", Empty => Json;
    /// All checkpoints of the user, by page.
    ListUserCheckpoints: Get "/checkpoints", Empty => Json;
    /// Sessions, by page.
    ListSessions: Get "/sessions", Empty => Json;
    /// One session.
    GetSession: Get "/sessions/{session_id}", Empty => Json;
    /// Sessions by what they are.
    SearchSessions: Post "/sessions/search", Json => Json;
    /// Move a session to a project.
    AssignSessionProject: Put "/sessions/{session_id}/project", Json => Ignored;
    /// A session's trace, to download.
    TraceExport: Get "/sessions/{session_id}/trace_export", Empty => Json;
    /// One sampling session.
    GetSampler: Get "/samplers/{sampler_id}", Empty => Json;
    /// What was used, by the hour.
    BillingUsage: Get "/billing/usage/events", Empty => Json;
    /// How much storage checkpoints take.
    StorageUsage: Get "/billing/usage/checkpoints/current", Empty => Json;
    /// Who did what.
    AuditLog: Get "/audit", Empty => Json;
    /// What the key in use is.
    GetApiKey: Get "/auth/apikey/me", Empty => Json;
    /// Revoke the key in use.
    DeleteApiKey: Delete "/auth/apikey/me", Empty => Ignored;
}

impl Route {
    /// A name for logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// The HTTP method.
    #[must_use]
    pub const fn method(self) -> Method {
        self.row().method
    }

    /// The path with its parameters in braces, `/api/v1` included.
    #[must_use]
    pub const fn template(self) -> &'static str {
        self.row().template
    }

    /// How the request body is written.
    #[must_use]
    pub const fn body(self) -> BodyCodec {
        self.row().body
    }

    /// How the reply body is read.
    #[must_use]
    pub const fn response(self) -> ResponseCodec {
        self.row().reply
    }

    /// The path with its parameters filled in, in order.
    ///
    /// Characters that are special in a URL are escaped; a `:` is not, ids are full of them.
    ///
    /// # Errors
    /// If a parameter is empty, `.` or `..`: such a path would lead elsewhere.
    ///
    /// # Panics
    /// If there are not as many parameters as the template names.
    pub fn path(self, params: &[&str]) -> Result<String, InvalidInput> {
        let mut params = params.iter();
        let mut path = String::with_capacity(64);
        for segment in self.template().split('/').skip(1) {
            path.push('/');
            match parameter(segment) {
                None => path.push_str(segment),
                Some(name) => {
                    let value = params.next().expect("one argument for each parameter");
                    if matches!(*value, "" | "." | "..") {
                        let why = format!("{value:?} cannot be part of a URL path");
                        return Err(InvalidInput::new(name, why));
                    }
                    escape(&mut path, value);
                }
            }
        }
        assert!(params.next().is_none(), "one argument for each parameter");
        Ok(path)
    }

    /// Which endpoint a request is for, and its path parameters. `target` may have a query.
    #[must_use]
    pub fn find(method: &str, target: &str) -> Option<RouteMatch> {
        let path = target.split(['?', '#']).next().unwrap_or(target);
        // A fixed segment wins over a parameter: `/sessions/search` is no session id.
        Self::ALL
            .iter()
            .filter(|route| route.method().as_str() == method)
            .filter_map(|route| Some(RouteMatch { route: *route, params: route.captures(path)? }))
            .min_by_key(|found| found.params.len())
    }

    fn captures(self, path: &str) -> Option<Vec<String>> {
        let (mut wanted, mut given) = (self.template().split('/'), path.split('/'));
        let mut params = Vec::new();
        loop {
            match (wanted.next(), given.next()) {
                (None, None) => return Some(params),
                (Some(segment), Some(text)) if parameter(segment).is_some() => {
                    params.push(unescape(text).filter(|text| !text.is_empty())?);
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

/// What [`Route::find`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteMatch {
    /// The endpoint.
    pub route: Route,
    /// Its path parameters, in order, unescaped.
    pub params: Vec<String>,
}

fn parameter(segment: &str) -> Option<&str> {
    segment.strip_prefix('{')?.strip_suffix('}')
}

fn escape(out: &mut String, text: &str) {
    for byte in text.bytes() {
        // RFC 3986 `pchar`.
        if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
}

fn unescape(text: &str) -> Option<String> {
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
    fn there_are_forty_six() {
        assert_eq!(Route::ALL.len(), 46);
        let mut lines: Vec<_> = Route::ALL.iter().map(ToString::to_string).collect();
        lines.sort();
        lines.dedup();
        assert_eq!(lines.len(), 46, "two routes are the same");
    }

    #[test]
    fn paths_are_found_again() {
        for route in Route::ALL {
            let n = route.template().matches('{').count();
            let given: Vec<String> = (0..n).map(|i| format!("a:b {i}/ü?%")).collect();
            let params: Vec<&str> = given.iter().map(String::as_str).collect();
            let path = route.path(&params).unwrap();
            let found = Route::find(route.method().as_str(), &format!("{path}?x=1")).unwrap();
            assert_eq!((found.route, found.params), (*route, given), "{path}");
        }
    }

    #[test]
    fn path_parameters_cannot_lead_elsewhere() {
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
    fn fixed_segments_win_over_parameters() {
        let found = Route::find("POST", "/api/v1/sessions/search").unwrap();
        assert_eq!(found.route, Route::SearchSessions);
    }
}
