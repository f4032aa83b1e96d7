//! [`PassFiles`]: the durable progress of running passes.
//!
//! A file contains a magic number, the SHA-256 digest of the id of the request and the progress, and
//! the progress as the engine encodes it. A file that is damaged or belongs to another request is not
//! used: the pass begins again.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tinkex_engine::train::PassProgress;
use tinkex_files::{AtomicWrite, remove_file_if_exists};
use tinkex_store::log;
use tinkex_store::store::Store;
use tinkex_wire::RequestId;

const MAGIC: [u8; 8] = *b"TKXPASS1";

/// Length of the magic number and the digest in bytes.
const HEADER: usize = MAGIC.len() + 32;

/// Files with the progress of passes, one for each request, in a folder of their own.
pub(super) struct PassFiles {
    folder: PathBuf,
    /// Requests that have a file.
    existing: BTreeSet<RequestId>,
}

impl PassFiles {
    /// Lists the files in a folder, which need not exist.
    pub(super) fn open(folder: &Path) -> Self {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        for leftover in names.iter().filter(|name| name.ends_with(".new")) {
            // The file of a write that a crash interrupted.
            let _ = remove_file_if_exists(folder.join(leftover));
        }
        let is_id = |name: &String| name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit());
        let existing = names.into_iter().filter(is_id).map(RequestId::from).collect();
        Self { folder: folder.to_owned(), existing }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.existing.is_empty()
    }

    fn path(&self, id: &RequestId) -> PathBuf {
        self.folder.join(id.as_str())
    }

    /// Replaces the file of a request, durably.
    pub(super) fn write(&mut self, id: &RequestId, progress: &PassProgress) -> io::Result<()> {
        let progress = progress.to_bytes();
        let digest = digest(id, &progress);
        let file = AtomicWrite::new(self.path(id)).owner_only().create_folders().single_writer();
        file.write_with(|out| {
            out.write_all(&MAGIC)?;
            out.write_all(&digest)?;
            out.write_all(&progress)
        })?;
        self.existing.insert(id.clone());
        Ok(())
    }

    /// Continues the pass of a request, of which nothing is done, from its file. Returns `None` if
    /// there is no usable file.
    pub(super) fn continued(&self, id: &RequestId, new: PassProgress) -> Option<PassProgress> {
        if !self.existing.contains(id) {
            return None;
        }
        let path = self.path(id);
        let read = tinkex_files::announce(tinkex_files::FileOperation::Read(&path))
            .and_then(|()| std::fs::read(&path));
        let continued = match &read {
            Ok(bytes) => decode(id, bytes).and_then(|progress| new.continued(progress)),
            Err(_) => None,
        };
        match &continued {
            Some(_) => tracing::info!(target: log::MODEL, "the pass continues from its progress"),
            None => tracing::warn!(
                target: log::STORAGE,
                error = read.err().map(tracing::field::display),
                "the progress of a pass cannot be used; the pass begins again"
            ),
        }
        continued
    }

    /// Removes the files of requests that have a durable outcome or no longer exist.
    pub(super) fn remove_finished(&mut self, store: &Store) {
        let Self { folder, existing } = self;
        existing.retain(|id| {
            let is_running =
                store.requests.get(id).is_some_and(|entry| entry.finished_at().is_none());
            // Keep the id of a file that cannot be removed: the next call tries again.
            is_running || remove_file_if_exists(folder.join(id.as_str())).is_err()
        });
    }
}

fn digest(id: &RequestId, progress: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(id.as_str()).chain_update(progress).finalize().into()
}

/// Returns the progress in the content of a file; `None` if the file is damaged or belongs to
/// another request.
fn decode<'a>(id: &RequestId, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let (header, progress) = bytes.split_at_checked(HEADER)?;
    let (magic, found) = header.split_at(MAGIC.len());
    (magic == MAGIC && found == digest(id, progress)).then_some(progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_files_and_files_of_other_requests_are_not_used() {
        let id = RequestId::from("0123456789abcdef0123456789abcdef".to_owned());
        let progress = b"progress";
        let bytes = [&MAGIC[..], &digest(&id, progress), progress].concat();
        assert_eq!(decode(&id, &bytes), Some(&progress[..]));
        assert_eq!(decode(&RequestId::from("another".to_owned()), &bytes), None);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(decode(&id, &damaged), None, "byte {at}");
            assert_eq!(decode(&id, &bytes[..at]), None, "{at} bytes");
        }
    }
}
