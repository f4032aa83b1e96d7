//! Users, to whom the objects of the server belong.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tinkex_wire::SessionId;
use tinkex_wire::rest::{KeyRole, UserLimits};

use crate::error::ServerError;
use crate::record::UnixMicros;

/// Name of a user. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UserId(Arc<str>);

/// Name of the administrator, to whom the objects belong that no other user created.
const ADMINISTRATOR: &str = "admin";
/// Maximum length of a name in bytes.
const MAX_NAME: usize = 64;

impl UserId {
    /// Returns the administrator.
    #[must_use]
    pub fn administrator() -> Self {
        Self(ADMINISTRATOR.into())
    }

    /// Returns whether the user is the administrator.
    #[must_use]
    pub fn is_administrator(&self) -> bool {
        &*self.0 == ADMINISTRATOR
    }

    /// Checks a name that a client sent. Names become parts of paths and of metrics.
    ///
    /// # Errors
    /// [`ServerError::Invalid`] unless the name has 1 to 64 letters, digits, dots, dashes and
    /// underscores, and begins with a letter or digit.
    pub fn parse(name: &str) -> Result<Self, ServerError> {
        let allowed = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
        let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts_well && name.len() <= MAX_NAME && name.bytes().all(allowed) {
            return Ok(Self(name.into()));
        }
        let shown: String = name.chars().take(MAX_NAME).collect();
        Err(ServerError::invalid(format!(
            "invalid name {shown:?}; expected 1 to {MAX_NAME} letters, digits, dots, dashes and \
             underscores, the first of them a letter or digit"
        )))
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The administrator: records that were stored before the server had users have no owner.
impl Default for UserId {
    fn default() -> Self {
        Self::administrator()
    }
}

/// Converts a stored name, without a check.
impl From<String> for UserId {
    fn from(name: String) -> Self {
        Self(name.into())
    }
}

impl fmt::Display for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// Id of an API key, which is not secret.
pub type KeyId = Arc<str>;

/// Id of the API key that the server was started with.
pub const FIRST_KEY: &str = "first";

/// An API key. The key itself is not stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeyRecord {
    pub id: KeyId,
    pub name: String,
    pub user: UserId,
    pub role: KeyRole,
    /// SHA-256 of the key, in hexadecimal digits.
    pub digest: String,
    pub created_at: UnixMicros,
    /// Time from which the key is refused; `None` if it does not expire.
    pub expires_at: Option<UnixMicros>,
}

/// Limits of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UserRecord {
    pub id: UserId,
    pub limits: UserLimits,
}

/// Who sends a request: the user, and the key that authenticated the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    pub user: UserId,
    pub role: KeyRole,
    pub key: KeyId,
}

impl Principal {
    /// Returns the administrator, authenticated by the key that the server was started with.
    #[must_use]
    pub fn administrator() -> Self {
        let user = UserId::administrator();
        Self { user, role: KeyRole::Admin, key: FIRST_KEY.into() }
    }

    /// Returns whether the principal may see and change the objects of `owner`.
    #[must_use]
    pub fn controls(&self, owner: &UserId) -> bool {
        self.role == KeyRole::Admin || self.user == *owner
    }
}

/// User and session to whom a request is charged.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Account {
    pub owner: UserId,
    pub session: SessionId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for name in ["a", "alice", "ci-runner_2", "a.b", "7"] {
            assert_eq!(UserId::parse(name).unwrap().as_str(), name);
        }
        for name in ["", ".", "..", "-a", "a b", "a/b", "ü", "a\n", &"a".repeat(65)] {
            assert!(UserId::parse(name).is_err(), "{name:?}");
        }
    }
}
