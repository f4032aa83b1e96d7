//! [`SessionTable`]: the sessions of browsers, in memory and in a file.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tinkex_files::{AtomicWrite, read_private_file, remove_file_if_exists, sync_folder};
use tinkex_store::log;

use super::KeyDigest;

/// Time for which a session is valid.
pub const SESSION_LIFETIME: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Maximum number of sessions of one key. A further session ends the oldest session of the key.
const MAX_SESSIONS: usize = 100;
/// Maximum size of the file in bytes.
const MAX_FILE: u64 = 16 << 20;

/// SHA-256 digest of the token of a session. The file has digests, so that a copy of the file gives
/// no access.
type TokenDigest = [u8; 32];

/// Sessions by the digests of their tokens.
pub(super) struct SessionTable {
    entries: Mutex<HashMap<TokenDigest, DashboardSession>>,
    /// File of the sessions. The lock is held while the file is written, so that an older state
    /// never replaces a newer one.
    file: Option<Mutex<PathBuf>>,
}

#[derive(Clone, Copy)]
struct DashboardSession {
    key: KeyDigest,
    /// Time in seconds.
    expires: u64,
}

/// A session in the file.
#[derive(Serialize, Deserialize)]
struct StoredSession {
    token: TokenDigest,
    key: [u8; 32],
    expires: u64,
}

impl SessionTable {
    pub(super) fn in_memory() -> Self {
        Self { entries: Mutex::default(), file: None }
    }

    /// Reads the sessions of a file.
    pub(super) fn open(path: PathBuf) -> Self {
        let entries = match read(&path) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::warn!(
                    target: log::STORAGE,
                    file = %path.display(),
                    %error,
                    "cannot read the sessions of the dashboard; readers must log in again"
                );
                HashMap::new()
            }
        };
        Self { entries: Mutex::new(entries), file: Some(Mutex::new(path)) }
    }

    /// Returns the key of a session that is valid at the time `now`, in seconds.
    pub(super) fn find(&self, token: &str, now: u64) -> Option<KeyDigest> {
        let entries = self.entries.lock();
        let session = entries.get(&digest(token)).filter(|session| session.expires > now);
        session.map(|session| session.key)
    }

    pub(super) fn contains(&self, token: &str) -> bool {
        self.entries.lock().contains_key(&digest(token))
    }

    /// Adds a session that starts at the time `now`, in seconds, and removes expired sessions.
    pub(super) fn insert(&self, token: &str, key: KeyDigest, now: u64) {
        let expires = now.saturating_add(SESSION_LIFETIME.as_secs());
        {
            let mut entries = self.entries.lock();
            entries.retain(|_, session| session.expires > now);
            let of_key = || entries.iter().filter(|(_, session)| session.key == key);
            if of_key().count() >= MAX_SESSIONS
                && let Some(oldest) = of_key().min_by_key(|(_, session)| session.expires)
            {
                let oldest = *oldest.0;
                entries.remove(&oldest);
            }
            entries.insert(digest(token), DashboardSession { key, expires });
        }
        // A session that is not stored ends at the next start. A full disk must not keep readers
        // out.
        let _ = self.save();
    }

    /// Removes a session.
    ///
    /// # Errors
    /// If the removal could not be stored: the session is valid again after a restart.
    pub(super) fn remove(&self, token: &str) -> io::Result<()> {
        match self.entries.lock().remove(&digest(token)) {
            Some(_) => {}
            None => return Ok(()),
        }
        self.save()
    }

    /// Replaces the file. If that is not possible, for example because the disk is full, removes
    /// the file: a session that has ended must not be valid again after a restart.
    fn save(&self) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let path = file.lock();
        let stored: Vec<StoredSession> = self
            .entries
            .lock()
            .iter()
            .map(|(token, session)| StoredSession {
                token: *token,
                key: session.key.0,
                expires: session.expires,
            })
            .collect();
        let contents = serde_json::to_vec(&stored)?;
        let written = AtomicWrite::new(&*path).owner_only().single_writer().write(contents);
        let Err(error) = written else { return Ok(()) };
        tracing::warn!(
            target: log::STORAGE,
            file = %path.display(),
            %error,
            "cannot store the sessions of the dashboard; they end at the next start"
        );
        remove_file_if_exists(&*path)?;
        path.parent().map_or(Ok(()), sync_folder)
    }
}

fn digest(token: &str) -> TokenDigest {
    Sha256::digest(token).into()
}

/// Reads the sessions of a file. A missing file has no sessions.
fn read(path: &Path) -> io::Result<HashMap<TokenDigest, DashboardSession>> {
    let contents = match read_private_file(path, MAX_FILE) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HashMap::new()),
        read => read?,
    };
    let stored: Vec<StoredSession> = serde_json::from_slice(&contents)?;
    let entry = |stored: StoredSession| {
        let session = DashboardSession { key: KeyDigest(stored.key), expires: stored.expires };
        (stored.token, session)
    };
    Ok(stored.into_iter().map(entry).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const KEY: KeyDigest = KeyDigest([1; 32]);

    #[test]
    fn a_key_has_a_limited_number_of_sessions() {
        let sessions = SessionTable::in_memory();
        sessions.insert("other", KeyDigest([2; 32]), 0);
        for i in 0..=MAX_SESSIONS {
            sessions.insert(&i.to_string(), KEY, i as u64);
        }
        assert!(!sessions.contains("0"), "the oldest session of the key has ended");
        assert!(sessions.contains("1") && sessions.contains("other"));
        sessions.insert("late", KEY, SESSION_LIFETIME.as_secs() + 50);
        assert!(
            !sessions.contains("50") && sessions.contains("51"),
            "expired sessions are removed"
        );
    }

    #[test]
    fn the_file_has_no_tokens_and_belongs_to_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sessions.json");
        let sessions = SessionTable::open(path.clone());
        sessions.insert("token-of-a-session", KEY, 0);
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains("token-of"), "{text}");
        assert!(read_private_file(&path, MAX_FILE).is_ok());
        for damaged in ["{}", "[{}]", &text[1..]] {
            fs::write(&path, damaged).unwrap();
            assert!(!SessionTable::open(path.clone()).contains("token-of-a-session"));
        }
    }

    #[test]
    fn a_session_that_ended_stays_ended_if_the_file_cannot_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sessions.json");
        let sessions = SessionTable::open(path.clone());
        sessions.insert("a", KEY, 0);
        // A folder with the name of the temporary file makes the replacement fail.
        fs::create_dir(folder.path().join("sessions.json.new")).unwrap();
        sessions.remove("a").unwrap();
        assert!(!path.exists());
        assert!(!SessionTable::open(path).contains("a"));
    }
}
