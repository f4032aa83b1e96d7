//! The dashboard: the documents, events and files of the web page at `/`, without HTTP.
//!
//! | Task | Types |
//! |---|---|
//! | Read the documents of the page | [`Documents`] of a running server or of run folders |
//! | Send changes while they happen | [`ChangeEvents`] |
//! | Read metrics and samples from the database | [`History`] |
//! | Decide who may read | [`DashboardAccess`] |
//! | Send the page itself | [`Asset`] |
//!
//! `tinkex-store` writes the history, and `tinkex-server` has the routes.

#![forbid(unsafe_code)]

mod access;
mod asset;
mod document;
mod events;
mod folders;
mod history;
mod live;
mod query;
mod samples;
mod source;

use tinkex_store::{error, record, store};

pub use self::access::{
    CODE_LIFETIME, DashboardAccess, DashboardKeys, DashboardLogin, KeyDigest, SESSION_LIFETIME,
    StreamPermit,
};
pub use self::asset::Asset;
pub use self::document::{FigureDocument, FiguresDocument, LimitsDocument, UpstreamDocument};
pub use self::events::ChangeEvents;
pub use self::history::History;
pub use self::live::{LiveSource, ServerView};
pub use self::query::QueryParams;
pub use self::source::Documents;
use self::source::{ChangeCursor, DashboardSource, DocumentResult};
