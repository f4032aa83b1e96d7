//! Credentials: exchanging a key for a token, and asking about the key itself.

use serde::{Deserialize, Serialize};

use crate::request::{bare_request, json_request, json_response};
use crate::secret::Secret;

/// Exchanges the key in the request's header for a short-lived token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthTokenRequest {}

/// A short-lived token, sent in place of the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthToken {
    /// The token.
    pub jwt: Secret,
}

/// Asks what the key in use is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApiKeyRequest;

/// Revokes the key in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteApiKey;

/// What a key is: everything but the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKeyInfo {
    /// Its number.
    pub key_id: i64,
    /// Its name.
    pub name: String,
    /// What its owner wrote about it.
    pub note: String,
    /// Whose it is.
    pub details: ApiKeyDetails,
}

/// Whose a key is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKeyDetails {
    /// The organization.
    pub org_details: OrgDetails,
    /// The person.
    pub user_details: UserDetails,
}

/// An organization.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrgDetails {
    /// Its name.
    pub name: String,
}

/// A person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserDetails {
    /// Their address.
    pub email: String,
}

json_response!(AuthToken, ApiKeyInfo);

json_request! {
    AuthTokenRequest: AuthToken => AuthToken;
}

bare_request! {
    ApiKeyRequest: GetApiKey => ApiKeyInfo, |c| params [];
    DeleteApiKey: DeleteApiKey => (), |c| params [];
}
