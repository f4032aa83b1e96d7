//! What a server wants of its clients, and which models it has.

use serde::{Deserialize, Serialize};

use crate::request::{bare_request, json_request, json_response};

/// The version of the protocol that this crate speaks, as clients announce it.
pub const SDK_VERSION: &str = "0.36.0";

/// Asks for [`ClientConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientConfigRequest {
    /// The client's version.
    pub sdk_version: String,
}

/// Asks for [`DynamicConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DynamicConfigRequest {
    /// The client's version.
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

/// Settings that hold for as long as a client runs.
///
/// A server sends those it cares about; the rest are [`Default`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientConfig {
    /// Whether keys are exchanged for short-lived tokens.
    pub pjwt_auth_enabled: bool,
    /// Which credential is exchanged: `api_key` or `credential_cmd`.
    pub credential_default_source: String,
    /// Bytes of sampling requests that may be on their way at once.
    pub sample_dispatch_bytes_semaphore_size: u64,
    /// Bytes of large results that may be fetched at once.
    pub inflight_response_bytes_semaphore_size: u64,
    /// Whether the chunks of one batch may be sent together.
    pub parallel_fwdbwd_chunks: bool,
    /// Whether training bodies should be compressed.
    pub proto_compress_fwdbwd: bool,
    /// Datums per chunk, at most.
    pub fwdbwd_max_chunk_len: u64,
    /// Estimated bytes per chunk, at most.
    pub fwdbwd_max_chunk_bytes_count: u64,
    /// Bytes of training requests that may be on their way at once.
    pub fwdbwd_dispatch_bytes_semaphore_size: u64,
    /// How long to wait, in seconds, for a billing problem to be solved.
    pub billing_exception_max_pause_duration_sec: u64,
    /// Whether a failed sample is left to the caller.
    pub sample_no_retries: bool,
    /// Whether samples without any progress are given up.
    pub sample_enable_stuck_detection: bool,
    /// Samples of one sampling session at once.
    pub sample_max_concurrent_requests: u64,
    /// Which HTTP stack the Python SDK uses; of no meaning here, and kept for handles.
    pub use_pyqwest_transport: bool,
    /// Whether a model is created by loading its first weights.
    pub create_model_via_load_weights: bool,
    /// Whether one poll serves all tickets of a sampling session.
    pub sample_use_retrieve_futures: bool,
    /// Whether custom losses can run on the server.
    pub custom_loss_server_side: bool,
    /// Whether another client of a sampling session asks for its number.
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

/// Settings that may change while a client runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DynamicConfig {
    /// When to ask again, in seconds; clients wait at least 10.
    pub refresh_interval_sec: u64,
    /// Whether abandoned samples should be cancelled.
    pub sample_cancel_enabled: bool,
    /// How many cancels to send together.
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

/// Asks which models there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCapabilitiesRequest;

/// Which models there are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerCapabilities {
    /// The models.
    pub supported_models: Vec<SupportedModel>,
}

/// A model that the server has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SupportedModel {
    /// Its name.
    pub model_name: Option<String>,
    /// How many tokens it can read.
    pub max_context_length: Option<u64>,
    /// Whether it can be trained.
    pub trainable: Option<bool>,
    /// Whether it can be sampled from.
    pub sampleable: Option<bool>,
}

/// Asks whether the server is up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthRequest;

/// The server is up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Always [`HealthStatus::Ok`].
    pub status: HealthStatus,
}

/// How the server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// Well.
    Ok,
}

json_response!(ClientConfig, DynamicConfig, ServerCapabilities, Health);

json_request! {
    ClientConfigRequest: ClientConfig => ClientConfig;
    DynamicConfigRequest: DynamicConfig => DynamicConfig;
}

bare_request! {
    ServerCapabilitiesRequest: ServerCapabilities => ServerCapabilities, |c| params [];
    HealthRequest: Health => Health, |c| params [];
}
