//! Sessions: a program's stay on the server, from its first call to its last.

use serde::{Deserialize, Serialize};

use crate::codec::json;
use crate::config::SDK_VERSION;
use crate::ids::SessionId;
use crate::request::{ApiRequest, RequestBody, json_request, json_response};
use crate::route::Route;
use crate::{InvalidInput, JsonObject};

/// Opens a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_session")]
pub struct CreateSession {
    /// Words to find it by.
    pub tags: Vec<String>,
    /// Anything to remember with it; sent as `{}` when there is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<JsonObject>,
    /// The client's version.
    pub sdk_version: String,
    /// The project it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project_id: Option<String>,
    /// A name for people.
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

/// A session was opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_session")]
pub struct SessionCreated {
    /// Its id.
    pub session_id: SessionId,
    /// Something the user should know.
    #[serde(default)]
    pub info_message: Option<String>,
    /// Something the user should look at.
    #[serde(default)]
    pub warning_message: Option<String>,
    /// Something that is wrong, though the session was opened.
    #[serde(default)]
    pub error_message: Option<String>,
}

/// Keeps a session alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "session_heartbeat")]
pub struct SessionHeartbeat {
    /// The session.
    pub session_id: SessionId,
}

/// The session is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "session_heartbeat")]
pub struct HeartbeatAcknowledged {}

/// Ends a session. The first end wins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishSession {
    /// The session.
    pub session_id: SessionId,
    /// How it went.
    pub finish: FinishDetails,
}

/// How a session ended: the body of [`FinishSession`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishDetails {
    /// Why.
    pub reason: FinishReason,
    /// More about it; sent as null when there is nothing.
    #[serde(default)]
    pub detail: Option<String>,
}

/// Why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum FinishReason {
    /// All was done.
    Success,
    /// Something failed.
    Errored,
    /// Someone stopped it.
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

    fn body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(&self.finish)?))
    }
}
