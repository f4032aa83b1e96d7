//! API keys and the short-lived tokens that replace them.

use serde::{Deserialize, Serialize};

use crate::request::{bare_request, json_request, json_response};
use crate::secret::Secret;
use crate::setters::setters;

/// Exchanges the API key in the request's header for a short-lived token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthTokenRequest {}

/// Short-lived token: the response to [`AuthTokenRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuthToken {
    /// JSON Web Token to send instead of the API key.
    pub jwt: Secret,
}

impl AuthToken {
    /// Creates a response with the given token.
    pub fn new(jwt: impl Into<Secret>) -> Self {
        Self { jwt: jwt.into() }
    }
}

/// Describes the API key that authenticates the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApiKeyRequest;

/// Revokes the API key that authenticates the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteApiKey;

/// Properties of an API key, without the key itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ApiKeyInfo {
    /// Numeric id of the key.
    pub key_id: i64,
    /// Name of the key.
    pub name: String,
    /// Note that the owner attached to the key.
    pub note: String,
    /// Owner of the key.
    pub details: ApiKeyDetails,
}

impl ApiKeyInfo {
    /// Describes a key without a note.
    pub fn new(key_id: i64, name: impl Into<String>, details: ApiKeyDetails) -> Self {
        Self { key_id, name: name.into(), note: String::new(), details }
    }
}

setters!(ApiKeyInfo { note: impl Into<String> => note.into(); });

/// Owner of an API key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ApiKeyDetails {
    /// Organization that owns the key.
    pub org_details: OrgDetails,
    /// User who created the key.
    pub user_details: UserDetails,
}

impl ApiKeyDetails {
    /// Creates details from the name of the organization and the user's email address.
    pub fn new(organization: impl Into<String>, email: impl Into<String>) -> Self {
        Self {
            org_details: OrgDetails { name: organization.into() },
            user_details: UserDetails { email: email.into() },
        }
    }
}

/// An organization.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OrgDetails {
    /// Name of the organization.
    pub name: String,
}

/// A user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UserDetails {
    /// Email address.
    pub email: String,
}

json_response!(AuthToken, ApiKeyInfo);

json_request! {
    AuthTokenRequest: AuthToken => AuthToken;
}

bare_request! {
    ApiKeyRequest: GetApiKey => ApiKeyInfo, |r| params [];
    DeleteApiKey: DeleteApiKey => (), |r| params [];
}
