//! Which clients share a [`Backoff`]: those of one server with one key, in the whole process.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use sha2::{Digest as _, Sha256};

use crate::config::{BaseUrl, Credential};

use super::backoff::Backoff;

/// Whose pause: the server's address with its path, and the key's fingerprint.
type Owner = (String, [u8; 32]);

static ALL: LazyLock<Mutex<HashMap<Owner, Weak<Backoff>>>> = LazyLock::new(Mutex::default);

impl Backoff {
    /// The pause of a server and key: the same for all who ask, gone with the last of them.
    pub(crate) fn of(base: &BaseUrl, credential: &Credential) -> Arc<Self> {
        let secret = match credential {
            Credential::Key(key) => key.expose(),
            Credential::Command(command) => command,
        };
        let owner = (base.as_str().to_owned(), Sha256::digest(secret.as_bytes()).into());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backoff) = all.get(&owner).and_then(Weak::upgrade) {
            return backoff;
        }
        all.retain(|_, backoff| backoff.strong_count() > 0);
        let backoff = Arc::new(Self::new());
        all.insert(owner, Arc::downgrade(&backoff));
        backoff
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use std::time::Duration;

    use tokio::time::Instant;

    use super::super::backoff::recent;
    use super::*;
    use crate::config::ApiKey;
    use crate::fixture;

    /// Covers AUD.3.
    #[test]
    fn clients_stay_careful_as_long_as_in_the_reference() {
        for case in fixture::cases("sampling_recent_backoff.json") {
            let zero = Instant::now();
            let at = |seconds: f64| zero + Duration::from_secs_f64(seconds);
            let now = at(case["now"].as_f64().unwrap());
            let until = case["backoff_until"].as_f64().map(at);
            assert_eq!(json!(recent(until, now)), case["recent"], "{case}");
            assert_eq!(json!(until.is_some_and(|until| until > now)), case["must_wait"], "{case}");
        }
    }

    /// Covers X8.
    #[tokio::test(start_paused = true)]
    async fn a_short_pause_does_not_end_a_long_one() {
        let (backoff, start) = (Backoff::new(), Instant::now());
        backoff.begin(Duration::from_secs(5));
        backoff.begin(Duration::from_secs(1));
        backoff.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(5));
        backoff.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(5), "over is over");
    }

    /// Covers T0.1.5, T4.2.2, T4.2.3.
    #[test]
    fn one_pause_for_each_server_and_key() {
        let key = |text: &str| Credential::Key(ApiKey::new(text).unwrap());
        let base = |text: &str| text.parse::<BaseUrl>().unwrap();
        let threads: Vec<_> = (0..8)
            .map(|_| {
                std::thread::spawn(move || {
                    Backoff::of(&base("https://one.test:443/"), &key("tml-a"))
                })
            })
            .collect();
        let same: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(same.iter().all(|backoff| Arc::ptr_eq(backoff, &same[0])));
        for (url, other) in [
            ("https://one.test", "tml-b"),
            ("https://two.test", "tml-a"),
            ("https://one.test/path", "tml-a"),
        ] {
            assert!(!Arc::ptr_eq(&Backoff::of(&base(url), &key(other)), &same[0]), "{url} {other}");
        }
        let weak = Arc::downgrade(&same[0]);
        drop(same);
        assert!(weak.upgrade().is_none(), "gone with its last client");
    }
}
