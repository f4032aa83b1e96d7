//! `ForwardBackwardRequest`, encoded by clients and decoded by servers.

mod decode;
mod encode;

pub(crate) use decode::decode;
pub(crate) use encode::{encode, validate};
