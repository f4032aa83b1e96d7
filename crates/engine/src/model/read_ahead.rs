//! [`ReadAhead`]: the system reads the next tensors of a file while earlier ones are packed.
//!
//! Packing occupies all threads of the pool. Without a request in advance, the disk would be idle
//! while they compute, and they would be idle while it reads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};

use tinkex_weights::StoredTensor;

/// Maximum number of bytes that are requested but not yet packed.
const WINDOW: usize = 256 << 20;
/// Number of bytes per request. Linux ignores what exceeds its readahead size, 128 KiB by default.
const REQUEST: usize = 128 << 10;
/// Number of packed bytes after which the thread that sends requests continues.
const WAKE_STEP: usize = 4 << 20;
/// Tensors with fewer bytes in total are read without requests in advance.
const MIN_BYTES: usize = 16 << 20;

/// Progress of packing, which limits how far ahead the file is read.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    /// Number of bytes that have been packed.
    used: AtomicUsize,
    is_done: AtomicBool,
    /// Thread that sends the requests.
    thread: OnceLock<Thread>,
}

impl ReadAhead {
    /// Calls `work` while another thread requests the bytes of `tensors` in order. `work` reports
    /// the bytes that it has used.
    pub(super) fn run<R>(tensors: &[StoredTensor<'_>], work: impl FnOnce(&Self) -> R) -> R {
        let progress = Self::default();
        let total = tensors.iter().map(StoredTensor::byte_len).fold(0, usize::saturating_add);
        if total < MIN_BYTES {
            return work(&progress);
        }
        thread::scope(|scope| {
            let name = "tinkex-read-ahead".to_owned();
            let requests = || progress.request(tensors);
            // Without the thread, loading is slower and has the same result.
            if let Ok(thread) = thread::Builder::new().name(name).spawn_scoped(scope, requests) {
                let _ = progress.thread.set(thread.thread().clone());
            }
            // The scope waits for the thread, even if `work` panics.
            let _stop = StopOnDrop(&progress);
            work(&progress)
        })
    }

    /// Reports that `bytes` more bytes of the tensors have been used.
    pub(super) fn advance(&self, bytes: usize) {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        if before / WAKE_STEP != before.wrapping_add(bytes) / WAKE_STEP {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Requests the bytes of the tensors, at most [`WINDOW`] bytes more than have been used.
    fn request(&self, tensors: &[StoredTensor<'_>]) {
        let mut requested = 0_usize;
        for tensor in tensors {
            for start in (0..tensor.byte_len()).step_by(REQUEST) {
                while requested.saturating_sub(self.used.load(Ordering::Relaxed)) > WINDOW {
                    if self.is_done.load(Ordering::Relaxed) {
                        return;
                    }
                    thread::park();
                }
                tensor.read_ahead(start, REQUEST);
                requested += REQUEST.min(tensor.byte_len() - start);
            }
            if self.is_done.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

/// Ends the thread that sends requests.
struct StopOnDrop<'a>(&'a ReadAhead);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.is_done.store(true, Ordering::Relaxed);
        self.0.wake();
    }
}

#[cfg(test)]
mod tests {
    use tinkex_weights::{NamedTensor, TensorFile, TensorSlice, write_tensors};

    use super::*;

    /// Writes a file with one tensor that is large enough for the thread to start.
    fn large_file(folder: &std::path::Path) -> TensorFile {
        let path = folder.join("x.safetensors");
        let values = vec![1.5; MIN_BYTES / size_of::<f32>()];
        let tensor =
            NamedTensor { name: "x", shape: &[values.len()], values: TensorSlice::F32(&values) };
        write_tensors(&path, &[tensor], &[]).unwrap();
        TensorFile::open(&path).unwrap()
    }

    #[test]
    fn the_thread_ends_with_the_work_even_if_nothing_was_used() {
        let folder = tempfile::tempdir().unwrap();
        let file = large_file(folder.path());
        // More requests than fit in the window, so that the thread waits.
        let tensors = vec![file.tensor("x").unwrap(); 2 * WINDOW / MIN_BYTES];
        assert_eq!(ReadAhead::run(&tensors, |_| 7), 7);
        let used = ReadAhead::run(&tensors, |progress| {
            for _ in 0..tensors.len() {
                progress.advance(MIN_BYTES);
            }
            progress.used.load(Ordering::Relaxed)
        });
        assert_eq!(used, 2 * WINDOW);
    }

    #[test]
    fn the_thread_ends_if_the_work_panics() {
        let folder = tempfile::tempdir().unwrap();
        let file = large_file(folder.path());
        let tensors = vec![file.tensor("x").unwrap(); 2 * WINDOW / MIN_BYTES];
        let outcome = std::panic::catch_unwind(|| ReadAhead::run(&tensors, |_| panic!("no")));
        assert!(outcome.is_err());
    }
}
