//! [`ActivationBuffer`]: activations and gradients, in memory that later buffers use again.
//!
//! A training step allocates several gigabytes in buffers of a few megabytes each. Memory that is
//! new to the process must be cleared by the system page by page, which took a quarter of a step in
//! a virtual machine. Large buffers are therefore kept when they are dropped (ADR 64).
//!
//! Clearing reused memory would cost the time that its reuse saves, so the memory of a buffer is
//! written by the operation that computes its values. Code outside of the kernels can only obtain a
//! buffer whose values are all written (ADR 74): it copies them
//! ([`copy_from`](ActivationBuffer::copy_from), [`copy_rows`](ActivationBuffer::copy_rows)),
//! computes them row by row ([`fill_rows`](ActivationBuffer::fill_rows)), or passes the buffer to a
//! kernel that writes every value. In builds with debug assertions, such as the tests, the buffer is
//! filled with NaN first, so that a kernel which reads a value before it writes it fails every
//! comparison.

#![expect(unsafe_code, reason = "views memory of the system as f32 values")]

use std::ops::{Deref, DerefMut};

use parking_lot::Mutex;

use super::TaskPool;
use super::system_memory::SystemMemory;

/// Minimum size in bytes of memory that the pool keeps. Smaller buffers are allocated on the heap
/// and freed when they are dropped.
const MIN_KEPT: usize = 1 << 20;

/// Value of elements whose computation has not started. NaN in test builds, so that a row function
/// that leaves an element unwritten fails every comparison.
const UNWRITTEN: f32 = if cfg!(debug_assertions) { f32::NAN } else { 0.0 };

/// Memory of dropped buffers.
static POOL: Mutex<BufferPool> = Mutex::new(BufferPool::new());

/// A growable array of f32 values.
#[derive(Debug, Default)]
pub(crate) struct ActivationBuffer {
    /// At least as long as `len` values; `None` if no memory was needed so far.
    memory: Option<SystemMemory>,
    /// Number of values, all of which have been written.
    len: usize,
}

impl ActivationBuffer {
    /// Returns a buffer of `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        let mut buffer = Self::default();
        buffer.resize_zeroed(len);
        buffer
    }

    /// Replaces all values by `len` zeros.
    pub(crate) fn resize_zeroed(&mut self, len: usize) {
        match self.reserve(len) {
            // New memory is not written a second time.
            Contents::Zero => self.len = len,
            // SAFETY: `fill` writes every value.
            Contents::Old => unsafe { self.overwrite(len, |values| values.fill(0.0)) },
        }
    }

    /// Replaces all values by a copy of `values`.
    pub(crate) fn copy_from(&mut self, values: &[f32]) {
        // SAFETY: `copy_from_slice` writes every value.
        unsafe { self.overwrite(values.len(), |own| own.copy_from_slice(values)) }
    }

    /// Replaces all values by `count` rows of `width` values. `write(index, row)` computes a row and
    /// must write every value of the row: the previous values have no meaning. `work` is the number of
    /// operations per row.
    pub(crate) fn fill_rows(
        &mut self,
        pool: &TaskPool,
        count: usize,
        width: usize,
        work: usize,
        write: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let fill = |values: &mut [f32]| {
            pool.for_each_row(values, width, work, |index, row| {
                // The row stays in the first-level cache until `write` replaces its values, which
                // makes this much cheaper than clearing the whole buffer.
                row.fill(UNWRITTEN);
                write(index, row);
            });
        };
        // SAFETY: every value is in a row, because the length is a multiple of `width`, and
        // `for_each_row` visits every row. Rows are filled before they are passed on.
        unsafe { self.overwrite(count * width, fill) }
    }

    /// Replaces all values by `count` rows of `width` values, each of which is a copy of
    /// `source(index)` that `change(index, row)` has changed. `work` is the number of operations per
    /// row.
    ///
    /// # Panics
    /// If a source does not have `width` values.
    pub(crate) fn copy_rows<'a>(
        &mut self,
        pool: &TaskPool,
        count: usize,
        width: usize,
        work: usize,
        source: impl Fn(usize) -> &'a [f32] + Sync,
        change: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let fill = |values: &mut [f32]| {
            pool.for_each_row(values, width, work, |index, row| {
                row.copy_from_slice(source(index));
                change(index, row);
            });
        };
        // SAFETY: as in `fill_rows`; `copy_from_slice` writes the whole row.
        unsafe { self.overwrite(count * width, fill) }
    }

    /// Replaces all values by one row of `width` values for each of `values`. Like
    /// [`fill_rows`](Self::fill_rows), but `write(index, row, value)` also receives the value of the
    /// row.
    pub(crate) fn fill_rows_with(
        &mut self,
        pool: &TaskPool,
        width: usize,
        values: &mut [f32],
        work: usize,
        write: impl Fn(usize, &mut [f32], &mut f32) + Sync,
    ) {
        let len = values.len() * width;
        let fill = |matrix: &mut [f32]| {
            pool.for_each_row_with(matrix, width, values, work, |index, row, value| {
                row.fill(UNWRITTEN);
                write(index, row, value);
            });
        };
        // SAFETY: as in `fill_rows`; there are as many values as rows.
        unsafe { self.overwrite(len, fill) }
    }

    /// Replaces all values by the `len` values that `write` writes. The buffer is empty if `write`
    /// panics.
    ///
    /// # Safety
    /// `write` must write every value of its argument and must not read a value that it has not
    /// written: the system may change the contents of pages that have not been written since the
    /// memory was kept (see [`SystemMemory::allow_reclaim`]).
    pub(super) unsafe fn overwrite(&mut self, len: usize, write: impl FnOnce(&mut [f32])) {
        self.reserve(len);
        if let Some(memory) = &self.memory {
            // SAFETY: the memory has at least `len` values, is aligned to cache lines, was
            // initialized when it was allocated (every bit pattern is an f32), and belongs to this
            // buffer alone, which is borrowed exclusively. The system changes only pages that have
            // not been written, which `write` does not read.
            let values =
                unsafe { std::slice::from_raw_parts_mut(memory.start.as_ptr().cast(), len) };
            if cfg!(debug_assertions) {
                values.fill(UNWRITTEN);
            }
            write(values);
        }
        self.len = len;
    }

    /// Empties the buffer and ensures that it has memory for `len` values. Returns the contents of
    /// that memory.
    fn reserve(&mut self, len: usize) -> Contents {
        self.len = 0;
        let bytes = len.checked_mul(size_of::<f32>()).expect("a size in the address space");
        if self.memory.as_ref().is_some_and(|memory| memory.len >= bytes) {
            return Contents::Old;
        }
        // The old memory is available to the new allocation.
        self.release();
        let (memory, contents) = allocate(&POOL, bytes);
        self.memory = Some(memory);
        contents
    }

    /// Gives the memory to later buffers. The buffer is empty afterwards.
    fn release(&mut self) {
        self.len = 0;
        if let Some(mut memory) = self.memory.take().filter(|memory| memory.len >= MIN_KEPT) {
            memory.allow_reclaim();
            POOL.lock().keep(memory);
        }
    }
}

impl Drop for ActivationBuffer {
    fn drop(&mut self) {
        self.release();
    }
}

impl Deref for ActivationBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        let Some(memory) = &self.memory else { return &[] };
        // SAFETY: the memory has at least `len` values, is aligned to cache lines, and belongs to
        // this buffer alone, which is borrowed. All `len` values have been written: `overwrite`
        // sets the length after they are, and `resize_zeroed` sets it for new memory only, which
        // the system does not change.
        unsafe { std::slice::from_raw_parts(memory.start.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for ActivationBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        let Some(memory) = &self.memory else { return &mut [] };
        // SAFETY: as in `deref`; the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(memory.start.as_ptr().cast(), self.len) }
    }
}

/// Contents of memory that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    Zero,
    /// Values of an earlier buffer.
    Old,
}

/// Allocates at least `bytes` bytes: memory of `pool`, or new memory. Frees the memory of the pool
/// if the system refuses new memory.
fn allocate(pool: &Mutex<BufferPool>, bytes: usize) -> (SystemMemory, Contents) {
    if bytes < MIN_KEPT {
        return (SystemMemory::on_heap(bytes), Contents::Zero);
    }
    // New memory has this size, so that a later buffer of the same size finds it in the pool.
    let size = SystemMemory::huge_pages_len(bytes).expect("a size in the address space");
    if let Some(memory) = pool.lock().take(size) {
        return (memory, Contents::Old);
    }
    let new = || SystemMemory::on_huge_pages(size).or_else(|| SystemMemory::try_on_heap(size));
    let memory = new().unwrap_or_else(|| {
        free(pool);
        SystemMemory::on_heap(size)
    });
    let surplus = pool.lock().add(memory.len);
    // The memory is freed while the pool is unlocked.
    drop(surplus);
    (memory, Contents::Zero)
}

/// Frees the memory of dropped buffers.
pub(crate) fn free_unused() {
    free(&POOL);
}

/// Frees the memory of a pool.
fn free(pool: &Mutex<BufferPool>) {
    let unused = pool.lock().clear();
    // The memory is freed while the pool is unlocked.
    drop(unused);
}

/// Memory of dropped buffers, which new buffers take. Memory in buffers and in the pool is together
/// never more than the buffers once had at the same time.
#[derive(Debug)]
struct BufferPool {
    /// In the order in which the buffers were dropped.
    free: Vec<SystemMemory>,
    /// Total size of `free` in bytes.
    free_bytes: usize,
    /// Total size in bytes of the memory that buffers have.
    used_bytes: usize,
    /// Maximum of `used_bytes` so far.
    peak_bytes: usize,
}

impl BufferPool {
    const fn new() -> Self {
        Self { free: Vec::new(), free_bytes: 0, used_bytes: 0, peak_bytes: 0 }
    }

    /// Takes the smallest memory of at least `bytes` bytes, but at most a quarter more.
    fn take(&mut self, bytes: usize) -> Option<SystemMemory> {
        let fits =
            |memory: &SystemMemory| (bytes..=bytes.saturating_add(bytes / 4)).contains(&memory.len);
        let candidates = self.free.iter().enumerate().filter(|(_, memory)| fits(memory));
        let (index, _) = candidates.min_by_key(|(_, memory)| memory.len)?;
        let memory = self.free.remove(index);
        self.free_bytes -= memory.len;
        self.used_bytes += memory.len;
        Some(memory)
    }

    /// Records that a buffer has `bytes` bytes of new memory. Returns memory that has to be freed,
    /// from the buffers that were dropped first.
    fn add(&mut self, bytes: usize) -> Vec<SystemMemory> {
        self.used_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
        let mut surplus = 0;
        let too_many = self.free.iter().take_while(|memory| {
            let is_too_much = self.used_bytes + self.free_bytes - surplus > self.peak_bytes;
            surplus += if is_too_much { memory.len } else { 0 };
            is_too_much
        });
        let count = too_many.count();
        self.free_bytes -= surplus;
        self.free.drain(..count).collect()
    }

    /// Removes all memory from the pool.
    fn clear(&mut self) -> Vec<SystemMemory> {
        self.free_bytes = 0;
        std::mem::take(&mut self.free)
    }

    /// Keeps the memory of a dropped buffer.
    fn keep(&mut self, memory: SystemMemory) {
        self.used_bytes -= memory.len;
        self.free_bytes += memory.len;
        self.free.push(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_while_other_buffers_come_and_go() {
        let len = MIN_KEPT;
        let mut kept: Vec<(f32, ActivationBuffer)> = Vec::new();
        for round in 0_u8..20 {
            let mut buffer = ActivationBuffer::zeroed(len / (1 + usize::from(round) % 3));
            assert!(buffer.iter().all(|value| *value == 0.0), "round {round}");
            buffer.fill(f32::from(round));
            let mut copy = ActivationBuffer::default();
            copy.copy_from(&buffer);
            drop(copy);
            kept.push((f32::from(round), buffer));
            if round % 2 == 1 {
                kept.remove(0);
            }
            for (value, buffer) in &kept {
                assert!(buffer.iter().all(|kept| kept == value), "round {round}");
            }
        }
    }

    #[test]
    fn a_buffer_changes_its_length_within_its_memory() {
        let mut buffer = ActivationBuffer::default();
        assert!(buffer.is_empty());
        buffer.copy_from(&[1.0, 2.0, 3.0]);
        assert_eq!(*buffer, [1.0, 2.0, 3.0]);
        buffer.copy_from(&[4.0]);
        assert_eq!(*buffer, [4.0]);
        buffer.resize_zeroed(MIN_KEPT);
        assert_eq!(buffer.len(), MIN_KEPT);
        buffer.resize_zeroed(0);
        assert!(buffer.is_empty());
    }

    #[test]
    fn reused_memory_is_zero_where_zeros_are_asked_for() {
        for len in [3, MIN_KEPT] {
            let mut buffer = ActivationBuffer::zeroed(len);
            buffer.fill(2.0);
            buffer.resize_zeroed(len - 1);
            assert_eq!(buffer.len(), len - 1);
            assert!(buffer.iter().all(|value| *value == 0.0), "{len}");
        }
    }

    #[test]
    fn rows_are_computed_on_every_thread() {
        for threads in [1, 3] {
            let pool = TaskPool::new(threads).unwrap();
            let mut buffer = ActivationBuffer::zeroed(10);
            buffer.fill_rows(&pool, 300, 5, 1 << 16, |index, row| {
                row.fill(u16::try_from(index).unwrap().into());
            });
            let want: Vec<f32> = (0..300_u16).flat_map(|row| [f32::from(row); 5]).collect();
            assert_eq!(*buffer, *want);
            let mut doubled = vec![0.0; 300];
            let mut rows = ActivationBuffer::default();
            rows.fill_rows_with(&pool, 5, &mut doubled, 1 << 16, |index, row, value| {
                row.copy_from_slice(&buffer[index * 5..(index + 1) * 5]);
                *value = 2.0 * row[0];
            });
            assert_eq!(*rows, *buffer);
            let source = |index: usize| &buffer[index * 5..(index + 1) * 5];
            rows.copy_rows(&pool, 300, 5, 1 << 16, source, |_, row| row[0] = -1.0);
            assert!(
                rows.chunks_exact(5)
                    .zip(buffer.chunks_exact(5))
                    .all(|(copy, source)| { copy[0] == -1.0 && copy[1..] == source[1..] })
            );
            assert_eq!(doubled, (0..300_u16).map(|row| f32::from(2 * row)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn values_that_were_not_written_are_nan_in_test_builds() {
        for len in [4, MIN_KEPT] {
            let mut buffer = ActivationBuffer::zeroed(len);
            buffer.fill_rows(&TaskPool::single_threaded(), len / 2, 2, 1, |_, row| row[0] = 1.0);
            let is_expected = |pair: &[f32]| pair[0] == 1.0 && pair[1].is_nan();
            assert!(buffer.chunks_exact(2).all(is_expected), "{len}");
            // SAFETY: the memory was written above and has not been kept since.
            unsafe { buffer.overwrite(len, |_| ()) };
            assert!(buffer.iter().all(|value| value.is_nan()), "{len}");
        }
    }

    #[test]
    fn a_buffer_whose_computation_panicked_is_empty() {
        let mut buffer = ActivationBuffer::zeroed(8);
        let fill = std::panic::AssertUnwindSafe(|| {
            let pool = TaskPool::single_threaded();
            buffer.fill_rows(&pool, 4, 2, 1, |row, _| assert!(row < 2, "a row that fails"));
        });
        assert!(std::panic::catch_unwind(fill).is_err());
        assert!(buffer.is_empty());
    }

    #[test]
    fn a_pool_keeps_no_more_than_was_used_at_once() {
        const MIB: usize = 1 << 20;
        let mut pool = BufferPool::new();
        let mut used = Vec::new();
        for size in [4, 2, 8, 2] {
            assert!(pool.add(size * MIB).is_empty());
            used.push(SystemMemory::on_heap(size * MIB));
        }
        used.into_iter().for_each(|memory| pool.keep(memory));
        assert_eq!((pool.used_bytes, pool.free_bytes), (0, 16 * MIB));
        // The smallest that fits, but not much larger memory.
        assert_eq!(pool.take(4 * MIB - 1).unwrap().len, 4 * MIB);
        assert_eq!(pool.take(2 * MIB - 1).unwrap().len, 2 * MIB);
        assert!(pool.take(5 * MIB).is_none());
        assert_eq!((pool.used_bytes, pool.free_bytes), (6 * MIB, 10 * MIB));
        // New memory replaces as much of the kept memory as necessary, the oldest first.
        let freed: Vec<usize> = pool.add(MIB).iter().map(|memory| memory.len).collect();
        assert_eq!(freed, [8 * MIB]);
        assert!(pool.add(7 * MIB).is_empty());
        assert_eq!((pool.used_bytes, pool.free_bytes), (14 * MIB, 2 * MIB));
        assert_eq!(pool.add(100 * MIB).len(), 1);
        assert_eq!((pool.free_bytes, pool.peak_bytes), (0, 114 * MIB));
        pool.keep(SystemMemory::on_heap(100 * MIB));
        assert_eq!(pool.clear().len(), 1);
        assert_eq!((pool.used_bytes, pool.free_bytes), (14 * MIB, 0));
    }

    #[test]
    fn memory_is_found_by_a_buffer_of_the_same_size() {
        for bytes in [MIN_KEPT, MIN_KEPT * 5 / 4, MIN_KEPT * 5 / 2, MIN_KEPT * 17 / 4] {
            let pool = Mutex::new(BufferPool::new());
            let (memory, contents) = allocate(&pool, bytes);
            assert_eq!(contents, Contents::Zero, "{bytes}");
            pool.lock().keep(memory);
            let (memory, contents) = allocate(&pool, bytes);
            assert_eq!(contents, Contents::Old, "{bytes}");
            pool.lock().keep(memory);
            free(&pool);
            assert_eq!(allocate(&pool, bytes).1, Contents::Zero, "{bytes}");
        }
    }
}
