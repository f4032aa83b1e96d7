//! [`Keyring`]: the API keys that the server accepts, by their digests.
//!
//! A key has 256 random bits, so its digest needs no salt and no slow hash: an attacker cannot try enough
//! keys to find the one with a given digest ([ADR 83](../../../docs/adr/0083-users-and-keys.md)).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use sha2::{Digest as _, Sha256};
use tinkex_dashboard::{DashboardKeys, KeyDigest};
use tinkex_store::clock::Clock;
use tinkex_store::store::UnixMicros;
use tinkex_store::user::{KeyId, KeyRecord, Principal};
use tinkex_wire::Secret;
use tokio::sync::watch;

/// SHA-256 of a key.
type Digest = [u8; 32];

/// Keys that the server accepts.
pub(crate) struct Keyring {
    clock: Clock,
    keys: RwLock<HashMap<Digest, Arc<AcceptedKey>>>,
    /// The administrator's key, or the permission of everybody if the server has no key.
    first: Arc<AcceptedKey>,
}

/// A key that was accepted, and whom it authenticates.
pub(crate) struct AcceptedKey {
    pub(crate) principal: Principal,
    expires_at: Option<UnixMicros>,
    clock: Clock,
    /// Becomes true when the key is revoked or replaced.
    revoked: watch::Sender<bool>,
}

impl AcceptedKey {
    fn new(principal: Principal, expires_at: Option<UnixMicros>, clock: &Clock) -> Arc<Self> {
        let revoked = watch::Sender::new(false);
        Arc::new(Self { principal, expires_at, clock: clock.clone(), revoked })
    }

    /// Returns whether the key is neither revoked nor expired.
    pub(crate) fn is_valid(&self) -> bool {
        !*self.revoked.borrow() && self.remaining().is_none_or(|remaining| !remaining.is_zero())
    }

    /// Returns the time until the key expires; `None` if it does not expire.
    fn remaining(&self) -> Option<Duration> {
        let remaining = self.expires_at?.saturating_sub(self.clock.now());
        Some(Duration::from_micros(u64::try_from(remaining).unwrap_or(0)))
    }

    /// Waits until the key is revoked or expires.
    pub(crate) async fn ended(&self) {
        let mut revoked = self.revoked.subscribe();
        loop {
            let Some(remaining) = self.remaining() else {
                // Waiting cannot fail: `self` has the sender.
                let _ = revoked.wait_for(|revoked| *revoked).await;
                return;
            };
            if remaining.is_zero() {
                return;
            }
            // Read the clock again afterwards: it may differ from the time of the runtime.
            let wait = revoked.wait_for(|revoked| *revoked);
            if tokio::time::timeout(remaining, wait).await.is_ok() {
                return;
            }
        }
    }
}

/// Returns the digest of a key in hexadecimal digits, as it is stored.
pub(crate) fn hex_digest(key: &Secret) -> String {
    Sha256::digest(key.expose()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_digest(hex: &str) -> Option<Digest> {
    let mut digest = Digest::default();
    if hex.len() != 2 * digest.len() {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(digest)
}

impl Keyring {
    /// Creates the keyring of a server that was started with the key `first`; `None` if the server
    /// accepts requests without a key.
    pub(crate) fn new<'a>(
        clock: &Clock,
        first: Option<&Secret>,
        records: impl Iterator<Item = &'a KeyRecord>,
    ) -> Self {
        let administrator = AcceptedKey::new(Principal::administrator(), None, clock);
        let keyring = Self {
            clock: clock.clone(),
            keys: RwLock::default(),
            first: Arc::clone(&administrator),
        };
        records.for_each(|record| keyring.set(record));
        if let Some(first) = first {
            // Insert the first key last: a stored key with the same text must not replace it.
            let digest = Sha256::digest(first.expose()).into();
            keyring.keys.write().insert(digest, administrator);
        }
        keyring
    }

    /// Returns the permission of the administrator.
    pub(crate) fn administrator(&self) -> Arc<AcceptedKey> {
        Arc::clone(&self.first)
    }

    /// Finds a key that is valid now. The time of the lookup reveals at most digests, not keys.
    pub(crate) fn find(&self, sent: &[u8]) -> Option<Arc<AcceptedKey>> {
        self.find_digest(&Sha256::digest(sent).into())
    }

    /// Finds the key with a digest, if the key is valid now.
    pub(crate) fn find_digest(&self, digest: &Digest) -> Option<Arc<AcceptedKey>> {
        self.keys.read().get(digest).filter(|key| key.is_valid()).cloned()
    }

    /// Finds the key with an id, if the key is valid now.
    pub(crate) fn find_id(&self, id: &KeyId) -> Option<Arc<AcceptedKey>> {
        if self.first.principal.key == *id {
            return Some(self.administrator());
        }
        let keys = self.keys.read();
        keys.values().find(|key| key.principal.key == *id && key.is_valid()).cloned()
    }

    /// Accepts a key. Another key with the same id is revoked.
    pub(crate) fn set(&self, record: &KeyRecord) {
        self.revoke(&record.id);
        let Some(digest) = parse_digest(&record.digest) else { return };
        let KeyRecord { user, role, id, expires_at, .. } = record.clone();
        let principal = Principal { user, role, key: id };
        self.keys.write().insert(digest, AcceptedKey::new(principal, expires_at, &self.clock));
    }

    /// Revokes the key with this id. Requests and streams with the key end at once.
    pub(crate) fn revoke(&self, id: &KeyId) {
        self.keys.write().retain(|_, key| {
            let is_kept = key.principal.key != *id;
            if !is_kept {
                key.revoked.send_replace(true);
            }
            is_kept
        });
    }
}

impl DashboardKeys for Keyring {
    fn is_valid(&self, key: &KeyDigest) -> bool {
        self.find_digest(key.as_bytes()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use tinkex_store::clock::ManualClocks;
    use tinkex_store::user::UserId;
    use tinkex_wire::rest::KeyRole;

    use super::*;

    fn record(id: &str, key: &str, expires_at: Option<UnixMicros>) -> KeyRecord {
        KeyRecord {
            id: id.into(),
            name: id.to_owned(),
            user: UserId::parse("alice").unwrap(),
            role: KeyRole::User,
            digest: hex_digest(&key.into()),
            created_at: 0,
            expires_at,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn keys_end_when_they_are_revoked_replaced_or_expire() {
        let clock = Clock::resume(ManualClocks::new(1, "boot", 1), None, None);
        let keyring = Keyring::new(&clock, Some(&"tml-first".into()), std::iter::empty());
        keyring.set(&record("a", "tml-a", None));
        keyring.set(&record("b", "tml-b", Some(clock.in_seconds(60))));
        assert_eq!(keyring.find(b"tml-first").unwrap().principal.role, KeyRole::Admin);
        assert!(keyring.find(b"tml-other").is_none());
        let [a, b] = [&b"tml-a"[..], b"tml-b"].map(|key| keyring.find(key).unwrap());
        keyring.set(&record("a", "tml-a2", None));
        a.ended().await;
        assert!(!a.is_valid() && keyring.find(b"tml-a").is_none());
        assert!(keyring.find(b"tml-a2").is_some() && keyring.find_id(&"a".into()).is_some());
        assert!(b.is_valid());
        b.ended().await;
        assert!(!b.is_valid() && keyring.find(b"tml-b").is_none());
        keyring.revoke(&"a".into());
        assert!(keyring.find(b"tml-a2").is_none() && keyring.find_id(&"a".into()).is_none());
    }

    #[tokio::test]
    async fn a_stored_key_does_not_replace_the_first_key() {
        let clock = Clock::resume(ManualClocks::new(1, "boot", 1), None, None);
        let stored = record("a", "tml-first", None);
        let keyring = Keyring::new(&clock, Some(&"tml-first".into()), std::iter::once(&stored));
        assert_eq!(keyring.find(b"tml-first").unwrap().principal, Principal::administrator());
    }
}
