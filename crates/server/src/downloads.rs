//! [`Downloads`]: permissions to download files without an API key.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::keyring::AcceptedKey;

/// Maximum number of permissions. A further permission invalidates the oldest permission.
const MAX_DOWNLOADS: usize = 10_000;

/// Download permissions by token.
#[derive(Default)]
pub(crate) struct Downloads(Mutex<HashMap<String, DownloadGrant>>);

/// Permission to download the files of a folder.
#[derive(Clone)]
pub(crate) struct DownloadGrant {
    /// Name of the folder under `weights/`.
    pub(crate) folder: String,
    pub(crate) expires: Instant,
    /// Key that requested the download. A URL ends with its key.
    pub(crate) key: Arc<AcceptedKey>,
}

impl Downloads {
    /// Returns the permission of a token; `None` if the token is unknown or has expired.
    pub(crate) fn find(&self, token: &str) -> Option<DownloadGrant> {
        let grants = self.0.lock();
        grants.get(token).filter(|grant| grant.expires > Instant::now()).cloned()
    }

    /// Adds a permission. Returns the folders of the permissions that it removed because of
    /// [`MAX_DOWNLOADS`].
    pub(crate) fn insert(&self, token: String, grant: DownloadGrant) -> Vec<String> {
        let mut grants = self.0.lock();
        let mut ended = Vec::new();
        while grants.len() >= MAX_DOWNLOADS {
            let oldest = grants.iter().min_by_key(|(_, grant)| grant.expires);
            let Some(oldest) = oldest.map(|(token, _)| token.clone()) else { break };
            ended.extend(grants.remove(&oldest).map(|grant| grant.folder));
        }
        grants.insert(token, grant);
        ended
    }

    /// Removes the expired permissions and returns their folders.
    pub(crate) fn remove_expired(&self) -> Vec<String> {
        let now = Instant::now();
        let mut ended = Vec::new();
        self.0.lock().retain(|_, grant| {
            let is_valid = grant.expires > now;
            if !is_valid {
                ended.push(grant.folder.clone());
            }
            is_valid
        });
        ended
    }
}
