//! [`Environment`]: threads, random numbers, clocks and cores of the machine that a server runs on.

use std::sync::Arc;

use tinkex_store::clock::{OperatingSystem, SystemClocks};
use tinkex_store::decode_jobs::DecodePolicy;
use tinkex_store::executor::Executor;
use tinkex_store::random::RandomSource;

/// Resources of the machine that a server runs on. A simulation replaces all of them.
pub(crate) struct Environment {
    pub(crate) executor: Executor,
    pub(crate) random: RandomSource,
    pub(crate) clocks: Arc<dyn SystemClocks>,
    pub(crate) decode: DecodePolicy,
}

impl Environment {
    /// Returns the environment of a real server process on this machine.
    pub(crate) fn of_this_machine() -> Self {
        Self {
            executor: Executor::threads(),
            random: RandomSource::System,
            clocks: Arc::new(OperatingSystem),
            decode: DecodePolicy::of_this_machine(),
        }
    }
}
