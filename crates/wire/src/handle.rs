//! [`SamplerHandle`]: a sampling session, packed for another process.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use serde::{Deserialize, Serialize};

use crate::codec::json;
use crate::config::{ClientConfig, DynamicConfig};
use crate::ids::{SamplerId, SessionId};
use crate::secret::Address;
use crate::{DecodeError, DecodeErrorKind};

/// What another process needs to sample from the same weights. It carries no credential: whoever
/// unpacks it uses their own.
///
/// Header overrides are carried along as they are, so keep secrets out of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerHandle {
    /// The session.
    pub session_id: SessionId,
    /// The sampling session.
    pub sampling_session_id: SamplerId,
    /// How to reach the server.
    pub holder: HandleHolder,
    /// Whether samples are to be explained later.
    #[serde(default)]
    pub record_stability_info: bool,
}

/// How to reach the server of a [`SamplerHandle`].
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandleHolder {
    /// Where it is.
    pub base_url: String,
    /// Headers to send with every call.
    #[serde(default)]
    pub default_headers_overrides: Option<BTreeMap<String, String>>,
    /// Its settings.
    #[serde(default)]
    pub client_config: ClientConfig,
    /// Its settings that may change.
    #[serde(default)]
    pub client_dynamic_config: DynamicConfig,
    /// Always null.
    #[serde(default)]
    api_key: NoKey,
}

impl HandleHolder {
    /// A server with its settings, and no extra headers.
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
    /// Names the headers without what is in them, and the server without a user or query.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers = self.default_headers_overrides.as_ref();
        f.debug_struct("HandleHolder")
            .field("base_url", &Address::Path(&self.base_url))
            .field("default_headers_overrides", &headers.map(|all| all.keys().collect::<Vec<_>>()))
            .field("client_config", &self.client_config)
            .field("client_dynamic_config", &self.client_dynamic_config)
            .finish_non_exhaustive()
    }
}

/// Written as null; whatever a foreign handle holds here is not kept.
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

impl SamplerHandle {
    /// Packs the handle into text that fits a URL.
    ///
    /// # Panics
    /// Never: a handle holds only texts and whole numbers.
    #[must_use]
    pub fn to_text(&self) -> String {
        let body = json::encode(self).expect("texts and whole numbers are always JSON");
        URL_SAFE.encode(body)
    }

    /// Unpacks a handle.
    ///
    /// # Errors
    /// If the text is no handle.
    pub fn from_text(text: &str) -> Result<Self, DecodeError> {
        let bytes = URL_SAFE.decode(text.trim()).map_err(|why| {
            DecodeError::new(DecodeErrorKind::Json, format!("not a sampler handle: {why}"))
        })?;
        json::decode(&bytes)
    }
}
