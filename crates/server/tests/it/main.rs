//! The server, driven by the client over loopback.

mod checkpoint;
mod closed;
mod house;
mod order;
mod restart;
mod sampling;
mod training;
