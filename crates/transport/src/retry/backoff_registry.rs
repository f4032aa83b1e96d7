//! [`BackoffRegistry`]: the backoffs of this process, or of one custom HTTP service.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use crate::config::{BaseUrl, Credential};

use super::shared_backoff::SharedBackoff;

/// Base URL and SHA-256 of the credential.
type BackoffKey = (String, [u8; 32]);

/// Registry in which all clients with the same base URL and credential find the same
/// [`SharedBackoff`].
///
/// Clients that use the network share the [process-wide](Self::of_process) registry. A custom HTTP
/// service has a registry of its own.
#[derive(Debug, Default)]
pub struct BackoffRegistry(Mutex<HashMap<BackoffKey, Weak<SharedBackoff>>>);

impl BackoffRegistry {
    /// Returns the registry of all clients that use the network.
    pub fn of_process() -> Arc<Self> {
        static REGISTRY: LazyLock<Arc<BackoffRegistry>> = LazyLock::new(Arc::default);
        Arc::clone(&REGISTRY)
    }

    /// Returns the backoff of a base URL and credential. The registry holds a weak reference: the
    /// backoff is dropped with the last client that uses it.
    pub fn get(&self, base_url: &BaseUrl, credential: &Credential) -> Arc<SharedBackoff> {
        let secret = match credential {
            Credential::Key(key) => key.expose(),
            Credential::Command(command) => command,
        };
        let key = (base_url.as_str().to_owned(), Sha256::digest(secret.as_bytes()).into());
        let mut backoffs = self.0.lock();
        if let Some(backoff) = backoffs.get(&key).and_then(Weak::upgrade) {
            return backoff;
        }
        backoffs.retain(|_, backoff| backoff.strong_count() > 0);
        let backoff = Arc::new(SharedBackoff::new());
        backoffs.insert(key, Arc::downgrade(&backoff));
        backoff
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;
    use std::time::Duration;

    use serde_json::json;
    use tokio::time::Instant;

    use super::*;
    use crate::config::ApiKey;
    use crate::fixture;
    use crate::retry::shared_backoff::is_recent;

    /// Covers AUD.3.
    #[test]
    fn a_backoff_counts_as_recent_as_long_as_in_the_python_sdk() {
        for case in fixture::cases("sampling_recent_backoff.json") {
            let zero = Instant::now();
            let at = |seconds: f64| zero + Duration::from_secs_f64(seconds);
            let now = at(case["now"].as_f64().unwrap());
            let until = case["backoff_until"].as_f64().map(at);
            assert_eq!(json!(is_recent(until, now)), case["recent"], "{case}");
            assert_eq!(json!(until.is_some_and(|until| until > now)), case["must_wait"], "{case}");
        }
    }

    /// Covers X8.
    #[tokio::test(start_paused = true)]
    async fn a_short_backoff_does_not_shorten_a_long_one() {
        let backoff = SharedBackoff::new();
        let start = Instant::now();
        backoff.start(Duration::from_secs(5));
        backoff.start(Duration::from_secs(1));
        assert_eq!(backoff.active(), Some(Duration::from_secs(5)));
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((backoff.active(), start.elapsed().as_secs()), (None, 5));
    }

    fn key(text: &str) -> Credential {
        Credential::Key(ApiKey::new(text).unwrap())
    }

    fn base(text: &str) -> BaseUrl {
        text.parse().unwrap()
    }

    /// All threads look up a backoff that does not exist yet at the same moment, many times.
    ///
    /// Covers T4.2.3.
    #[test]
    fn threads_that_race_for_a_new_backoff_get_the_same_one() {
        const THREADS: usize = 4;
        for round in 0..200 {
            let url = base(&format!("https://race-{round}.test"));
            let registry = BackoffRegistry::default();
            let barrier = Barrier::new(THREADS);
            let found: Vec<_> = thread::scope(|scope| {
                let look_up = || {
                    barrier.wait();
                    registry.get(&url, &key("tml-race"))
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(look_up)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(found.iter().all(|backoff| Arc::ptr_eq(backoff, &found[0])), "{round}");
        }
    }

    /// Covers T4.2.2.
    #[test]
    fn one_backoff_for_each_server_and_key() {
        let get = |url, secret| BackoffRegistry::of_process().get(&base(url), &key(secret));
        let same = [get("https://one.test:443/", "tml-a"), get("https://one.test", "tml-a")];
        assert!(Arc::ptr_eq(&same[0], &same[1]), "equal URLs");
        for (url, other) in [
            ("https://one.test", "tml-b"),
            ("https://two.test", "tml-a"),
            ("https://one.test/path", "tml-a"),
        ] {
            assert!(!Arc::ptr_eq(&get(url, other), &same[0]), "{url} {other}");
        }
        let weak = Arc::downgrade(&same[0]);
        drop(same);
        assert!(weak.upgrade().is_none(), "dropped with its last client");
    }
}
