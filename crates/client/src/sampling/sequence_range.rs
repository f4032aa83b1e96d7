//! [`SequenceRange`]: the sequence numbers of one client of a sampling session.
//!
//! Clients of one sampling session must never use the same sequence number, even if they run in
//! different processes. Each client therefore owns a block of numbers, identified by its clone
//! number. The client that created the session is clone 0. Every other client gets its clone number
//! from the server, or draws it at random if the server does not assign one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tinkex_wire::{FuturesTarget, JoinSamplingSession, SamplerId, Seq};

use crate::error::Result;
use crate::future::BatchPoll;
use crate::session::Session;
use crate::transport::RequestOptions;

/// Largest clone number that a client draws at random.
const MAX_RANDOM_CLONE: u64 = 1_000_000_000;

/// Block of sequence numbers that belongs to one client, and the batch poll for its results.
#[derive(Debug)]
pub(super) struct SequenceRange {
    first: u64,
    /// Offset of the next number from `first`.
    next: AtomicU64,
    batch_poll: Option<BatchPoll>,
}

impl SequenceRange {
    /// Returns the range of the client that created the sampling session.
    pub(super) fn of_creator(session: &Session, sampler: &SamplerId) -> Self {
        Self::of_clone(session, sampler, 0)
    }

    /// Requests a clone number from the server and returns its range, for a client that did not
    /// create the sampling session.
    pub(super) async fn join(session: &Session, sampler: &SamplerId) -> Result<Self> {
        let random = || fastrand::u64(1..=MAX_RANDOM_CLONE);
        let clone = if session.config().sample_join_sampling_session {
            let request = JoinSamplingSession::new(sampler.clone());
            match session.transport().send(&request, &RequestOptions::default()).await {
                Ok(joined) => joined.client_counter,
                Err(error) if error.is_missing_endpoint() => random(),
                Err(error) => return Err(error),
            }
        } else {
            random()
        };
        Ok(Self::of_clone(session, sampler, clone))
    }

    fn of_clone(session: &Session, sampler: &SamplerId, clone: u64) -> Self {
        let batch_poll = session.config().sample_use_retrieve_futures.then(|| {
            let target = FuturesTarget::new(sampler.clone(), clone);
            BatchPoll::start(Arc::clone(session.transport()), target, session.adaptive_polling())
        });
        let first = Seq::first_of_clone(clone).get();
        Self { first, next: AtomicU64::new(0), batch_poll }
    }

    /// Returns the next unused sequence number.
    pub(super) fn next(&self) -> Seq {
        Seq::new(self.first + self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the batch poll for this client's results, if the server supports it.
    pub(super) fn batch_poll(&self) -> Option<&BatchPoll> {
        self.batch_poll.as_ref()
    }
}
