//! [`ActivationBuffer`]: activations and gradients, in memory that later buffers use again.
//!
//! A training step allocates several gigabytes in buffers of a few megabytes each. Memory that is
//! new to the process must be cleared by the system page by page, which took a quarter of a step in
//! a virtual machine. Large buffers are therefore kept when they are dropped (ADR 64).

#![expect(unsafe_code, reason = "views memory of the system as f32 values")]

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use super::system_memory::SystemMemory;

/// Minimum size in bytes of memory that the pool keeps. Smaller buffers are allocated on the heap
/// and freed when they are dropped.
const MIN_KEPT: usize = 1 << 20;

/// Memory of dropped buffers.
static POOL: Mutex<BufferPool> = Mutex::new(BufferPool::new());

/// A growable array of f32 values.
#[derive(Debug, Default)]
pub(crate) struct ActivationBuffer {
    /// At least as long as `len` values; `None` if no memory was needed so far.
    memory: Option<SystemMemory>,
    len: usize,
}

impl ActivationBuffer {
    /// Returns a buffer of `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        let mut buffer = Self::default();
        // New memory is zeroed.
        if buffer.set_len(len) == Contents::Old {
            buffer.fill(0.0);
        }
        buffer
    }

    /// Returns a buffer of `len` unspecified values, which the caller must write before it reads
    /// any.
    pub(crate) fn for_overwrite(len: usize) -> Self {
        let mut buffer = Self::default();
        buffer.resize_for_overwrite(len);
        buffer
    }

    /// Replaces all values by a copy of `values`.
    pub(crate) fn copy_from(&mut self, values: &[f32]) {
        self.resize_for_overwrite(values.len());
        self.copy_from_slice(values);
    }

    /// Sets the length. All values are unspecified afterwards: the caller must write every value
    /// before it is read, because the system may still set reused pages to 0.
    pub(crate) fn resize_for_overwrite(&mut self, len: usize) {
        self.set_len(len);
    }

    fn set_len(&mut self, len: usize) -> Contents {
        let bytes = len.checked_mul(size_of::<f32>()).expect("a size in the address space");
        let mut contents = Contents::Old;
        if self.memory.as_ref().is_none_or(|memory| memory.len < bytes) {
            // The old memory is available to the new allocation.
            self.release();
            let (memory, new_contents) = allocate(bytes);
            (self.memory, contents) = (Some(memory), new_contents);
        }
        self.len = len;
        contents
    }

    /// Gives the memory to later buffers. The buffer is empty afterwards.
    fn release(&mut self) {
        self.len = 0;
        if let Some(mut memory) = self.memory.take().filter(|memory| memory.len >= MIN_KEPT) {
            memory.allow_reclaim();
            lock(&POOL).keep(memory);
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
        // SAFETY: the memory has at least `len` values, is aligned to cache lines, initialized
        // (every bit pattern is an f32), and belongs to this buffer alone, which is borrowed. The
        // system changes only pages that have not been written since `resize_for_overwrite`, whose
        // callers write all values before they read any.
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

/// Allocates at least `bytes` bytes.
fn allocate(bytes: usize) -> (SystemMemory, Contents) {
    if bytes < MIN_KEPT {
        return (SystemMemory::on_heap(bytes), Contents::Zero);
    }
    if let Some(memory) = lock(&POOL).take(bytes) {
        return (memory, Contents::Old);
    }
    let memory = SystemMemory::on_huge_pages(bytes).unwrap_or_else(|| SystemMemory::on_heap(bytes));
    let surplus = lock(&POOL).add(memory.len);
    // The memory is freed while the pool is unlocked.
    drop(surplus);
    (memory, Contents::Zero)
}

/// Frees the memory that no buffer has.
pub(crate) fn free_unused() {
    let unused = lock(&POOL).clear();
    // The memory is freed while the pool is unlocked.
    drop(unused);
}

fn lock(pool: &Mutex<BufferPool>) -> std::sync::MutexGuard<'_, BufferPool> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Removes the memory that no buffer has.
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
            let mut copy = ActivationBuffer::for_overwrite(buffer.len());
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
        buffer.resize_for_overwrite(MIN_KEPT);
        assert_eq!(buffer.len(), MIN_KEPT);
        buffer.resize_for_overwrite(0);
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
            let size = SystemMemory::huge_pages_len(bytes).unwrap();
            let mut pool = BufferPool::new();
            pool.add(size);
            pool.keep(SystemMemory::on_huge_pages(bytes).unwrap_or(SystemMemory::on_heap(size)));
            assert_eq!(pool.take(size).unwrap().len, size, "{bytes}");
        }
    }
}
