//! Names of the protocol's HTTP headers, in lower case.

/// API key or token, without a scheme.
pub const API_KEY: &str = "x-api-key";
/// Idempotency key: the same for all retries of one request.
pub const IDEMPOTENCY_KEY: &str = "x-idempotency-key";
/// Number of earlier polls of the future.
pub const REQUEST_ITERATION: &str = "x-tinker-request-iteration";
/// Type of the polled request: see
/// [`SubmitRequest::request_type`](crate::SubmitRequest::request_type).
pub const REQUEST_TYPE: &str = "x-tinker-request-type";
/// Round-trip time of the submit request in seconds; sent with the first poll.
pub const SUBMIT_ROUNDTRIP_TIME: &str = "x-tinker-create-promise-roundtrip-time";
/// `1` on sampling requests of clients that handle a 429 by backing off.
pub const SAMPLING_BACKPRESSURE: &str = "x-tinker-sampling-backpressure";
/// Version of the client, on REST requests.
pub const SDK_VERSION: &str = "x-sdk-version";
/// Name of the client method, on REST requests.
pub const SDK_METHOD: &str = "x-sdk-method";
/// API key with access to the source of a copy.
pub const WEIGHTS_ACCESS_TOKEN: &str = "x-tinker-weights-access-token";
/// Delay before a retry, in milliseconds.
pub const RETRY_AFTER_MS: &str = "retry-after-ms";
/// Delay before a retry in seconds, or the date of the retry.
pub const RETRY_AFTER: &str = "retry-after";
/// Override of the retry decision: `true` or `false`.
pub const SHOULD_RETRY: &str = "x-should-retry";
