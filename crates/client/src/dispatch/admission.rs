//! [`Admission`]: when a sample may leave.
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
pub(crate) struct Admission {
    places: Arc<Limit>,
    careful_places: Arc<Limit>,
    bytes: Arc<Limit>,
    backoff: Arc<Backoff>,
}

/// The right to send one request; dropped once the server has it.
#[derive(Debug)]
pub(crate) struct SubmitPermit {
    _place: Permit,
    _careful_place: Option<Permit>,
    _bytes: Permit,
}

impl Admission {
    pub(crate) fn new(bytes: u64, backoff: Arc<Backoff>) -> Self {
        Self::with_limits(PLACES, CAREFUL_PLACES, bytes, backoff)
    }

    pub(crate) fn with_limits(
        places: u32,
        careful_places: u32,
        bytes: u64,
        backoff: Arc<Backoff>,
    ) -> Self {
        Self {
            places: Limit::concurrency(places),
            careful_places: Limit::concurrency(careful_places),
            bytes: Limit::bytes(bytes),
            backoff,
        }
    }

    /// Waits for a place and for room.
    pub(crate) async fn acquire(&self, bytes: u64) -> SubmitPermit {
        let place = self.places.acquire(1).await;
        let careful_place =
            if self.backoff.recent() { Some(self.careful_places.acquire(1).await) } else { None };
        let factor = if self.backoff.recent() { CAREFUL_BYTES } else { 1 };
        let bytes = self.bytes.acquire(bytes.saturating_mul(factor)).await;
        SubmitPermit { _place: place, _careful_place: careful_place, _bytes: bytes }
    }

    /// What holds all samples back together.
    pub(crate) fn backoff(&self) -> &Arc<Backoff> {
        &self.backoff
    }
}
