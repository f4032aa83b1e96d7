//! Start-time fair queuing over users and their sessions.
//!
//! Users with active requests get equal shares, however many requests and sessions they have, and
//! the sessions of a user divide the user's share equally. The caller measures the cost of a request
//! in any unit, such as tokens.
//!
//! ```
//! use tinkex_fairness::{FairShares, FairnessKey};
//!
//! let mut shares = FairShares::default();
//! let batch = shares.enter(&FairnessKey::new("ana", "batch"));
//! let chat = shares.enter(&FairnessKey::new("ben", "chat"));
//! shares.charge(batch, 1_000);
//! assert!(shares.order(chat) < shares.order(batch), "ben has received less");
//! ```

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// User and session to which a request belongs. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FairnessKey {
    /// Name of the user.
    pub user: Arc<str>,
    /// Id of the session.
    pub session: Arc<str>,
}

impl FairnessKey {
    /// Creates the key of a user's session.
    #[must_use]
    pub fn new(user: &str, session: &str) -> Self {
        Self { user: user.into(), session: session.into() }
    }
}

/// Identifies the share of a [`FairnessKey`] while the key has active requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShareId {
    user: usize,
    session: usize,
}

impl ShareId {
    /// Returns a number that identifies the user among the users with active requests.
    #[must_use]
    pub fn user(self) -> usize {
        self.user
    }
}

/// Order of a share: the lowest is next. Sessions of one user are ordered by what they have received,
/// and users by what all of their sessions have received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShareOrder {
    user_received: u64,
    user: usize,
    session_received: u64,
    session: usize,
}

/// Cost of the work done for each user and session.
#[derive(Debug, Default)]
pub struct FairShares {
    users: Level<Arc<str>>,
    sessions: Level<FairnessKey>,
}

impl FairShares {
    /// Adds an active request of a key. Every call needs a call of [`leave`](Self::leave).
    ///
    /// A key without other active requests starts at the lowest amount that an active key of the
    /// same group has received (the sessions of a user, or all users), or at the highest amount if
    /// the group has no active key: time without requests is no credit.
    pub fn enter(&mut self, key: &FairnessKey) -> ShareId {
        let user = self.users.enter(&key.user, 0);
        let session = self.sessions.enter(key, user);
        ShareId { user, session }
    }

    /// Removes an active request.
    pub fn leave(&mut self, id: ShareId) {
        self.users.leave(id.user);
        self.sessions.leave(id.session);
    }

    /// Adds the cost of work that was done for a request.
    pub fn charge(&mut self, id: ShareId, cost: u64) {
        self.users.charge(id.user, cost);
        self.sessions.charge(id.session, cost);
    }

    /// Returns the order of a share.
    #[must_use]
    pub fn order(&self, id: ShareId) -> ShareOrder {
        ShareOrder {
            user_received: self.users.shares[id.user].received,
            user: id.user,
            session_received: self.sessions.shares[id.session].received,
            session: id.session,
        }
    }

    /// Returns whether several sessions have active requests.
    #[must_use]
    pub fn are_several_active(&self) -> bool {
        self.sessions.shares.iter().filter(|share| share.active > 0).nth(1).is_some()
    }
}

/// All users, or all sessions.
#[derive(Debug)]
struct Level<K> {
    shares: Vec<Share<K>>,
    by_key: HashMap<K, usize>,
    /// Indices in `shares` that are not in use.
    free: Vec<usize>,
    /// Number of active requests.
    active: usize,
}

#[derive(Debug)]
struct Share<K> {
    key: K,
    /// Shares of the same group compete: the sessions of a user, or all users.
    group: usize,
    /// Cost of the work that was done, in the unit of the caller.
    received: u64,
    /// Number of active requests.
    active: usize,
}

impl<K> Default for Level<K> {
    fn default() -> Self {
        Self { shares: Vec::new(), by_key: HashMap::new(), free: Vec::new(), active: 0 }
    }
}

/// Number of shares without active requests that may remain before they are removed.
const MAX_IDLE: usize = 64;

impl<K: Clone + Eq + Hash> Level<K> {
    fn enter(&mut self, key: &K, group: usize) -> usize {
        let index = match self.by_key.get(key) {
            Some(index) => *index,
            None => self.insert(key, group),
        };
        // The share itself does not matter: it cannot raise its own amount.
        let floor = self.floor(group);
        let share = &mut self.shares[index];
        if share.active == 0 {
            share.group = group;
            share.received = share.received.max(floor);
        }
        share.active += 1;
        self.active += 1;
        index
    }

    fn insert(&mut self, key: &K, group: usize) -> usize {
        self.remove_idle();
        let share = Share { key: key.clone(), group, received: 0, active: 0 };
        let index = match self.free.pop() {
            Some(index) => {
                self.shares[index] = share;
                index
            }
            None => {
                self.shares.push(share);
                self.shares.len() - 1
            }
        };
        self.by_key.insert(key.clone(), index);
        index
    }

    fn leave(&mut self, index: usize) {
        self.shares[index].active -= 1;
        self.active -= 1;
        if self.active == 0 {
            *self = Self::default();
        }
    }

    fn charge(&mut self, index: usize, cost: u64) {
        let share = &mut self.shares[index];
        share.received = share.received.saturating_add(cost);
    }

    /// Returns the amount at which an idle share of a group starts: the lowest amount that an active
    /// share of the group has received, or the highest amount if all shares are idle.
    fn floor(&self, group: usize) -> u64 {
        let group = || self.shares.iter().filter(move |share| share.group == group);
        let active = group().filter(|share| share.active > 0).map(|share| share.received).min();
        active.or_else(|| group().map(|share| share.received).max()).unwrap_or(0)
    }

    /// Removes shares without active requests if there are many. A share that has received more
    /// than others remains: it would start again with less.
    fn remove_idle(&mut self) {
        let used = self.by_key.len();
        if used < 2 * self.shares.iter().filter(|share| share.active > 0).count() + MAX_IDLE {
            return;
        }
        let mut floors: HashMap<usize, u64> = HashMap::new();
        for index in 0..self.shares.len() {
            let Share { group, received, active, .. } = self.shares[index];
            let in_use = self.by_key.get(&self.shares[index].key) == Some(&index);
            let floor = *floors.entry(group).or_insert_with(|| self.floor(group));
            if in_use && active == 0 && received <= floor {
                self.by_key.remove(&self.shares[index].key);
                self.free.push(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves `rounds` requests of cost 1, each of the share that is next. Returns how many each
    /// share received.
    fn serve(shares: &mut FairShares, ids: &[ShareId], rounds: usize) -> Vec<usize> {
        let mut received = vec![0; ids.len()];
        for _ in 0..rounds {
            let next = (0..ids.len()).min_by_key(|i| shares.order(ids[*i])).unwrap();
            shares.charge(ids[next], 1);
            received[next] += 1;
        }
        received
    }

    #[test]
    fn users_get_equal_shares_and_divide_them_between_their_sessions() {
        let mut shares = FairShares::default();
        let keys = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1")];
        let ids: Vec<_> =
            keys.iter().map(|(user, id)| shares.enter(&FairnessKey::new(user, id))).collect();
        assert!(shares.are_several_active());
        assert_eq!(serve(&mut shares, &ids, 60), [10, 10, 10, 30]);
    }

    #[test]
    fn shares_are_weighted_by_cost() {
        let mut shares = FairShares::default();
        let large = shares.enter(&FairnessKey::new("a", "1"));
        let small = shares.enter(&FairnessKey::new("b", "1"));
        let mut counts = [0, 0];
        for _ in 0..101 {
            let next = usize::from(shares.order(small) < shares.order(large));
            shares.charge([large, small][next], [100, 1][next]);
            counts[next] += 1;
        }
        assert_eq!(counts, [1, 100]);
    }

    #[test]
    fn time_without_requests_is_no_credit_and_no_loss() {
        let mut shares = FairShares::default();
        let a = shares.enter(&FairnessKey::new("a", "1"));
        assert_eq!(serve(&mut shares, &[a], 1_000), [1_000]);
        let b = shares.enter(&FairnessKey::new("b", "1"));
        assert_eq!(serve(&mut shares, &[a, b], 10), [5, 5], "b does not get 1,000 first");
        shares.charge(b, 100);
        shares.leave(b);
        let b = shares.enter(&FairnessKey::new("b", "1"));
        assert_eq!(serve(&mut shares, &[a, b], 100), [100, 0], "what b received still counts");
        // Another session of the same user has not received anything.
        let other = shares.enter(&FairnessKey::new("b", "2"));
        shares.charge(a, 10);
        assert_eq!(serve(&mut shares, &[a, b, other], 2), [0, 1, 1]);
        for id in [a, b, other] {
            shares.leave(id);
        }
        assert!(!shares.are_several_active());
        assert!(shares.users.by_key.is_empty() && shares.sessions.by_key.is_empty());
    }

    #[test]
    fn a_session_gets_no_credit_for_the_time_in_which_its_user_was_idle() {
        let mut shares = FairShares::default();
        // Another user stays active, so that nothing is reset.
        let _other = shares.enter(&FairnessKey::new("b", "1"));
        let first = FairnessKey::new("a", "1");
        let id = shares.enter(&first);
        shares.charge(id, 1_000);
        shares.leave(id);
        let second = shares.enter(&FairnessKey::new("a", "2"));
        let first = shares.enter(&first);
        assert_eq!(serve(&mut shares, &[first, second], 10), [5, 5]);
    }

    #[test]
    fn sessions_that_ended_are_forgotten() {
        let mut shares = FairShares::default();
        let first = shares.enter(&FairnessKey::new("a", "first"));
        for session in 0..10_000 {
            let key = FairnessKey::new("a", &session.to_string());
            let id = shares.enter(&key);
            shares.charge(id, 1);
            shares.charge(first, 1);
            shares.leave(id);
        }
        assert!(shares.sessions.shares.len() < 1_000, "{}", shares.sessions.shares.len());
    }
}
