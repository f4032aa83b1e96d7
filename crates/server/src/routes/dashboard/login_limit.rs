//! [`LoginLimit`]: limits the attempts to log in with a key.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::connections::ClientAddress;

/// Attempts of one address: 10 at once, then one every 3 s. A reader who mistypes the key waits for
/// 3 s at most.
const PER_ADDRESS: AttemptRate = AttemptRate { burst: 10, interval: Duration::from_secs(3) };
/// Attempts of all addresses: 200 at once, then 20 per second.
const TOTAL: AttemptRate = AttemptRate { burst: 200, interval: Duration::from_millis(50) };
/// Number of addresses above which expired entries are removed.
const MANY_ADDRESSES: usize = 1_024;
/// Time for which an address is known after a login.
const KNOWN_TIME: Duration = Duration::from_secs(30 * 24 * 3_600);

/// Maximum rate of attempts.
struct AttemptRate {
    /// Number of attempts after a long time without attempts.
    burst: u32,
    /// Time after which one further attempt is allowed.
    interval: Duration,
}

/// Limits on failed attempts to log in, per address and in total.
///
/// The total limit does not apply to an address from which a login has succeeded before: an attack
/// from many addresses does not keep known readers out. A loopback address has no limit of its own,
/// because all clients of a reverse proxy may share it.
#[derive(Default)]
pub(super) struct LoginLimit(Mutex<AttemptTable>);

#[derive(Default)]
struct AttemptTable {
    total: AttemptCount,
    addresses: HashMap<ClientAddress, AddressAttempts>,
}

#[derive(Default)]
struct AddressAttempts {
    count: AttemptCount,
    known_until: Option<Instant>,
}

/// An attempt that was counted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LoginAttempt {
    client: Option<ClientAddress>,
    /// Whether the attempt counts towards the total limit.
    in_total: bool,
}

/// Counts attempts: the time at which all attempts so far would have ended at the allowed rate.
/// `None` before the first attempt.
#[derive(Clone, Copy, Default)]
struct AttemptCount(Option<Instant>);

impl AttemptCount {
    /// Returns the time until the next attempt is allowed; zero if it is allowed now.
    fn wait(self, rate: &AttemptRate, now: Instant) -> Duration {
        let allowed = now + rate.interval * (rate.burst - 1);
        self.0.map_or(Duration::ZERO, |busy_until| busy_until.saturating_duration_since(allowed))
    }

    fn add(&mut self, rate: &AttemptRate, now: Instant) {
        self.0 = Some(self.0.map_or(now, |busy_until| busy_until.max(now)) + rate.interval);
    }

    fn take_back(&mut self, rate: &AttemptRate) {
        self.0 = self.0.and_then(|busy_until| busy_until.checked_sub(rate.interval));
    }
}

impl LoginLimit {
    /// Counts an attempt before the key is compared. An attempt counts until
    /// [`succeeded`](Self::succeeded) is called, so that attempts at the same time cannot exceed the
    /// limits. Returns the time to wait if a limit is reached.
    pub(super) fn begin(&self, client: Option<IpAddr>) -> Result<LoginAttempt, Duration> {
        let now = Instant::now();
        let client = client.map(ClientAddress::new).filter(|client| client.is_limited());
        let mut table = self.0.lock();
        let mut is_known = false;
        if let Some(attempts) = client.and_then(|client| table.addresses.get(&client)) {
            is_known = attempts.known_until.is_some_and(|until| until > now);
            let wait = attempts.count.wait(&PER_ADDRESS, now);
            if !wait.is_zero() {
                return Err(wait);
            }
        }
        if !is_known {
            let wait = table.total.wait(&TOTAL, now);
            if !wait.is_zero() {
                return Err(wait);
            }
            table.total.add(&TOTAL, now);
        }
        if let Some(client) = client {
            if table.addresses.len() >= MANY_ADDRESSES {
                // The total rate limits the number of addresses that remain.
                table.addresses.retain(|_, attempts| {
                    let times = [attempts.count.0, attempts.known_until];
                    times.into_iter().flatten().any(|time| time > now)
                });
            }
            table.addresses.entry(client).or_default().count.add(&PER_ADDRESS, now);
        }
        Ok(LoginAttempt { client, in_total: !is_known })
    }

    /// Does not count an attempt, because it had a valid key.
    pub(super) fn succeeded(&self, attempt: &LoginAttempt) {
        let mut table = self.0.lock();
        if attempt.in_total {
            table.total.take_back(&TOTAL);
        }
        let client = attempt.client;
        if let Some(attempts) = client.and_then(|client| table.addresses.get_mut(&client)) {
            attempts.count.take_back(&PER_ADDRESS);
            attempts.known_until = Some(Instant::now() + KNOWN_TIME);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u16) -> Option<IpAddr> {
        let [high, low] = last.to_be_bytes();
        Some(IpAddr::from([192, 0, high, low]))
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_has_a_limited_rate_of_failed_attempts() {
        let limit = LoginLimit::default();
        for _ in 0..PER_ADDRESS.burst {
            limit.begin(address(1)).unwrap();
        }
        assert_eq!(limit.begin(address(1)), Err(PER_ADDRESS.interval));
        limit.begin(address(2)).expect("others are not affected");
        tokio::time::advance(PER_ADDRESS.interval).await;
        limit.begin(address(1)).unwrap();
        assert!(limit.begin(address(1)).is_err());
        tokio::time::advance(PER_ADDRESS.interval).await;
        for _ in 0..100 {
            let attempt = limit.begin(address(1)).expect("logins do not count");
            limit.succeeded(&attempt);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_attack_from_many_addresses_does_not_keep_known_readers_out() {
        let limit = LoginLimit::default();
        limit.succeeded(&limit.begin(address(1)).unwrap());
        let attacker = |i: u16| address(1_000 + i);
        let allowed = (0..5_000).filter(|i| limit.begin(attacker(*i)).is_ok()).count();
        assert_eq!(allowed, TOTAL.burst as usize);
        assert_eq!(limit.begin(address(2)), Err(TOTAL.interval), "an address that is not known");
        limit.begin(address(1)).unwrap();
        assert!(limit.begin(Some([127, 0, 0, 1].into())).is_err(), "the total limit");
        tokio::time::advance(TOTAL.interval).await;
        limit.begin(address(2)).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_without_recent_attempts_are_forgotten() {
        let limit = LoginLimit::default();
        for i in 0..10_000 {
            tokio::time::advance(TOTAL.interval).await;
            limit.begin(address(i)).unwrap();
        }
        assert!(limit.0.lock().addresses.len() <= MANY_ADDRESSES);
    }
}
