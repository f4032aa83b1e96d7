//! [`Gate`]: when a sample may leave.
//!
//! A sample needs a place among those being sent, and room for its bytes. After a pause there are
//! far fewer places for a while and bytes count many times, so that a server that was overrun is not
//! overrun again. A pass is held until the server has taken the request, not until it is answered.

use std::sync::Arc;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::transport::pause::Pause;

use super::bytes::{ByteBudget, BytePermit};

const PLACES: usize = 400;
const CAREFUL_PLACES: usize = 10;
const CAREFUL_BYTES: u64 = 20;

#[derive(Debug)]
pub(crate) struct Gate {
    places: Semaphore,
    careful_places: Semaphore,
    bytes: Arc<ByteBudget>,
    pause: Arc<Pause>,
}

/// The right to send one request; dropped once the server has it.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    _place: SemaphorePermit<'a>,
    _careful_place: Option<SemaphorePermit<'a>>,
    _bytes: BytePermit,
}

impl Gate {
    pub(crate) fn new(bytes: u64, pause: Arc<Pause>) -> Self {
        Self {
            places: Semaphore::new(PLACES),
            careful_places: Semaphore::new(CAREFUL_PLACES),
            bytes: ByteBudget::new(bytes),
            pause,
        }
    }

    /// Waits for a place and for room.
    pub(crate) async fn enter(&self, bytes: u64) -> Pass<'_> {
        let place = self.places.acquire().await.expect("never closed");
        let careful_place = if self.pause.recent() {
            Some(self.careful_places.acquire().await.expect("never closed"))
        } else {
            None
        };
        let factor = if self.pause.recent() { CAREFUL_BYTES } else { 1 };
        let bytes = self.bytes.take(bytes.saturating_mul(factor)).await;
        Pass { _place: place, _careful_place: careful_place, _bytes: bytes }
    }

    /// What holds all samples back together.
    pub(crate) fn pause(&self) -> &Arc<Pause> {
        &self.pause
    }
}
