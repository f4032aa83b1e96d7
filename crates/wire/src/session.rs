//! Sessions. A session groups the models and sampling sessions of one client program.

use serde::{Deserialize, Serialize};

use crate::codec::json;
use crate::config::SDK_VERSION;
use crate::ids::SessionId;
use crate::request::{ApiRequest, RequestBody, json_request, json_response};
use crate::route::Route;
use crate::setters::setters;
use crate::{InvalidInput, JsonObject};

/// Creates a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_session")]
#[non_exhaustive]
pub struct CreateSession {
    /// Tags of the session.
    pub tags: Vec<String>,
    /// Metadata to store with the session. Defaults to `{}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<JsonObject>,
    /// Protocol version of the client. Defaults to [`SDK_VERSION`].
    pub sdk_version: String,
    /// Project of the session; the server's default project if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project_id: Option<String>,
    /// Display name of the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
}

impl Default for CreateSession {
    fn default() -> Self {
        Self {
            tags: Vec::new(),
            user_metadata: Some(JsonObject::new()),
            sdk_version: SDK_VERSION.to_owned(),
            project_id: None,
            display_name: None,
        }
    }
}

setters!(CreateSession {
    tags: Vec<String>;
    user_metadata: Option<JsonObject>;
    project_id: Option<String>;
    display_name: Option<String>;
});

/// Response to [`CreateSession`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_session")]
#[non_exhaustive]
pub struct SessionCreated {
    /// Id of the session.
    pub session_id: SessionId,
    /// Information for the user.
    #[serde(default)]
    pub info_message: Option<String>,
    /// Warning for the user.
    #[serde(default)]
    pub warning_message: Option<String>,
    /// Error that did not prevent the creation of the session.
    #[serde(default)]
    pub error_message: Option<String>,
}

impl SessionCreated {
    /// Creates a response without messages.
    #[must_use]
    pub fn new(session_id: SessionId) -> Self {
        Self { session_id, info_message: None, warning_message: None, error_message: None }
    }
}

setters!(SessionCreated {
    warning_message: Option<String>;
});

/// Keeps a session alive. The server cancels a session without heartbeats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "session_heartbeat")]
#[non_exhaustive]
pub struct SessionHeartbeat {
    /// Id of the session.
    pub session_id: SessionId,
}

impl SessionHeartbeat {
    /// Creates a heartbeat for the session `session_id`.
    pub fn new(session_id: impl Into<SessionId>) -> Self {
        Self { session_id: session_id.into() }
    }
}

/// Response to [`SessionHeartbeat`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "session_heartbeat")]
pub struct HeartbeatAcknowledged {}

/// Finishes a session. Finishing a finished session has no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FinishSession {
    /// Id of the session.
    pub session_id: SessionId,
    /// Request body: the outcome of the session.
    pub finish: FinishDetails,
}

impl FinishSession {
    /// Finishes the session `session_id`.
    pub fn new(session_id: impl Into<SessionId>, finish: FinishDetails) -> Self {
        Self { session_id: session_id.into(), finish }
    }
}

/// Outcome of a session: the body of [`FinishSession`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FinishDetails {
    /// Outcome of the program.
    pub reason: FinishReason,
    /// Description of the outcome. Encoded as null if `None`.
    #[serde(default)]
    pub detail: Option<String>,
}

impl FinishDetails {
    /// Creates an outcome with an optional description.
    #[must_use]
    pub fn new(reason: FinishReason, detail: Option<String>) -> Self {
        Self { reason, detail }
    }
}

/// Outcome of the program that finished a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum FinishReason {
    /// The program completed.
    Success,
    /// The program failed.
    Errored,
    /// The user interrupted the program.
    Interrupted,
}

json_response!(SessionCreated = "create_session", HeartbeatAcknowledged = "session_heartbeat");

json_request! {
    CreateSession: CreateSession => SessionCreated;
    SessionHeartbeat: SessionHeartbeat => HeartbeatAcknowledged;
}

impl ApiRequest for FinishSession {
    type Response = ();
    const ROUTE: Route = Route::FinishSession;

    fn params(&self) -> Vec<&str> {
        vec![self.session_id.as_str()]
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(&self.finish)?))
    }
}
