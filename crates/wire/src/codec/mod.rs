//! Bytes in, types out, and the way back.
//!
//! [`json`] for nearly everything, [`proto`] for training requests and the two kinds of large
//! results, [`compress`] for bodies on request.

pub mod compress;
pub mod json;
pub(crate) mod proto;
