//! Bytes in, types out, and the way back.
//!
//! [`json`] for nearly everything, [`query`] for what stands behind a `?`, [`compress`] for bodies
//! on request. Protobuf, for training
//! requests and the two kinds of large results, is behind their `to_proto` and `from_proto`.

pub mod compress;
pub mod json;
pub(crate) mod proto;
pub mod query;
