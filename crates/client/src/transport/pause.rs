//! [`Pause`]: "not before", shared by everyone who uses one server with one key.
//!
//! When a server says that it is too much, all clients of that server and key in this process hold
//! back, and nobody else does.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep_until};

use crate::config::{BaseUrl, Credential};

/// For so long after a pause clients stay careful.
const CAREFUL_FOR: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Pause {
    epoch: Instant,
    /// When it ends, in microseconds since the epoch; 0 if there never was one.
    until: AtomicU64,
}

/// A request that waits for a pause, and begins one when it was too much.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) pause: Arc<Pause>,
    /// Its estimated size.
    pub(crate) bytes: u64,
}

impl Hold {
    /// The server said that this request was too much, and perhaps when to come back.
    pub(crate) fn too_much(&self, asked: Option<Duration>) {
        const LARGE_BYTES: u64 = 128 * 1024;
        let usual = Duration::from_secs(if self.bytes <= LARGE_BYTES { 1 } else { 5 });
        self.pause.begin(asked.unwrap_or(usual));
    }
}

/// Whose pause: the server's address with its path, and the key's fingerprint.
type Owner = (String, [u8; 32]);

static ALL: LazyLock<Mutex<HashMap<Owner, Weak<Pause>>>> = LazyLock::new(Mutex::default);

impl Pause {
    /// The pause of a server and key: the same for all who ask, gone with the last of them.
    pub(crate) fn of(base: &BaseUrl, credential: &Credential) -> Arc<Self> {
        let secret = match credential {
            Credential::Key(key) => key.expose(),
            Credential::Command(command) => command,
        };
        let owner = (base.as_str().to_owned(), Sha256::digest(secret.as_bytes()).into());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pause) = all.get(&owner).and_then(Weak::upgrade) {
            return pause;
        }
        all.retain(|_, pause| pause.strong_count() > 0);
        let pause = Arc::new(Self::new());
        all.insert(owner, Arc::downgrade(&pause));
        pause
    }

    fn new() -> Self {
        Self { epoch: Instant::now(), until: AtomicU64::new(0) }
    }

    /// Nobody sends for `time`. A longer pause that is on already stays as long as it was.
    pub(crate) fn begin(&self, time: Duration) {
        let end = Instant::now().saturating_duration_since(self.epoch) + time;
        let micros = u64::try_from(end.as_micros()).unwrap_or(u64::MAX).max(1);
        self.until.fetch_max(micros, Ordering::AcqRel);
    }

    /// When the last pause ends or ended.
    pub(crate) fn until(&self) -> Option<Instant> {
        match self.until.load(Ordering::Acquire) {
            0 => None,
            micros => Some(self.epoch + Duration::from_micros(micros)),
        }
    }

    /// Waits until there is no pause.
    pub(crate) async fn over(&self) {
        while let Some(until) = self.until().filter(|until| *until > Instant::now()) {
            sleep_until(until).await;
        }
    }

    /// Whether there is a pause, or was one not long ago.
    pub(crate) fn recent(&self) -> bool {
        recent(self.until(), Instant::now())
    }
}

fn recent(until: Option<Instant>, now: Instant) -> bool {
    until.is_some_and(|until| now.saturating_duration_since(until) < CAREFUL_FOR)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
        let (pause, start) = (Pause::new(), Instant::now());
        pause.begin(Duration::from_secs(5));
        pause.begin(Duration::from_secs(1));
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(5));
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(5), "over is over");
    }

    /// Covers T0.1.5, T4.2.2, T4.2.3.
    #[test]
    fn one_pause_for_each_server_and_key() {
        let key = |text: &str| Credential::Key(ApiKey::new(text).unwrap());
        let base = |text: &str| text.parse::<BaseUrl>().unwrap();
        let threads: Vec<_> = (0..8)
            .map(|_| {
                std::thread::spawn(move || Pause::of(&base("https://one.test:443/"), &key("tml-a")))
            })
            .collect();
        let same: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(same.iter().all(|pause| Arc::ptr_eq(pause, &same[0])));
        for (url, other) in [
            ("https://one.test", "tml-b"),
            ("https://two.test", "tml-a"),
            ("https://one.test/path", "tml-a"),
        ] {
            assert!(!Arc::ptr_eq(&Pause::of(&base(url), &key(other)), &same[0]), "{url} {other}");
        }
        let weak = Arc::downgrade(&same[0]);
        drop(same);
        assert!(weak.upgrade().is_none(), "gone with its last client");
    }
}
