//! Use of the server by each user, for the users' limits.

use std::collections::HashSet;

use tinkex_wire::rest::UserLimits;

use super::{RequestEntry, RequestKind, RequestPhase, RequestRecord, Store, UsageMeter};
use crate::user::UserId;

/// Hours of a day.
const DAY: i64 = 24;

/// Number of a user's requests without an outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedRequests {
    pub requests: u64,
    /// Number of samples that the sampling requests among them ask for.
    pub samples: u64,
    /// Number of tokens of the training passes among them.
    pub tokens: u64,
}

impl UnfinishedRequests {
    pub(super) fn add(&mut self, row: &RequestRecord) {
        self.requests += 1;
        self.samples += samples(row);
        self.tokens = self.tokens.saturating_add(row.tokens);
    }

    pub(super) fn remove(&mut self, entry: &RequestEntry) {
        self.requests = self.requests.saturating_sub(1);
        self.samples = self.samples.saturating_sub(samples(&entry.row));
        if !matches!(entry.phase, RequestPhase::Persisting) {
            self.remove_tokens(&entry.row);
        }
    }

    /// Removes the tokens of a pass that was executed: from now on, its usage counts.
    pub(super) fn remove_tokens(&mut self, row: &RequestRecord) {
        self.tokens = self.tokens.saturating_sub(row.tokens);
    }
}

/// Returns the number of samples that a request asks for; 0 unless it is a sampling request.
fn samples(row: &RequestRecord) -> u64 {
    if row.kind == RequestKind::Sample { u64::from(row.samples) } else { 0 }
}

/// Current use by a user, in the units of [`UserLimits`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CurrentUse {
    pub unfinished: UnfinishedRequests,
    /// Tokens trained on since the start of the day (UTC).
    pub tokens_today: u64,
    /// Size of the stored checkpoints.
    pub bytes: u64,
}

impl Store {
    /// Returns the limits of a user.
    pub fn limits_of(&self, user: &UserId) -> UserLimits {
        self.limits.get(user).copied().unwrap_or_default()
    }

    /// Returns the current use by a user.
    pub fn usage_of(&self, user: &UserId) -> CurrentUse {
        CurrentUse {
            unfinished: self.unfinished.get(user).copied().unwrap_or_default(),
            tokens_today: self.tokens_today(user),
            bytes: self.stored_bytes(user),
        }
    }

    /// Returns the number of tokens that a user has trained on since the start of the day (UTC).
    pub fn tokens_today(&self, user: &UserId) -> u64 {
        let today = self.clock.hour().div_euclid(DAY) * DAY;
        // The keys are sorted by hour.
        let recent = self.usage.iter().rev().take_while(|(key, _)| key.hour >= today);
        let trained = recent
            .filter(|(key, _)| key.owner == *user && key.meter == UsageMeter::Training)
            .map(|(_, count)| *count);
        trained.sum()
    }

    /// Returns the size of the checkpoints of a user's runs. Checkpoints that share files count
    /// once.
    pub fn stored_bytes(&self, user: &UserId) -> u64 {
        let now = self.clock.now();
        let mut counted = HashSet::new();
        let rows = self.checkpoints.values().map(|entry| &entry.row);
        let own = rows.filter(|row| {
            let run = self.runs.get(row.path.run());
            run.is_some_and(|run| run.row.owner == *user) && !row.is_expired(now)
        });
        own.filter(|row| counted.insert(&row.weights)).map(|row| row.size_bytes).sum()
    }

    /// Returns why a user must not store a checkpoint of at least `additional` bytes; `None` if the
    /// user may store it.
    pub fn stored_bytes_spent(&self, user: &UserId, additional: u64) -> Option<String> {
        let limit = self.limits_of(user).bytes?;
        let used = self.stored_bytes(user);
        if used < limit && used.saturating_add(additional) <= limit {
            return None;
        }
        Some(format!(
            "the storage quota of user {user} is spent: the checkpoints have {used} of {limit} \
             bytes; delete checkpoints"
        ))
    }

    /// Counts a request that is removed as finished, if it had no outcome.
    pub(super) fn count_finished(&mut self, entry: &RequestEntry) {
        if entry.finished_at().is_none()
            && let Some(unfinished) = self.unfinished.get_mut(&entry.owner)
        {
            unfinished.remove(entry);
        }
    }
}
