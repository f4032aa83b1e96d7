//! [`SequenceRange`]: the numbers of one client of a sampling session, and the poll for its answers.
//!
//! Clients of one sampling session, in whatever process, must never use the same number. Each has a
//! block of its own: the one that made the session is clone 0, another one asks the server which it
//! is, or draws lots where the server does not say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tinkex_wire::{FuturesTarget, JoinSamplingSession, SamplerId, Seq};

use crate::error::Result;
use crate::future::BatchPoll;
use crate::session::Session;
use crate::transport::RequestOptions;

/// How many clones a drawn lot is one of.
const CLONES: u64 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct SequenceRange {
    first: u64,
    next: AtomicU64,
    batch_poll: Option<BatchPoll>,
}

impl SequenceRange {
    /// The line of the client that made the sampling session.
    pub(super) fn of_maker(session: &Session, sampler: &SamplerId) -> Self {
        Self::of_clone(session, sampler, 0)
    }

    /// The line of another client, which may have to ask for its place.
    pub(super) async fn join(session: &Session, sampler: &SamplerId) -> Result<Self> {
        let clone = if session.config().sample_join_sampling_session {
            let call = JoinSamplingSession { sampling_session_id: sampler.clone() };
            session.transport().send(&call, &RequestOptions::default()).await?.client_counter
        } else {
            fastrand::u64(1..=CLONES)
        };
        Ok(Self::of_clone(session, sampler, clone))
    }

    fn of_clone(session: &Session, sampler: &SamplerId, clone: u64) -> Self {
        let batch_poll = session.config().sample_use_retrieve_futures.then(|| {
            let target =
                FuturesTarget { sampling_session_id: sampler.clone(), cloned_sampler_id: clone };
            let patience = session.settings().retry.patience();
            BatchPoll::watch(
                Arc::clone(session.transport()),
                target,
                session.adaptive_polling(),
                patience,
            )
        });
        let first = Seq::first_of_clone(clone).get();
        Self { first, next: AtomicU64::new(0), batch_poll }
    }

    /// The next number.
    pub(super) fn next(&self) -> Seq {
        Seq::new(self.first + self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Where answers are announced, if the server does that.
    pub(super) fn batch_poll(&self) -> Option<&BatchPoll> {
        self.batch_poll.as_ref()
    }
}
