//! [`Gate`]: when a sample may leave.
//!
//! A sample needs a place among those being sent, and room for its bytes. After a pause there are
//! far fewer places for a while and bytes count many times, so that a server that was overrun is not
//! overrun again. A pass is held until the server has taken the request, not until it is answered.

use std::sync::Arc;

use crate::transport::backoff::Backoff;

use super::limit::{Limit, Permit};

const PLACES: u32 = 400;
const CAREFUL_PLACES: u32 = 10;
const CAREFUL_BYTES: u64 = 20;

#[derive(Debug)]
pub(crate) struct Gate {
    places: Arc<Limit>,
    careful_places: Arc<Limit>,
    bytes: Arc<Limit>,
    backoff: Arc<Backoff>,
}

/// The right to send one request; dropped once the server has it.
#[derive(Debug)]
pub(crate) struct Pass {
    _place: Permit,
    _careful_place: Option<Permit>,
    _bytes: Permit,
}

impl Gate {
    pub(crate) fn new(bytes: u64, backoff: Arc<Backoff>) -> Self {
        Self::with_places(PLACES, CAREFUL_PLACES, bytes, backoff)
    }

    pub(crate) fn with_places(
        places: u32,
        careful_places: u32,
        bytes: u64,
        backoff: Arc<Backoff>,
    ) -> Self {
        Self {
            places: Limit::of_places(places),
            careful_places: Limit::of_places(careful_places),
            bytes: Limit::of_bytes(bytes),
            backoff,
        }
    }

    /// Waits for a place and for room.
    pub(crate) async fn enter(&self, bytes: u64) -> Pass {
        let place = self.places.take(1).await;
        let careful_place =
            if self.backoff.recent() { Some(self.careful_places.take(1).await) } else { None };
        let factor = if self.backoff.recent() { CAREFUL_BYTES } else { 1 };
        let bytes = self.bytes.take(bytes.saturating_mul(factor)).await;
        Pass { _place: place, _careful_place: careful_place, _bytes: bytes }
    }

    /// What holds all samples back together.
    pub(crate) fn backoff(&self) -> &Arc<Backoff> {
        &self.backoff
    }
}
