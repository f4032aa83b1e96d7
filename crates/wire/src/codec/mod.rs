//! Encoders and decoders.
//!
//! [`json`] encodes most bodies, [`query`] query strings, [`compress`] compresses bodies, and [`sse`]
//! decodes streams of events.
//! Training requests and large results use protobuf through their `to_proto` and `from_proto`
//! methods.

pub mod compress;
pub mod json;
pub(crate) mod proto;
pub mod query;
pub mod sse;
