//! Durable state of the Tinkex server: records, their database, request and result payloads, and
//! the time.
//!
//! * [`record`] defines the rows, [`disk`] writes them and the payloads in groups, and [`store`] is
//!   the copy in memory, which the server rebuilds from the rows at each start.
//! * [`durable`] writes records and waits until they are durable; a failed write is rolled back.
//! * [`sealed`] adds digests to the names of weights folders, and [`disk::check`] verifies a
//!   whole data folder.
//! * [`backup`] copies a data folder while the server runs, and restores the copy.
//! * [`clock`] is the source of all timestamps. No other module reads a clock of the system.
//! * [`executor`] runs loops, tasks and blocking jobs; a simulation brings its own scheduler.
//!
//! The crate depends neither on HTTP nor on the backends that execute the stored requests. The
//! crate is a part of `tinkex-server` and has no stable API.

#![forbid(unsafe_code)]
#![expect(
    missing_docs,
    missing_debug_implementations,
    reason = "only the crates of the server use this crate, and most field names need no comment"
)]

pub mod backup;
pub mod clock;
pub mod decode_jobs;
pub mod disk;
pub mod durable;
pub mod error;
pub mod executor;
pub mod hidden_paths;
pub mod history;
pub mod log;
pub mod random;
pub mod record;
pub mod result_reads;
pub mod sealed;
pub mod store;
pub mod user;
pub mod weights;
