//! Limits of users: concurrent samples, queued requests, training tokens per day, stored bytes.
//!
//! A limit that another request or time relieves gets 429, which clients retry. A spent quota gets
//! 403, so that clients fail at once: they would retry 402 silently.

use tinkex_store::error::ServerError;
use tinkex_store::store::{RequestKind, Store};
use tinkex_store::user::UserId;

use crate::inference::Generations;

/// What a request adds to the use by its user.
#[derive(Clone, Copy, Debug)]
pub(super) struct UserDemand {
    pub(super) kind: RequestKind,
    /// Number of samples of a sampling request.
    pub(super) samples: u64,
    /// Number of tokens of a training pass.
    pub(super) tokens: u64,
}

/// Checks that a request is within the limits of the user to whom it is charged.
pub(super) fn check_user_limits(
    store: &Store,
    generations: &Generations,
    user: &UserId,
    demand: UserDemand,
) -> Result<(), ServerError> {
    let limits = store.limits_of(user);
    check_queued(store, generations, user)?;
    if demand.kind == RequestKind::Sample {
        check_samples(store, generations, user, demand.samples)?;
    }
    if let Some(limit) = limits.tokens_per_day.filter(|_| demand.tokens > 0) {
        let unfinished = store.unfinished.get(user).map_or(0, |unfinished| unfinished.tokens);
        let used = store.tokens_today(user).saturating_add(unfinished);
        if used.saturating_add(demand.tokens) > limit {
            return Err(ServerError::forbidden(format!(
                "the training quota of user {user} is spent: {used} of {limit} tokens of today \
                 (UTC) are used, and this pass has {}; the quota is renewed at midnight UTC",
                demand.tokens
            )));
        }
    }
    let saves = matches!(
        demand.kind,
        RequestKind::SaveWeights
            | RequestKind::SaveWeightsForSampler
            | RequestKind::SaveWeightsExternal
    );
    if saves { check_stored_bytes(store, user, 0) } else { Ok(()) }
}

/// Checks that a user may start an inference request of `samples` completions.
pub(crate) fn check_generation(
    store: &Store,
    generations: &Generations,
    user: &UserId,
    samples: u64,
) -> Result<(), ServerError> {
    check_queued(store, generations, user)?;
    check_samples(store, generations, user, samples)
}

fn check_queued(
    store: &Store,
    generations: &Generations,
    user: &UserId,
) -> Result<(), ServerError> {
    let Some(limit) = store.limits_of(user).queued else { return Ok(()) };
    if limit == 0 {
        // Clients would retry 429 for ever.
        return Err(ServerError::forbidden(format!(
            "user {user} may not submit requests: the limit of queued requests is 0"
        )));
    }
    let queued = store.unfinished.get(user).map_or(0, |unfinished| unfinished.requests);
    let queued = queued + generations.of_user(user).requests;
    if queued < limit {
        return Ok(());
    }
    Err(ServerError::busy(format!(
        "user {user} has {queued} requests without a result, the limit is {limit}"
    )))
}

fn check_samples(
    store: &Store,
    generations: &Generations,
    user: &UserId,
    samples: u64,
) -> Result<(), ServerError> {
    let Some(limit) = store.limits_of(user).samples else { return Ok(()) };
    if samples > limit {
        return Err(ServerError::invalid(format!(
            "num_samples: {samples} samples, the limit of user {user} is {limit} at a time"
        )));
    }
    let running = store.unfinished.get(user).map_or(0, |unfinished| unfinished.samples);
    let running = running + generations.of_user(user).samples;
    if running.saturating_add(samples) <= limit {
        return Ok(());
    }
    Err(ServerError::busy(format!(
        "user {user} has {running} samples that are queued or sampled, the limit is {limit}"
    )))
}

/// Checks that a user may store a checkpoint of at least `additional` bytes.
pub(crate) fn check_stored_bytes(
    store: &Store,
    user: &UserId,
    additional: u64,
) -> Result<(), ServerError> {
    store
        .stored_bytes_spent(user, additional)
        .map_or(Ok(()), |reason| Err(ServerError::forbidden(reason)))
}
