//! [`ReadAhead`]: a thread reads the tensors of a file in order, ahead of the threads that pack them.
//!
//! Packing occupies all threads of the pool. Without a thread that reads, the disk would be idle
//! while the pool computes, and the threads of the pool would read several parts of the file at
//! once, which is slower than reading the file in order.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::{Condvar, Mutex};
use tinkex_weights::StoredTensor;

/// Maximum number of bytes that are read but not yet packed.
const WINDOW: usize = 256 << 20;
/// Number of bytes that are read at a time.
const READ_BYTES: usize = 256 << 10;
/// Tensors with fewer bytes in total are read by the threads that pack them.
const MIN_BYTES: usize = 16 << 20;

/// Progress of the thread that reads, and of the threads that pack. All positions are bytes in the
/// tensors, one after the other.
#[derive(Debug)]
pub(super) struct ReadAhead<'a> {
    /// Position of the first byte of each tensor, by name.
    starts: HashMap<&'a str, usize>,
    /// Position before which all bytes are in the page cache, or `usize::MAX` if the thread that
    /// reads has ended or was not started.
    read: AtomicUsize,
    /// Number of bytes that are packed.
    used: AtomicUsize,
    demand: Mutex<ReadDemand>,
    /// Signals a change of `demand` or `used`, to the thread that reads.
    demand_changed: Condvar,
    /// Signals a change of `read`, to the threads that pack.
    read_changed: Condvar,
}

/// Work of the thread that reads.
#[derive(Debug, Default)]
struct ReadDemand {
    /// Maximum position that a thread waits for.
    wanted: usize,
    is_done: bool,
}

impl<'a> ReadAhead<'a> {
    /// Calls `work` while another thread reads `tensors` in order. `work` calls
    /// [`wait_for_rows`](Self::wait_for_rows) before it reads rows itself.
    pub(super) fn run<R>(tensors: &[StoredTensor<'a>], work: impl FnOnce(&Self) -> R) -> R {
        let mut total = 0_usize;
        let mut starts = HashMap::with_capacity(tensors.len());
        for tensor in tensors {
            starts.insert(tensor.name(), total);
            total = total.saturating_add(tensor.byte_len());
        }
        let progress = Self {
            starts,
            read: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            demand: Mutex::default(),
            demand_changed: Condvar::new(),
            read_changed: Condvar::new(),
        };
        if total < MIN_BYTES {
            progress.set_read(usize::MAX);
            return work(&progress);
        }
        thread::scope(|scope| {
            let name = "tinkex-read-ahead".to_owned();
            let read = || {
                let _stopped = OnDrop(|| progress.set_read(usize::MAX));
                progress.read(tensors);
            };
            // Without the thread, loading is slower and has the same result.
            if thread::Builder::new().name(name).spawn_scoped(scope, read).is_err() {
                progress.set_read(usize::MAX);
            }
            // The scope waits for the thread, even if `work` panics.
            let _done = OnDrop(|| progress.finish());
            work(&progress)
        })
    }

    /// Waits until `count` rows of a tensor, from row `first` on, are in the page cache, and counts
    /// them as packed. Does not wait if the thread that reads has ended or was not started.
    pub(super) fn wait_for_rows(&self, tensor: &StoredTensor<'_>, first: usize, count: usize) {
        let Some(start) = self.starts.get(tensor.name()) else { return };
        let end = start.saturating_add(tensor.end_of_rows(first + count));
        let used = tensor.end_of_rows(first + count) - tensor.end_of_rows(first);
        let before = self.used.fetch_add(used, Ordering::Relaxed);
        let is_read = self.read.load(Ordering::Acquire) >= end;
        // Most calls neither wait nor wake the thread that reads.
        if is_read && before / READ_BYTES == before.saturating_add(used) / READ_BYTES {
            return;
        }
        let mut demand = self.demand.lock();
        demand.wanted = demand.wanted.max(end);
        self.demand_changed.notify_one();
        while self.read.load(Ordering::Acquire) < end {
            self.read_changed.wait(&mut demand);
        }
    }

    /// Reads the tensors in order, until the last one is read, a read fails, or the work is done.
    fn read(&self, tensors: &[StoredTensor<'_>]) {
        let mut buffer = vec![0; READ_BYTES];
        let mut position = 0;
        for tensor in tensors {
            for start in (0..tensor.byte_len()).step_by(READ_BYTES) {
                if !self.wait_for_demand(position) {
                    return;
                }
                let len = READ_BYTES.min(tensor.byte_len() - start);
                // The threads that pack read the bytes again and report an error.
                if !tensor.is_cached(start) && tensor.read_bytes(start, &mut buffer[..len]).is_err()
                {
                    return;
                }
                position += len;
                self.set_read(position);
            }
        }
    }

    /// Waits until the bytes at `position` should be read. Returns `false` if the work is done.
    fn wait_for_demand(&self, position: usize) -> bool {
        let window_end = || self.used.load(Ordering::Relaxed).saturating_add(WINDOW);
        let mut demand = self.demand.lock();
        while !demand.is_done && position > window_end() && position >= demand.wanted {
            self.demand_changed.wait(&mut demand);
        }
        !demand.is_done
    }

    fn set_read(&self, position: usize) {
        // Under the lock, no thread is between its last look at `read` and its wait.
        let _demand = self.demand.lock();
        self.read.store(position, Ordering::Release);
        self.read_changed.notify_all();
    }

    /// Ends the thread that reads.
    fn finish(&self) {
        self.demand.lock().is_done = true;
        self.demand_changed.notify_one();
    }
}

/// Calls a function when it is dropped, also during a panic.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[cfg(test)]
mod tests {
    use tinkex_weights::{NamedTensor, TensorFile, TensorSlice, write_tensors};

    use super::*;

    const ROWS: usize = 1024;
    const COUNT: usize = 2 * WINDOW / MIN_BYTES;

    /// Writes a file with tensors that are larger than the window together.
    fn large_file(folder: &std::path::Path) -> TensorFile {
        let path = folder.join("x.safetensors");
        let values = vec![1.5; MIN_BYTES / size_of::<f32>()];
        let shape = [ROWS, values.len() / ROWS];
        let names: Vec<String> = (0..COUNT).map(|index| format!("x{index:02}")).collect();
        let tensor = |name| NamedTensor { name, shape: &shape, values: TensorSlice::F32(&values) };
        let tensors: Vec<NamedTensor<'_>> = names.iter().map(|name| tensor(&**name)).collect();
        write_tensors(&path, &tensors, &[]).unwrap();
        TensorFile::open(&path).unwrap()
    }

    fn tensors(file: &TensorFile) -> Vec<StoredTensor<'_>> {
        let mut names: Vec<&str> = file.names().collect();
        names.sort_unstable();
        names.into_iter().map(|name| file.tensor(name).unwrap()).collect()
    }

    #[test]
    fn every_row_is_read_in_any_order() {
        let folder = tempfile::tempdir().unwrap();
        let file = large_file(folder.path());
        let tensors = tensors(&file);
        // The last tensor is wanted first, though it is outside the window.
        for reverse in [false, true] {
            let mut order: Vec<&StoredTensor<'_>> = tensors.iter().collect();
            if reverse {
                order.reverse();
            }
            let used = ReadAhead::run(&tensors, |progress| {
                for tensor in order {
                    for first in (0..ROWS).step_by(64) {
                        progress.wait_for_rows(tensor, first, 64);
                    }
                }
                progress.used.load(Ordering::Relaxed)
            });
            assert_eq!(used, 2 * WINDOW);
        }
    }

    #[test]
    fn the_thread_ends_with_the_work_even_if_nothing_was_used() {
        let folder = tempfile::tempdir().unwrap();
        let file = large_file(folder.path());
        let tensors = tensors(&file);
        assert_eq!(ReadAhead::run(&tensors, |_| 7), 7);
        let outcome = std::panic::catch_unwind(|| ReadAhead::run(&tensors, |_| panic!("no")));
        assert!(outcome.is_err());
    }

    #[test]
    fn a_tensor_that_cannot_be_read_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = large_file(folder.path());
        let tensors = tensors(&file);
        let path = folder.path().join("x.safetensors");
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1 << 20).unwrap();
        ReadAhead::run(&tensors, |progress| progress.wait_for_rows(&tensors[9], 0, ROWS));
    }
}
