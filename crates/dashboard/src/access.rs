//! [`DashboardAccess`]: one-time codes and sessions of the dashboard.
//!
//! A session is a token with its expiry time and a signature by the API key of the server. The
//! server stores no sessions: a session stays valid after a restart, and becomes invalid when the
//! key changes.

use std::fmt::{self, Write as _};
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

/// Time for which a session is valid.
pub const SESSION_LIFETIME: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Time for which a one-time code is valid.
pub const CODE_LIFETIME: Duration = Duration::from_secs(3_600);
/// Maximum number of unused codes. A further code invalidates the oldest code.
const MAX_CODES: usize = 64;
/// Block size of SHA-256 in bytes.
const BLOCK: usize = 64;

/// Access to the dashboard of one server.
pub struct DashboardAccess {
    /// Key that signs sessions; `None` if the server accepts requests without a key.
    key: Option<String>,
    codes: Mutex<Vec<(String, Instant)>>,
}

impl DashboardAccess {
    /// Creates the access with the API key of the server; `None` if the server accepts requests
    /// without a key.
    #[must_use]
    pub fn new(key: Option<String>) -> Self {
        Self { key, codes: Mutex::default() }
    }

    /// Returns whether readers must log in.
    pub fn needs_login(&self) -> bool {
        self.key.is_some()
    }

    /// Returns whether `key` is the API key.
    pub fn accepts_key(&self, key: &[u8]) -> bool {
        self.key.as_ref().is_some_and(|expected| {
            equal(&Sha256::digest(key), &Sha256::digest(expected.as_bytes()))
        })
    }

    /// Creates a code that can be exchanged for a session once, within [`CODE_LIFETIME`].
    pub fn create_code(&self) -> String {
        let code = uuid::Uuid::new_v4().simple().to_string();
        let mut codes = self.codes.lock();
        if codes.len() >= MAX_CODES {
            codes.remove(0);
        }
        codes.push((code.clone(), Instant::now() + CODE_LIFETIME));
        code
    }

    /// Invalidates a code. Returns whether the code was valid.
    pub fn redeem_code(&self, code: &str) -> bool {
        let now = Instant::now();
        let mut codes = self.codes.lock();
        codes.retain(|(_, expires)| *expires > now);
        let digest = Sha256::digest(code);
        let found = codes.iter().position(|(known, _)| equal(&Sha256::digest(known), &digest));
        found.map(|position| codes.remove(position)).is_some()
    }

    /// Creates a session. `now` is in seconds.
    pub fn create_session(&self, now: u64) -> String {
        let expires = now.saturating_add(SESSION_LIFETIME.as_secs());
        let content = format!("{expires:x}.{}", uuid::Uuid::new_v4().simple());
        let signature = self.sign(&content);
        format!("{content}.{signature}")
    }

    /// Returns whether a session is valid at the time `now`, in seconds.
    pub fn accepts_session(&self, token: &str, now: u64) -> bool {
        let Some((content, signature)) = token.rsplit_once('.') else { return false };
        let expires =
            content.split_once('.').and_then(|(hex, _)| u64::from_str_radix(hex, 16).ok());
        let genuine = equal(self.sign(content).as_bytes(), signature.as_bytes());
        genuine && expires.is_some_and(|expires| expires > now)
    }

    /// Returns the HMAC-SHA256 of `content`, in hexadecimal digits.
    fn sign(&self, content: &str) -> String {
        let key = self.key.as_deref().unwrap_or_default();
        // The text makes the signing key specific to sessions: a signature that was made with the
        // same API key for another purpose is not a valid session.
        let key = Sha256::digest(format!("tinkex dashboard session\n{key}"));
        let mut block = [0_u8; BLOCK];
        block[..key.len()].copy_from_slice(&key);
        let inner = Sha256::new().chain_update(block.map(|byte| byte ^ 0x36));
        let inner = inner.chain_update(content).finalize();
        let outer = Sha256::new().chain_update(block.map(|byte| byte ^ 0x5c));
        outer.chain_update(inner).finalize().iter().fold(String::new(), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// Does not print the key, which is secret.
impl fmt::Debug for DashboardAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needs_login = self.needs_login();
        f.debug_struct("DashboardAccess").field("needs_login", &needs_login).finish_non_exhaustive()
    }
}

/// Compares two byte strings of the same length in constant time, so that the duration reveals
/// nothing about the secret.
fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(key: &str) -> DashboardAccess {
        DashboardAccess::new(Some(key.to_owned()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_code_works_once_and_expires() {
        let access = access("tml-secret");
        let code = access.create_code();
        assert!(!access.redeem_code("") && !access.redeem_code(&code[1..]));
        assert!(access.redeem_code(&code));
        assert!(!access.redeem_code(&code));
        let late = access.create_code();
        tokio::time::advance(CODE_LIFETIME).await;
        assert!(!access.redeem_code(&late));
        let first = access.create_code();
        (0..MAX_CODES).for_each(|_| drop(access.create_code()));
        assert!(!access.redeem_code(&first), "too many codes");
    }

    #[tokio::test]
    async fn a_session_is_valid_until_it_expires_or_the_key_changes() {
        let token = access("tml-secret").create_session(1_000);
        let after = 1_000 + SESSION_LIFETIME.as_secs();
        assert!(access("tml-secret").accepts_session(&token, 1_000), "another process");
        assert!(access("tml-secret").accepts_session(&token, after - 1));
        assert!(!access("tml-secret").accepts_session(&token, after));
        assert!(!access("tml-other").accepts_session(&token, 1_000));
        let later = format!("fffffffff{}", &token[9..]);
        for forged in ["", ".", "..", "ffffffffff.a.", &later, &token[..token.len() - 1]] {
            assert!(!access("tml-secret").accepts_session(forged, 1_000), "{forged}");
        }
        assert_ne!(token, access("tml-secret").create_session(1_000), "sessions are random");
    }

    #[test]
    fn only_the_exact_key_is_accepted() {
        assert!(access("tml-secret").accepts_key(b"tml-secret"));
        assert!(!access("tml-secret").accepts_key(b"tml-secre"));
        assert!(!DashboardAccess::new(None).accepts_key(b""));
    }
}
