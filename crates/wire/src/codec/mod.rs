//! Encoders and decoders.
//!
//! [`json`] encodes most bodies, [`query`] query strings, and [`compress`] compresses bodies.
//! Training requests and large results use protobuf through their `to_proto` and `from_proto`
//! methods.

pub mod compress;
pub mod json;
pub(crate) mod proto;
pub mod query;
