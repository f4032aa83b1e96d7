//! Client configuration and server capabilities.

use serde::{Deserialize, Serialize};

use crate::request::{bare_request, json_request, json_response};
use crate::setters::setters;

/// Version of the Python SDK whose protocol this crate implements. Clients send it as their
/// version.
pub const SDK_VERSION: &str = "0.36.0";

/// Requests the [`ClientConfig`] of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClientConfigRequest {
    /// Protocol version of the client. Defaults to [`SDK_VERSION`].
    pub sdk_version: String,
}

/// Requests the [`DynamicConfig`] of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DynamicConfigRequest {
    /// Protocol version of the client. Defaults to [`SDK_VERSION`].
    pub sdk_version: String,
}

impl Default for ClientConfigRequest {
    fn default() -> Self {
        Self { sdk_version: SDK_VERSION.to_owned() }
    }
}

impl Default for DynamicConfigRequest {
    fn default() -> Self {
        Self { sdk_version: SDK_VERSION.to_owned() }
    }
}

/// Configuration that a client reads once, when it connects.
///
/// A server sends only the fields that it sets; all others have their default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ClientConfig {
    /// Whether clients exchange API keys for short-lived tokens. Defaults to `false`.
    pub pjwt_auth_enabled: bool,
    /// Credential to exchange: `api_key` (the default) or `credential_cmd`.
    pub credential_default_source: String,
    /// Maximum total size of the sampling requests in flight, in bytes. Defaults to 10 MiB.
    pub sample_dispatch_bytes_semaphore_size: u64,
    /// Maximum total size of the large results being downloaded, in bytes. Defaults to 50 MiB.
    pub inflight_response_bytes_semaphore_size: u64,
    /// Whether the chunks of one batch may be sent concurrently. Defaults to `true`.
    pub parallel_fwdbwd_chunks: bool,
    /// Whether clients compress the bodies of training requests. Defaults to `false`.
    pub proto_compress_fwdbwd: bool,
    /// Maximum number of datums per chunk of a training batch. Defaults to 1024.
    pub fwdbwd_max_chunk_len: u64,
    /// Maximum estimated size of a chunk of a training batch, in bytes. Defaults to 5 000 000.
    pub fwdbwd_max_chunk_bytes_count: u64,
    /// Maximum total size of the training requests in flight, in bytes. Defaults to 50 000 000.
    pub fwdbwd_dispatch_bytes_semaphore_size: u64,
    /// Time to wait for a billing problem to be resolved, in seconds. Defaults to 3600.
    pub billing_exception_max_pause_duration_sec: u64,
    /// Whether the client returns lost samples to the caller instead of resubmitting them. Defaults
    /// to `false`.
    pub sample_no_retries: bool,
    /// Whether the client fails samples that make no progress. Defaults to `true`.
    pub sample_enable_stuck_detection: bool,
    /// Maximum number of concurrent samples per sampling session. Defaults to 2000.
    pub sample_max_concurrent_requests: u64,
    /// Selects the HTTP stack of the Python SDK. This crate only preserves the value in
    /// [`SamplerHandle`](crate::SamplerHandle)s. Defaults to `true`.
    pub use_pyqwest_transport: bool,
    /// Whether `LoadWeights` may create the model that it loads. Defaults to `false`.
    pub create_model_via_load_weights: bool,
    /// Whether clients poll all futures of a sampling session with one request. Defaults to
    /// `false`.
    pub sample_use_retrieve_futures: bool,
    /// Whether the server evaluates custom losses. Defaults to `false`.
    pub custom_loss_server_side: bool,
    /// Whether further clients of a sampling session join it to obtain their client number.
    /// Defaults to `false`.
    pub sample_join_sampling_session: bool,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            pjwt_auth_enabled: false,
            credential_default_source: "api_key".to_owned(),
            sample_dispatch_bytes_semaphore_size: 10 * 1024 * 1024,
            inflight_response_bytes_semaphore_size: 50 * 1024 * 1024,
            parallel_fwdbwd_chunks: true,
            proto_compress_fwdbwd: false,
            fwdbwd_max_chunk_len: 1024,
            fwdbwd_max_chunk_bytes_count: 5_000_000,
            fwdbwd_dispatch_bytes_semaphore_size: 50_000_000,
            billing_exception_max_pause_duration_sec: 3600,
            sample_no_retries: false,
            sample_enable_stuck_detection: true,
            sample_max_concurrent_requests: 2000,
            use_pyqwest_transport: true,
            create_model_via_load_weights: false,
            sample_use_retrieve_futures: false,
            custom_loss_server_side: false,
            sample_join_sampling_session: false,
        }
    }
}

setters!(ClientConfig {
    proto_compress_fwdbwd: bool;
    fwdbwd_max_chunk_bytes_count: u64;
    create_model_via_load_weights: bool;
    sample_use_retrieve_futures: bool;
    custom_loss_server_side: bool;
    sample_join_sampling_session: bool;
});

/// Configuration that a client refreshes periodically.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct DynamicConfig {
    /// Refresh interval in seconds; clients wait at least 10. Defaults to 300.
    pub refresh_interval_sec: u64,
    /// Whether clients cancel abandoned samples. Defaults to `false`.
    pub sample_cancel_enabled: bool,
    /// Maximum number of concurrent cancel requests. Defaults to 64.
    pub sample_cancel_max_batch_size: u64,
}

impl Default for DynamicConfig {
    fn default() -> Self {
        Self {
            refresh_interval_sec: 300,
            sample_cancel_enabled: false,
            sample_cancel_max_batch_size: 64,
        }
    }
}

setters!(DynamicConfig {
    sample_cancel_enabled: bool;
});

/// Lists the models of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCapabilitiesRequest;

/// Models of the server: the response to [`ServerCapabilitiesRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ServerCapabilities {
    /// Base models that can be trained or sampled.
    pub supported_models: Vec<SupportedModel>,
}

impl ServerCapabilities {
    /// Creates a response that lists the given models.
    #[must_use]
    pub fn new(supported_models: Vec<SupportedModel>) -> Self {
        Self { supported_models }
    }
}

/// A base model of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SupportedModel {
    /// Name of the model.
    pub model_name: Option<String>,
    /// Maximum length of a sequence, in tokens.
    pub max_context_length: Option<u64>,
    /// Whether the model can be trained.
    pub trainable: Option<bool>,
    /// Whether the model can be sampled.
    pub sampleable: Option<bool>,
}

setters!(SupportedModel {
    model_name: Option<String>;
    max_context_length: Option<u64>;
    trainable: Option<bool>;
    sampleable: Option<bool>;
});

/// Checks that the server is running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthRequest;

/// Response to [`HealthRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Health {
    /// Status of the server.
    pub status: HealthStatus,
}

impl Health {
    /// Response of a running server.
    pub const OK: Self = Self { status: HealthStatus::Ok };
}

/// Status of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum HealthStatus {
    /// The server accepts requests.
    Ok,
}

json_response!(ClientConfig, DynamicConfig, ServerCapabilities, Health);

json_request! {
    ClientConfigRequest: ClientConfig => ClientConfig;
    DynamicConfigRequest: DynamicConfig => DynamicConfig;
}

bare_request! {
    ServerCapabilitiesRequest: ServerCapabilities => ServerCapabilities, |r| params [];
    HealthRequest: Health => Health, |r| params [];
}
