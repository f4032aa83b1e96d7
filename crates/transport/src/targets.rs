//! Targets of the [`tracing`] events that the SDK emits.
//!
//! Use them to filter or to recognize events; the names and the fields listed here are part of the
//! public API. Other events have the target of their module (`tinkex::…`, `tinkex_session::…`,
//! `tinkex_transport::…` or `tinkex_hub::…`). No field holds a credential, a body, a header or a
//! query string.
//!
//! | Target | Message | Level | Fields |
//! |---|---|---|---|
//! | [`HTTP`] | `request start` | trace | `method`, `path`, `lane`, `base_url`, `retry_count` |
//! | [`HTTP`] | `response start` | debug | as above, `duration` (seconds), `status` (number); only if the response is streamed, when its first part arrives |
//! | [`HTTP`] | `request stop` | debug | as above, `duration` (seconds), `status` (number); when the complete response has arrived |
//! | [`HTTP`] | `request exception` | debug | as above, `duration` (seconds), `error`; no response, or a streamed response that broke |
//! | [`HTTP`] | `response dropped` | debug | as above, `duration` (seconds), `status` (number); the program dropped a streamed response |
//! | [`STREAM`] | `sample stream ended` | debug | `sampler_id`, `outcome` (`completed`, `failed` or `dropped`), `tokens`, `duration` (seconds), `error` (if it failed) |
//! | [`RETRY`] | `retrying request` | warn or debug | `lane`, `base_url` or `origin`, `reason`, `error`, `status` (number, if there was a response), `seconds` (delay), `attempt` |
//! | [`RETRY`] | `request succeeded after retries` | info or debug | `lane`, `base_url`, `attempts`, `elapsed` (seconds) |
//! | [`RETRY`] | `giving up` | info or debug | as above, and `error` |
//! | [`POLL`] | `poll failed` | debug | `event`, `request_id`, `request_type`, `polls`, `error` |
//! | [`OUTAGE`] | `connection lost while waiting for a result; polling continues` | warn | `base_url`, `error` |
//! | [`OUTAGE`] | `polls for results succeed again` | info | `base_url` |
//! | [`QUEUE`] | `queue.state_change` | info | `work`, `id`, `state`, `reason` |
//!
//! The first retry of a call is a warning and its end is logged at the info level; further retries
//! are logged at the debug level. A warning with the same lane and status as the previous one is
//! logged at most once per second, so that many samples in the same outage log one warning.
//! `reason` is `retry` (same round), `round` (new round), `backoff` (429), `billing` (402),
//! `resubmit` (sample under a new sequence number) or `poll` (first failed poll of an outage).
//!
//! Durations are floating-point numbers of seconds. `lane` is the
//! `Lane::as_str` of the request;
//! `Lane::from_name` reads it back. `origin` is the scheme, host and port
//! that a download or a hub request was sent to, for example `https://huggingface.co`.

/// HTTP requests: one event when a request starts and one when it ends, and one between them when a
/// streamed response starts.
pub const HTTP: &str = "tinkex::http";

/// Samples that are streamed token by token: one event when a stream ends.
pub const STREAM: &str = "tinkex::stream";

/// Retries: one event before the delay of each retry, including waits for the shared backoff (429)
/// and for a billing problem (402) and resubmissions of a sample, and one at the end of the call.
pub const RETRY: &str = "tinkex::retry";

/// Failed polls for the result of a request, and results that report a failed request.
pub const POLL: &str = "tinkex::poll";

/// Outages while results are pending: one event when the server becomes unreachable and one when
/// polls succeed again, for all pending results together.
pub const OUTAGE: &str = "tinkex::outage";

/// Changes of the queue state that the server reports for pending work.
pub const QUEUE: &str = "tinkex::queue";
