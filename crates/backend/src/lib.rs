//! Types that all backends of the Tinkex server share.
//!
//! A backend executes admitted requests. The engine of the server process is a backend, and so is
//! each upstream. Each backend takes [operations](operation) from its own [queue](queue::Queue),
//! whose type admits only operations that the backend can execute. It returns [outcomes](outcome),
//! which are persisted and published in the same way for all backends. [`upstream`] is the
//! interface to the gateway, which the server uses through trait objects.
//!
//! The crate depends neither on HTTP, nor on the engine, nor on the client. The crate is a part of
//! `tinkex-server` and has no stable API.

#![forbid(unsafe_code)]
#![expect(
    missing_docs,
    missing_debug_implementations,
    reason = "only the crates of the server use this crate, and most field names need no comment"
)]

pub mod context;
pub mod custom_loss;
pub mod histogram;
pub mod metrics;
pub mod model_outcome;
pub mod operation;
pub mod outcome;
pub mod queue;
pub mod upstream;
