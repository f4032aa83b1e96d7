//! Files of the crate `tinkex_transport` under their module path.

#[path = "../../../transport/src/request/sent_flag.rs"]
pub(crate) mod sent_flag;
#[path = "../../../transport/src/retry/shared_backoff.rs"]
pub(crate) mod shared_backoff;

pub(crate) mod retry {
    pub(crate) use super::shared_backoff;
}

pub(crate) mod request {
    pub(crate) use super::sent_flag;
}
