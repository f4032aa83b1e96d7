//! [`DashboardAccess`]: who may read the dashboard of a server.
//!
//! A browser logs in with an API key, or with a one-time code that a program with the key has
//! requested, and gets a session: a random token. The server keeps the sessions ([`sessions`]), so
//! that a session ends on the server when its reader logs out or when its key is no longer valid.

mod sessions;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::Instant;

pub use self::sessions::SESSION_LIFETIME;
use self::sessions::SessionTable;

/// Time for which a one-time code is valid.
pub const CODE_LIFETIME: Duration = Duration::from_secs(3_600);
/// Maximum number of unused codes. A further code invalidates the oldest code.
const MAX_CODES: usize = 64;

/// SHA-256 digest of an API key. Sessions and codes belong to a key by its digest: a key with
/// another text is another key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest([u8; 32]);

impl KeyDigest {
    /// Returns the digest of a key.
    #[must_use]
    pub fn of(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }

    /// Returns the bytes of the digest.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Compares two digests in constant time, so that the duration reveals nothing about the key.
    fn equals(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b)) == 0
    }
}

/// Does not print the digest: the text of a short key can be guessed from it.
impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyDigest(..)")
    }
}

/// API keys of a server, besides the key that the server was started with.
pub trait DashboardKeys: Send + Sync {
    /// Returns whether a key is accepted now.
    fn is_valid(&self, key: &KeyDigest) -> bool;
}

/// How a reader of the dashboard has authenticated.
#[derive(Clone, Debug)]
pub enum DashboardLogin {
    /// The server has no key and lets every user of the machine read.
    Open,
    /// The request has this API key.
    Key(KeyDigest),
    /// The request has the token of a session.
    Session {
        /// The token.
        token: String,
        /// Key with which the session was started.
        key: KeyDigest,
    },
}

/// Access to the dashboard of one server.
pub struct DashboardAccess {
    /// The API key of the server; `None` if the server accepts requests without a key.
    key: Option<KeyDigest>,
    /// Further keys of the server; `None` for a dashboard of run folders.
    further_keys: Option<Arc<dyn DashboardKeys>>,
    codes: Mutex<Vec<AccessCode>>,
    sessions: SessionTable,
    /// Becomes true when all streams must end. Notifies when a session has ended.
    closed: watch::Sender<bool>,
}

/// A code that can be exchanged for a session.
struct AccessCode {
    /// SHA-256 digest of the code.
    digest: [u8; 32],
    expires: Instant,
    /// Key of the session.
    key: KeyDigest,
}

impl DashboardAccess {
    /// Creates the access with the API key of the server; `None` if the server accepts requests
    /// without a key. Sessions end with the process.
    #[must_use]
    pub fn new(key: Option<&str>) -> Self {
        Self::with_sessions(key, SessionTable::in_memory())
    }

    /// Creates the access with sessions that continue after a restart, because they are stored in
    /// `file`. A file that cannot be read ends all sessions.
    #[must_use]
    pub fn with_file(key: Option<&str>, file: PathBuf) -> Self {
        Self::with_sessions(key, SessionTable::open(file))
    }

    fn with_sessions(key: Option<&str>, sessions: SessionTable) -> Self {
        let key = key.map(|key| KeyDigest::of(key.as_bytes()));
        Self {
            key,
            further_keys: None,
            codes: Mutex::default(),
            sessions,
            closed: watch::Sender::new(false),
        }
    }

    /// Accepts further keys, besides the key that the server was started with.
    #[must_use]
    pub fn further_keys(mut self, keys: Arc<dyn DashboardKeys>) -> Self {
        self.further_keys = Some(keys);
        self
    }

    /// Returns whether readers must log in.
    pub fn needs_login(&self) -> bool {
        self.key.is_some()
    }

    /// Returns the digest of the server's own key, to which the printed codes belong.
    pub fn own_key(&self) -> Option<KeyDigest> {
        self.key
    }

    /// Returns the digest of `key` if it is an API key of the server.
    pub fn accept_key(&self, key: &[u8]) -> Option<KeyDigest> {
        let digest = KeyDigest::of(key);
        self.is_valid(&digest).then_some(digest)
    }

    /// Returns whether a key is valid. Sessions and codes of other keys are rejected.
    fn is_valid(&self, key: &KeyDigest) -> bool {
        self.key.as_ref().is_some_and(|expected| expected.equals(key))
            || self.further_keys.as_ref().is_some_and(|keys| keys.is_valid(key))
    }

    /// Creates a code that can be exchanged once, within [`CODE_LIFETIME`], for a session of a key.
    pub fn create_code(&self, key: KeyDigest) -> String {
        let code = uuid::Uuid::new_v4().simple().to_string();
        let digest = Sha256::digest(&code).into();
        let mut codes = self.codes.lock();
        if codes.len() >= MAX_CODES {
            codes.remove(0);
        }
        codes.push(AccessCode { digest, expires: Instant::now() + CODE_LIFETIME, key });
        code
    }

    /// Invalidates a code. Returns the key that the code belongs to, if both are valid.
    pub fn redeem_code(&self, code: &str) -> Option<KeyDigest> {
        let now = Instant::now();
        // The time of the comparison reveals at most digests of codes, not codes.
        let digest: [u8; 32] = Sha256::digest(code).into();
        let mut codes = self.codes.lock();
        codes.retain(|code| code.expires > now);
        let found = codes.iter().position(|code| code.digest == digest)?;
        let key = codes.remove(found).key;
        self.is_valid(&key).then_some(key)
    }

    /// Creates a session of a key and returns its token. `now` is in seconds. Blocks until the
    /// session is stored.
    pub fn create_session(&self, key: KeyDigest, now: u64) -> String {
        let token = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].map(uuid::Uuid::simple);
        let token = format!("{}{}", token[0], token[1]);
        self.sessions.insert(&token, key, now);
        self.closed.send_modify(|_| {});
        token
    }

    /// Returns the key of a session that is valid at the time `now`, in seconds.
    pub fn accept_session(&self, token: &str, now: u64) -> Option<KeyDigest> {
        self.sessions.find(token, now).filter(|key| self.is_valid(key))
    }

    /// Ends a session. Blocks until the end is durable.
    ///
    /// # Errors
    /// If the disk cannot be written to: the session has ended, but is valid again after a restart.
    pub fn end_session(&self, token: &str) -> io::Result<()> {
        let ended = self.sessions.remove(token);
        self.closed.send_modify(|_| {});
        ended
    }

    /// Ends all streams. Open streams would delay the shutdown of the server.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Returns the permission of a stream, which lasts as long as `login`.
    pub fn stream_permit(self: &Arc<Self>, login: DashboardLogin) -> StreamPermit {
        StreamPermit { access: Arc::clone(self), login, closed: self.closed.subscribe() }
    }
}

impl fmt::Debug for DashboardAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needs_login = self.needs_login();
        f.debug_struct("DashboardAccess").field("needs_login", &needs_login).finish_non_exhaustive()
    }
}

/// Permission of a stream of changes.
#[derive(Debug)]
pub struct StreamPermit {
    access: Arc<DashboardAccess>,
    login: DashboardLogin,
    closed: watch::Receiver<bool>,
}

impl StreamPermit {
    /// Returns whether the stream may continue.
    pub(crate) fn is_valid(&self) -> bool {
        let is_logged_in = match &self.login {
            DashboardLogin::Open => true,
            DashboardLogin::Key(key) => self.access.is_valid(key),
            DashboardLogin::Session { token, key } => {
                self.access.is_valid(key) && self.access.sessions.contains(token)
            }
        };
        is_logged_in && !*self.closed.borrow()
    }

    /// Waits until a session has ended or the dashboard closes. Then call
    /// [`is_valid`](Self::is_valid).
    pub(crate) async fn changed(&mut self) {
        // Waiting cannot fail: `access` has the sender.
        let _ = self.closed.changed().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(key: &str) -> DashboardAccess {
        DashboardAccess::new(Some(key))
    }

    #[tokio::test(start_paused = true)]
    async fn a_code_works_once_and_expires() {
        let access = access("tml-secret");
        let key = access.own_key().unwrap();
        let create = || access.create_code(key);
        let code = create();
        assert!(access.redeem_code("").is_none() && access.redeem_code(&code[1..]).is_none());
        assert_eq!(access.redeem_code(&code), Some(key));
        assert_eq!(access.redeem_code(&code), None);
        let late = create();
        tokio::time::advance(CODE_LIFETIME).await;
        assert_eq!(access.redeem_code(&late), None);
        let first = create();
        (0..MAX_CODES).for_each(|_| drop(create()));
        assert_eq!(access.redeem_code(&first), None, "too many codes");
        let foreign = access.create_code(KeyDigest::of(b"tml-revoked"));
        assert_eq!(access.redeem_code(&foreign), None, "the key is not valid");
    }

    #[test]
    fn a_session_is_valid_until_it_expires_ends_or_its_key_changes() {
        let folder = tempfile::tempdir().unwrap();
        let open = |key: &str| {
            DashboardAccess::with_file(Some(key), folder.path().join("dashboard-sessions.json"))
        };
        let access = open("tml-secret");
        let key = access.own_key().unwrap();
        let token = access.create_session(key, 1_000);
        let ended = access.create_session(key, 1_000);
        assert_ne!(token, ended, "sessions are random");
        let after = 1_000 + SESSION_LIFETIME.as_secs();
        for (now, expected) in [(1_000, Some(key)), (after - 1, Some(key)), (after, None)] {
            assert_eq!(access.accept_session(&token, now), expected, "{now}");
        }
        for forged in ["", &token[1..], &token.to_uppercase()] {
            assert_eq!(access.accept_session(forged, 1_000), None, "{forged}");
        }
        access.end_session(&ended).unwrap();
        assert_eq!(access.accept_session(&ended, 1_000), None);
        drop(access);
        let restarted = open("tml-secret");
        assert_eq!(restarted.accept_session(&token, 1_000), Some(key));
        assert_eq!(restarted.accept_session(&ended, 1_000), None, "the end is durable");
        drop(restarted);
        assert_eq!(open("tml-other").accept_session(&token, 1_000), None);
    }

    #[tokio::test]
    async fn a_stream_ends_with_its_session() {
        let access = Arc::new(access("tml-secret"));
        let key = access.own_key().unwrap();
        let [ends, stays] = [0, 1].map(|_| access.create_session(key, 0));
        let permit = |token: &str| {
            let login = DashboardLogin::Session { token: token.to_owned(), key };
            access.stream_permit(login)
        };
        let mut ending = permit(&ends);
        let staying = permit(&stays);
        let by_key = access.stream_permit(DashboardLogin::Key(key));
        access.end_session(&ends).unwrap();
        ending.changed().await;
        assert_eq!([&ending, &staying, &by_key].map(StreamPermit::is_valid), [false, true, true]);
        access.close();
        assert_eq!([&staying, &by_key].map(StreamPermit::is_valid), [false, false]);
    }

    #[test]
    fn only_the_exact_key_is_accepted() {
        assert!(access("tml-secret").accept_key(b"tml-secret").is_some());
        assert!(access("tml-secret").accept_key(b"tml-secre").is_none());
        assert!(DashboardAccess::new(None).accept_key(b"").is_none());
    }
}
