//! The names of headers that belong to the protocol, in lower case.

/// The credential, bare.
pub const API_KEY: &str = "x-api-key";
/// Tells resends of one request from a new one.
pub const IDEMPOTENCY_KEY: &str = "x-idempotency-key";
/// How often a ticket was polled before.
pub const REQUEST_ITERATION: &str = "x-tinker-request-iteration";
/// What a poll is waiting for: see [`SubmitRequest::request_type`](crate::SubmitRequest::request_type).
pub const REQUEST_TYPE: &str = "x-tinker-request-type";
/// How long the ticket took, in seconds; on the first poll.
pub const SUBMIT_ROUNDTRIP_TIME: &str = "x-tinker-create-promise-roundtrip-time";
/// `1` on sampling requests: a 429 is understood.
pub const SAMPLING_BACKPRESSURE: &str = "x-tinker-sampling-backpressure";
/// The version of the caller, on REST calls.
pub const SDK_VERSION: &str = "x-sdk-version";
/// The name of the method called, on REST calls.
pub const SDK_METHOD: &str = "x-sdk-method";
/// A second credential, for the source of a copy.
pub const WEIGHTS_ACCESS_TOKEN: &str = "x-tinker-weights-access-token";
/// When to come back, in milliseconds.
pub const RETRY_AFTER_MS: &str = "retry-after-ms";
/// When to come back, in seconds or as a date.
pub const RETRY_AFTER: &str = "retry-after";
/// Whether to come back at all: `true` or `false`.
pub const SHOULD_RETRY: &str = "x-should-retry";
