//! [`SpaceBudget`]: whether the files of a download fit on the disk.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use tinkex_files::DiskSpace;
use tokio::sync::oneshot;

/// Disk space for the files of one download, which are written at the same time.
#[derive(Debug, Default)]
pub(super) struct SpaceBudget {
    disk: DiskSpace,
    /// Bytes that must stay free for other files.
    reserved: u64,
    /// Bytes that are not yet written, by the path of the incomplete file.
    missing: Mutex<HashMap<PathBuf, u64>>,
    /// Closed when the budget is dropped.
    dropped: Option<oneshot::Sender<Infallible>>,
}

impl SpaceBudget {
    pub(super) fn new(disk: DiskSpace, reserved: u64) -> Self {
        Self { disk, reserved, missing: Mutex::default(), dropped: None }
    }

    /// Returns a receiver that is closed when the budget is dropped. Every open file holds the
    /// budget, also one that a thread is still working on after its download was cancelled.
    pub(super) fn drop_signal(&mut self) -> oneshot::Receiver<Infallible> {
        let (sender, receiver) = oneshot::channel();
        self.dropped = Some(sender);
        receiver
    }

    /// Records that `bytes` of a file are missing, and checks that the missing bytes of all files
    /// fit on the disk.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] with the required and the free space.
    pub(super) fn require(&self, file: &Path, bytes: u64) -> io::Result<()> {
        let mut missing = self.missing();
        missing.insert(file.to_owned(), bytes);
        let needed = missing.values().fold(self.reserved, |sum, more| sum.saturating_add(*more));
        Ok(self.disk.check(file, needed)?)
    }

    /// Records that `bytes` of a file are no longer missing: the file system reports them as used.
    pub(super) fn record_written(&self, file: &Path, bytes: u64) {
        if let Some(missing) = self.missing().get_mut(file) {
            *missing = missing.saturating_sub(bytes);
        }
    }

    fn missing(&self) -> MutexGuard<'_, HashMap<PathBuf, u64>> {
        self.missing.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_the_reserve_share_the_free_space() {
        let budget = SpaceBudget::new(DiskSpace::new(|_| Some(1000)), 100);
        let a = Path::new("a");
        let b = Path::new("b");
        budget.require(a, 800).unwrap();
        let error = budget.require(b, 101).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().starts_with("needs 1001 bytes, but only 1000 bytes are free on"));
        budget.require(b, 100).unwrap();
        // Written bytes no longer count, and a file that starts over counts once.
        budget.record_written(a, 700);
        budget.require(b, 800).unwrap();
        budget.require(a, 101).unwrap_err();
    }
}
