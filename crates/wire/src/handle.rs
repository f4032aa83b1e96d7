//! [`SamplerHandle`]: a serialized reference to a sampling session, for use in another process.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use serde::{Deserialize, Serialize};

use crate::codec::json;
use crate::config::{ClientConfig, DynamicConfig};
use crate::ids::{SamplerId, SessionId};
use crate::secret::RedactedUrl;
use crate::setters::setters;
use crate::{DecodeError, DecodeErrorKind};

/// Everything that another process needs to join a sampling session, except the credential: the
/// other process uses its own.
///
/// The handle contains the header overrides in plain text. Do not put secrets into them.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::SamplerHandle;
///
/// # fn run(handle: SamplerHandle) -> Result<(), Box<dyn std::error::Error>> {
/// let text = handle.to_text();
/// let restored: SamplerHandle = text.parse()?;
/// assert_eq!(restored, handle);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SamplerHandle {
    /// Id of the session.
    pub session_id: SessionId,
    /// Id of the sampling session.
    pub sampling_session_id: SamplerId,
    /// Address and configuration of the server.
    pub holder: HandleHolder,
    /// Default of
    /// [`SampleRequest::record_stability_info`](crate::SampleRequest::record_stability_info).
    #[serde(default)]
    pub record_stability_info: bool,
}

setters!(SamplerHandle { record_stability_info: bool; });

/// Address and configuration of the server of a [`SamplerHandle`].
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HandleHolder {
    /// Base URL of the server.
    pub base_url: String,
    /// Headers to send with every request.
    #[serde(default)]
    pub default_headers_overrides: Option<BTreeMap<String, String>>,
    /// Client configuration that the server sent.
    #[serde(default)]
    pub client_config: ClientConfig,
    /// Dynamic client configuration that the server sent.
    #[serde(default)]
    pub client_dynamic_config: DynamicConfig,
    /// Always null: the handle must not contain a credential.
    #[serde(default)]
    api_key: NoKey,
}

impl HandleHolder {
    /// Creates a holder without header overrides.
    pub fn new(
        base_url: impl Into<String>,
        client_config: ClientConfig,
        client_dynamic_config: DynamicConfig,
    ) -> Self {
        Self {
            base_url: base_url.into(),
            default_headers_overrides: None,
            client_config,
            client_dynamic_config,
            api_key: NoKey,
        }
    }
}

impl fmt::Debug for HandleHolder {
    /// Prints header names without their values, and the URL without user information and query.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers = self.default_headers_overrides.as_ref();
        f.debug_struct("HandleHolder")
            .field("base_url", &RedactedUrl::Path(&self.base_url))
            .field("default_headers_overrides", &headers.map(|all| all.keys().collect::<Vec<_>>()))
            .field("client_config", &self.client_config)
            .field("client_dynamic_config", &self.client_dynamic_config)
            .finish_non_exhaustive()
    }
}

/// Serialized as null. Any value in a handle from another client is discarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NoKey;

impl Serialize for NoKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_none()
    }
}

impl<'de> Deserialize<'de> for NoKey {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

impl FromStr for SamplerHandle {
    type Err = DecodeError;

    /// Decodes the text of [`to_text`](Self::to_text).
    fn from_str(text: &str) -> Result<Self, DecodeError> {
        Self::from_text(text)
    }
}

impl SamplerHandle {
    /// Creates a handle for a sampling session.
    #[must_use]
    pub fn new(
        session_id: SessionId,
        sampling_session_id: SamplerId,
        holder: HandleHolder,
    ) -> Self {
        Self { session_id, sampling_session_id, holder, record_stability_info: false }
    }

    /// Encodes the handle as URL-safe Base64.
    ///
    /// # Panics
    /// Never panics: a handle contains only strings and integers, which always encode as JSON.
    #[must_use]
    pub fn to_text(&self) -> String {
        let body = json::encode(self).expect("strings and integers always encode as JSON");
        URL_SAFE.encode(body)
    }

    /// Decodes a handle.
    ///
    /// # Errors
    /// Returns an error if the text is not Base64 or does not contain a handle.
    pub fn from_text(text: &str) -> Result<Self, DecodeError> {
        let bytes = URL_SAFE.decode(text.trim()).map_err(|error| {
            DecodeError::new(
                DecodeErrorKind::Json,
                format!("sampler handle is not Base64: {error}"),
            )
        })?;
        json::decode(&bytes)
    }
}
