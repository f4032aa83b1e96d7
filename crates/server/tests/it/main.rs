//! The server, driven by the client over loopback.

#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

mod checkpoint;
mod closed;
mod house;
mod order;
mod restart;
mod sampling;
mod training;
