//! API keys, users and their limits: routes of `tinkex` servers beside the protocol.

use serde::{Deserialize, Serialize};

use crate::codec::{json, query};
use crate::error::InvalidInput;
use crate::ids::ModelId;
use crate::request::{ApiRequest, RequestBody, bare_request, json_request, json_response};
use crate::route::Route;
use crate::secret::Secret;
use crate::setters::setters;
use crate::time::Timestamp;

/// Level of access of an API key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyRole {
    /// Reads and changes the objects of all users, and manages keys.
    Admin,
    /// Reads and changes the objects of its user.
    User,
    /// Reads the objects of its user.
    Read,
}

impl KeyRole {
    /// Returns the name of the role.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::User => "user",
            Self::Read => "read",
        }
    }
}

/// Limits of a user, for all of the user's keys together. `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UserLimits {
    /// Maximum number of samples that are queued or sampled at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
    /// Maximum number of requests without a result, of every kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queued: Option<u64>,
    /// Maximum number of tokens trained on in one day (UTC).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_day: Option<u64>,
    /// Maximum size of the stored checkpoints in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Request for a new API key.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct CreateKey {
    /// Name of the key.
    pub name: String,
    /// User of the key; `None` is the user with the name of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Level of access.
    pub role: KeyRole,
    /// Lifetime in seconds; `None` is no expiry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime_seconds: Option<u64>,
    /// Limits of the user; `None` leaves the limits unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<UserLimits>,
}

impl CreateKey {
    /// Creates a request for a key that does not expire.
    pub fn new(name: impl Into<String>, role: KeyRole) -> Self {
        Self { name: name.into(), user: None, role, lifetime_seconds: None, limits: None }
    }
}

setters!(CreateKey {
    user: Option<String>;
    lifetime_seconds: Option<u64>;
    limits: Option<UserLimits>;
});

/// Description of an API key, without the key itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeyInfo {
    /// Id of the key, which is not secret.
    pub id: String,
    /// Name of the key.
    pub name: String,
    /// User of the key.
    pub user: String,
    /// Level of access.
    pub role: KeyRole,
    /// Time of creation; `None` for the key that the server was started with.
    pub created_at: Option<Timestamp>,
    /// Time from which the key is refused.
    pub expires_at: Option<Timestamp>,
}

impl KeyInfo {
    /// Describes a key.
    pub fn new(
        id: impl Into<String>,
        name: impl Into<String>,
        user: impl Into<String>,
        role: KeyRole,
    ) -> Self {
        let created_at = None;
        let expires_at = None;
        Self { id: id.into(), name: name.into(), user: user.into(), role, created_at, expires_at }
    }
}

setters!(KeyInfo {
    created_at: Option<Timestamp>;
    expires_at: Option<Timestamp>;
});

/// A new API key. The server does not store the key and cannot show it again.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeyCreated {
    /// Description of the key.
    #[serde(flatten)]
    pub info: KeyInfo,
    /// The key.
    pub key: Secret,
}

impl KeyCreated {
    /// Creates the response to a request for a key.
    #[must_use]
    pub fn new(info: KeyInfo, key: Secret) -> Self {
        Self { info, key }
    }
}

/// All API keys of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeyList {
    /// The keys, oldest first.
    pub keys: Vec<KeyInfo>,
}

impl KeyList {
    /// Creates a list.
    #[must_use]
    pub fn new(keys: Vec<KeyInfo>) -> Self {
        Self { keys }
    }
}

/// A user, with limits and current use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UserInfo {
    /// Name of the user.
    pub user: String,
    /// Number of keys that are accepted.
    pub keys: u64,
    /// Limits of the user.
    pub limits: UserLimits,
    /// Current use, in the units of the limits.
    pub usage: UserLimits,
}

impl UserInfo {
    /// Describes a user.
    pub fn new(user: impl Into<String>, keys: u64, limits: UserLimits, usage: UserLimits) -> Self {
        Self { user: user.into(), keys, limits, usage }
    }
}

/// All users of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UserList {
    /// The users, in alphabetical order.
    pub users: Vec<UserInfo>,
}

impl UserList {
    /// Creates a list.
    #[must_use]
    pub fn new(users: Vec<UserInfo>) -> Self {
        Self { users }
    }
}

/// Lists the API keys of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListKeys;

/// Revokes an API key. Requests and streams with the key end at once.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RevokeKey {
    /// Id or name of the key.
    pub key: String,
}

impl RevokeKey {
    /// Requests that the key with this id or name is revoked.
    pub fn new(key: impl Into<String>) -> Self {
        Self { key: key.into() }
    }
}

/// Replaces an API key by a new one with the same id, name, user and role.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RotateKey {
    /// Id or name of the key.
    pub key: String,
}

impl RotateKey {
    /// Requests that the key with this id or name is replaced.
    pub fn new(key: impl Into<String>) -> Self {
        Self { key: key.into() }
    }
}

/// Lists the users of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListUsers;

/// Sets the limits of a user. Limits that are not given are removed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetUserLimits {
    /// Name of the user.
    pub user: String,
    /// New limits.
    pub limits: UserLimits,
}

impl SetUserLimits {
    /// Requests that `user` has `limits`.
    pub fn new(user: impl Into<String>, limits: UserLimits) -> Self {
        Self { user: user.into(), limits }
    }
}

impl ApiRequest for SetUserLimits {
    type Response = ();
    const ROUTE: Route = Route::SetUserLimits;

    fn params(&self) -> Vec<&str> {
        vec![&self.user]
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(&self.limits)?))
    }
}

/// User with whom a run is shared: query of [`ShareRun`] and [`UnshareRun`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ShareTarget {
    /// Name of the user; `None` is every user.
    #[serde(skip_serializing_if = "query::is_blank")]
    pub user: Option<String>,
}

impl From<Option<String>> for ShareTarget {
    fn from(user: Option<String>) -> Self {
        Self { user }
    }
}

/// Lets a user, or every user, read a run and use its checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShareRun {
    /// Id of the run.
    pub run_id: ModelId,
    /// User with whom the run is shared.
    pub target: ShareTarget,
}

impl ShareRun {
    /// Requests that the run is shared with `user`, or with every user if it is `None`.
    pub fn new(run_id: impl Into<ModelId>, user: Option<String>) -> Self {
        Self { run_id: run_id.into(), target: user.into() }
    }
}

/// Ends the sharing of a run with a user, or with everybody.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnshareRun {
    /// Id of the run.
    pub run_id: ModelId,
    /// User with whom the run is no longer shared.
    pub target: ShareTarget,
}

impl UnshareRun {
    /// Requests that the run is no longer shared with `user`, or with anybody if it is `None`.
    pub fn new(run_id: impl Into<ModelId>, user: Option<String>) -> Self {
        Self { run_id: run_id.into(), target: user.into() }
    }
}

json_response!(KeyCreated, KeyList, UserList);

json_request! {
    CreateKey: CreateKey => KeyCreated;
}

bare_request! {
    ListKeys: ListKeys => KeyList, |r| params [];
    RevokeKey: RevokeKey => (), |r| params [r.key.as_str()];
    RotateKey: RotateKey => KeyCreated, |r| params [r.key.as_str()];
    ListUsers: ListUsers => UserList, |r| params [];
    ShareRun: ShareRun => (), |r| params [r.run_id.as_str()], query &r.target;
    UnshareRun: UnshareRun => (), |r| params [r.run_id.as_str()], query &r.target;
}
