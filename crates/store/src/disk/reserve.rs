//! A file that reserves disk space for deletions.
//!
//! Deleting a checkpoint on a full disk needs some space first: the deletion is a transaction. The
//! writer removes the reserve file, commits the deletion, and creates the reserve file again.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::payloads::{private_file, replacement};
use super::{PAYLOADS, WEIGHTS};
use crate::log;

/// Name of the reserve file in the data folder.
const RESERVE: &str = "reserve";
/// Size of a complete reserve file in bytes: enough for the transactions of many deletions.
const BYTES: u64 = 1 << 20;
/// Free space in bytes that must remain when a new reserve file is created.
const SPARE_BYTES: u64 = 16 << 20;
/// Free space in bytes below which the disk counts as full: one transaction may need this much.
const FULL_BYTES: u64 = 128 << 10;
/// Size of the parts in which the file is written, in bytes.
const PART: usize = 64 << 10;

/// The reserve file of a data folder.
pub(super) struct Reserve {
    path: PathBuf,
}

impl Reserve {
    pub(super) fn new(folder: &Path) -> Self {
        Self { path: folder.join(RESERVE) }
    }

    /// Returns whether a write failed with `error` because the disk is full. SQLite does not always
    /// say so: it reports a file that it cannot create as another error.
    pub(super) fn is_needed(&self, error: &io::Error) -> bool {
        matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            || self.available().is_some_and(|free| free < FULL_BYTES)
    }

    /// Creates the file, or completes it if the disk has enough space. On an almost full disk, for
    /// example after a start that has used the reserve, the file takes half of the free space.
    pub(super) fn keep(&self) {
        let size = fs::metadata(&self.path).map_or(0, |file| file.len());
        if size >= BYTES {
            return;
        }
        let available = self.available().unwrap_or(u64::MAX);
        if available >= SPARE_BYTES {
            self.fill(BYTES);
        } else if size == 0 && available >= 2 * FULL_BYTES {
            self.fill(BYTES.min(available / 2));
        }
    }

    /// Returns the free space of the disk in bytes, if it is known.
    fn available(&self) -> Option<u64> {
        tinkex_files::available_space(self.path.parent().unwrap_or(Path::new(".")))
    }

    /// Creates the file with as many bytes as fit on the disk, up to the complete size.
    pub(super) fn refill(&self) {
        self.fill(BYTES);
    }

    /// Writes the file with as many bytes as fit on the disk, up to `size`.
    fn fill(&self, size: u64) {
        let write = || -> io::Result<()> {
            let mut file = private_file().open(&self.path)?;
            // A file system that compresses must not compress the reserve.
            let mut state = 0x9E37_79B9_7F4A_7C15_u64;
            let mut part = vec![0; PART];
            for _ in 0..size / PART as u64 {
                for bytes in part.as_chunks_mut::<8>().0 {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    *bytes = state.to_le_bytes();
                }
                file.write_all(&part)?;
            }
            Ok(())
        };
        // An incomplete file is a smaller reserve.
        let _ = write();
    }

    /// Removes the file. Returns whether this has freed space.
    pub(super) fn release(&self) -> bool {
        let bytes = fs::metadata(&self.path).map_or(0, |file| file.len());
        fs::remove_file(&self.path).is_ok() && bytes > 0
    }

    /// Frees space for the start of a server: removes the reserve, and files that a crash left
    /// unfinished. Returns whether anything was removed.
    pub(super) fn release_for_start(&self, folder: &Path) -> bool {
        let mut released = self.release();
        let payloads = folder.join(PAYLOADS);
        let leftover = folder.join(format!("{PAYLOADS}.new"));
        released |= leftover.exists() && replacement(&payloads).remove_leftover().is_ok();
        // Folders with temporary names were being written. No record refers to them.
        for entry in fs::read_dir(folder.join(WEIGHTS)).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with('.') {
                released |= fs::remove_dir_all(entry.path()).is_ok();
            }
        }
        if released {
            tracing::warn!(
                target: log::STORAGE,
                "the disk is full; the server starts with the space that it reserves for deletions"
            );
        }
        released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_kept_released_and_refilled() {
        let folder = tempfile::tempdir().unwrap();
        let reserve = Reserve::new(folder.path());
        assert!(!reserve.release());
        reserve.keep();
        let path = folder.path().join(RESERVE);
        assert_eq!(fs::metadata(&path).unwrap().len(), BYTES);
        assert!(reserve.release() && !path.exists());
        reserve.refill();
        assert!(path.exists());
        fs::write(&path, "incomplete").unwrap();
        reserve.keep();
        assert_eq!(fs::metadata(&path).unwrap().len(), BYTES);
    }

    #[test]
    fn a_start_removes_unfinished_files_only() {
        let folder = tempfile::tempdir().unwrap();
        let reserve = Reserve::new(folder.path());
        let weights = folder.path().join(WEIGHTS);
        fs::create_dir_all(weights.join("kept")).unwrap();
        assert!(!reserve.release_for_start(folder.path()), "there is nothing to remove");
        fs::create_dir_all(weights.join(".kept.abc")).unwrap();
        fs::write(folder.path().join("payloads.new"), "copy").unwrap();
        fs::write(folder.path().join(PAYLOADS), "payloads").unwrap();
        assert!(reserve.release_for_start(folder.path()));
        assert!(weights.join("kept").exists() && !weights.join(".kept.abc").exists());
        assert!(folder.path().join(PAYLOADS).exists());
        assert!(!folder.path().join("payloads.new").exists());
    }
}
