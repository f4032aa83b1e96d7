//! Requests and responses for listing and managing training runs, checkpoints, sessions and usage.
//!
//! Requests without a body are structs of their path parameters and query, and implement
//! [`ApiRequest`](crate::ApiRequest) like every other request.

mod admin;
mod checkpoint;
mod import;
mod keys;
mod run;
mod search;
mod server;
mod session;

use serde::{Deserialize, Serialize};

pub use admin::*;
pub use checkpoint::*;
pub use import::*;
pub use keys::*;
pub use run::*;
pub use search::*;
pub use server::*;
pub use session::*;

/// Ownership filter of a listing or lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum AccessScope {
    /// Only objects that the caller owns.
    #[default]
    Owned,
    /// All objects that the caller may read, including objects of other users.
    Accessible,
}

/// Query of a lookup that takes an ownership filter and nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ScopeQuery {
    /// Ownership filter. Defaults to [`AccessScope::Owned`].
    pub access_scope: AccessScope,
}

impl From<AccessScope> for ScopeQuery {
    fn from(access_scope: AccessScope) -> Self {
        Self { access_scope }
    }
}

/// Position of a page within the complete list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Cursor {
    /// Number of items before the page.
    pub offset: u64,
    /// Maximum number of items on the page.
    pub limit: u64,
    /// Number of items in the complete list.
    pub total_count: u64,
}

impl Cursor {
    /// Creates the position of the page of at most `limit` items after `offset` items, in a list of
    /// `total_count` items.
    #[must_use]
    pub fn new(offset: u64, limit: u64, total_count: u64) -> Self {
        Self { offset, limit, total_count }
    }
}
