//! [`ResultReads`]: reads of results that were evicted from memory, for polls.
//!
//! Polls of the same result share one read and one copy in memory. All copies count towards one
//! budget, from before they are read until the last response that contains them was sent.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::disk::PayloadReader;
use crate::error::ServerError;
use crate::executor::Executor;

/// Number of bytes that one permit of the budget represents.
const UNIT: usize = 4_096;
/// Number of entries above which unused entries are removed.
const MAX_ENTRIES: usize = 64;

/// Results that are being read from disk or sent.
pub struct ResultReads {
    /// The last copy of each result, by payload number. A poll locks the entry while it reads, so
    /// that other polls of the same result wait for its copy.
    entries: Mutex<HashMap<u64, Entry>>,
    budget: Arc<Semaphore>,
    /// Number of permits of the budget.
    units: usize,
}

type Entry = Arc<tokio::sync::Mutex<Weak<ReadResult>>>;

/// A result in memory, and its share of the budget.
struct ReadResult {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

/// Keeps a result in memory while a response contains it.
struct SharedResult(Arc<ReadResult>);

impl AsRef<[u8]> for SharedResult {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl ResultReads {
    /// Creates a budget of `bytes` bytes. A result that exceeds the budget waits until no other
    /// result is being sent.
    pub fn new(bytes: usize) -> Self {
        let units = (bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self { entries: Mutex::default(), budget: Arc::new(Semaphore::new(units)), units }
    }

    /// Waits for a share of the budget, for a response of `size` bytes that is not a result. Keep
    /// the permit until the response was sent.
    ///
    /// # Errors
    /// If the server is shutting down.
    pub async fn reserve(&self, size: usize) -> Result<OwnedSemaphorePermit, ServerError> {
        let units = u32::try_from(size.div_ceil(UNIT).clamp(1, self.units)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.budget).acquire_many_owned(units).await;
        permit.map_err(|_| ServerError::shutting_down())
    }

    /// Reads the result of `size` bytes that has this payload number, or shares the copy of another
    /// poll.
    ///
    /// # Errors
    /// The outer error means that the server is shutting down or the job panicked; the inner error
    /// is the error of [`PayloadReader::payload`].
    pub async fn read(
        &self,
        executor: &Executor,
        number: u64,
        size: usize,
        reader: PayloadReader,
    ) -> Result<io::Result<Bytes>, ServerError> {
        let entry = self.entry(number);
        let mut last = entry.lock().await;
        if let Some(result) = last.upgrade() {
            return Ok(Ok(Bytes::from_owner(SharedResult(result))));
        }
        let permit = self.reserve(size).await?;
        // The job holds the permit, because it continues if the client disconnects.
        let job = move || {
            reader.payload(number).map(|bytes| Arc::new(ReadResult { bytes, _permit: permit }))
        };
        Ok(executor.run_job(job).await?.map(|result| {
            *last = Arc::downgrade(&result);
            Bytes::from_owner(SharedResult(result))
        }))
    }

    fn entry(&self, number: u64) -> Entry {
        let mut entries = self.entries.lock();
        if entries.len() > MAX_ENTRIES {
            let in_use = |entry: &Entry| {
                let copy = entry.try_lock().map_or(1, |last| last.strong_count());
                Arc::strong_count(entry) > 1 || copy > 0
            };
            entries.retain(|_, entry| in_use(entry));
        }
        Arc::clone(entries.entry(number).or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::disk::{Disk, append_request};

    /// Opens a data folder with two payloads of `size` bytes, and returns their numbers.
    fn payloads(folder: &std::path::Path, size: usize) -> (Disk, [u64; 2]) {
        let (mut disk, _) = Disk::open(folder, &Executor::threads()).unwrap();
        let numbers = ["a", "b"].map(|id| append_request(&mut disk, id, &vec![7; size]).unwrap());
        (disk, numbers)
    }

    #[tokio::test]
    async fn polls_of_one_result_share_a_copy() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, [a, b]) = payloads(folder.path(), 10_000);
        let reads = ResultReads::new(1 << 20);
        let executor = Executor::threads();
        let read = |number| reads.read(&executor, number, 10_000, disk.reader());
        let (first, second) = tokio::join!(read(a), read(a));
        let first = first.unwrap().unwrap();
        let second = second.unwrap().unwrap();
        assert_eq!((first.len(), first.as_ptr()), (10_000, second.as_ptr()));
        let other = read(b).await.unwrap().unwrap();
        assert_ne!(first.as_ptr(), other.as_ptr());
        assert_eq!(reads.budget.available_permits(), reads.units - 6, "two results of three units");
        drop((first, second, other));
        assert_eq!(reads.budget.available_permits(), reads.units);
    }

    #[tokio::test]
    async fn results_beyond_the_budget_wait_until_others_were_sent() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, [a, b]) = payloads(folder.path(), 100_000);
        // Each result is larger than the budget.
        let reads = ResultReads::new(50_000);
        let executor = Executor::threads();
        let read = |number| reads.read(&executor, number, 100_000, disk.reader());
        let first = read(a).await.unwrap().unwrap();
        {
            let mut second = pin!(read(b));
            assert!(second.as_mut().now_or_never().is_none());
            drop(first);
            assert_eq!(second.await.unwrap().unwrap().len(), 100_000);
        }
        assert_eq!(reads.budget.available_permits(), reads.units);
        assert!(read(99).await.unwrap().is_err(), "no such payload");
        assert_eq!(reads.budget.available_permits(), reads.units);
    }

    #[tokio::test]
    async fn unused_entries_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, [a, _]) = payloads(folder.path(), 10);
        let reads = ResultReads::new(1 << 20);
        let kept = reads.read(&Executor::threads(), a, 10, disk.reader()).await.unwrap().unwrap();
        for number in 100..300 {
            drop(reads.entry(number));
        }
        let entries = reads.entries.lock().len();
        assert!(entries <= MAX_ENTRIES + 2, "{entries}");
        let again = reads.read(&Executor::threads(), a, 10, disk.reader()).await.unwrap().unwrap();
        assert_eq!(kept.as_ptr(), again.as_ptr());
    }
}
