//! Everything that is neither training nor sampling: looking things up, tidying, accounting.
//!
//! A call that carries no body is a struct of its path parameters and a query; see
//! [`ApiRequest`](crate::ApiRequest).

mod admin;
mod checkpoint;
mod run;
mod search;
mod session;

use serde::{Deserialize, Serialize};

pub use admin::*;
pub use checkpoint::*;
pub use run::*;
pub use search::*;
pub use session::*;

/// Whose things are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessScope {
    /// The caller's own.
    #[default]
    Owned,
    /// All that the caller may see.
    Accessible,
}

/// A query that asks only whose things are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScopeQuery {
    /// Whose.
    pub access_scope: AccessScope,
}

/// Where a page stands in the whole list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// How many items come before it.
    pub offset: u64,
    /// How many it has at most.
    pub limit: u64,
    /// How many there are in all.
    pub total_count: u64,
}
