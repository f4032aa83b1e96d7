//! `ForwardBackwardRequest`, written by clients and read by servers.

mod decode;
mod encode;

pub(crate) use decode::decode;
pub(crate) use encode::{encode, validate};
