//! [`PanelMemory`]: memory of packed weights, aligned to cache lines and on huge pages if possible.
//!
//! Memory bandwidth limits the speed of matrix products with few rows, which read every weight
//! once. Huge pages need fewer address translations; no difference was measured on the development
//! machine (ADR 31). A matrix is often smaller than a huge page (2 MiB). The matrices of a model
//! therefore share the chunks of an [`Arena`].

#![expect(unsafe_code, reason = "hands out disjoint parts of memory that the system provides")]

use std::sync::Arc;

use parking_lot::Mutex;

use super::system_memory::{LINE, SystemMemory};

/// Minimum size in bytes of a chunk of an [`Arena`]. A larger allocation creates a larger chunk.
const CHUNK: usize = 64 << 20;

/// Allocates the memory of several matrices from common chunks. A chunk is freed with the last
/// matrix in it. Cheap to clone; clones share the chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Arena(Arc<Mutex<Option<OpenChunk>>>);

/// The chunk that allocations are taken from.
#[derive(Debug)]
struct OpenChunk {
    chunk: Arc<SystemMemory>,
    /// Number of bytes from the start that are allocated: a multiple of [`LINE`], at most the
    /// length of the chunk. The number only grows, so allocations never overlap.
    used: usize,
}

impl OpenChunk {
    /// Allocates a chunk of at least `len` bytes, if the system provides huge pages.
    fn new(len: usize) -> Option<Self> {
        Some(Self { chunk: Arc::new(SystemMemory::on_huge_pages(len)?), used: 0 })
    }
}

impl Arena {
    /// Returns `len` zeroed bytes from the open chunk, from a new chunk if it is full, or from the
    /// heap if the system provides no chunk.
    fn allocate(&self, len: usize) -> PanelMemory {
        // If the size wrapped around, the part would extend past the end of the chunk.
        let size = len.checked_next_multiple_of(LINE).expect("a matrix in memory");
        let mut open = self.0.lock();
        let fits = |open: &OpenChunk| size <= open.chunk.len - open.used;
        if !open.as_ref().is_some_and(fits) {
            *open = OpenChunk::new(size.max(CHUNK));
        }
        let Some(current) = open.as_mut() else { return PanelMemory::on_heap(len) };
        let memory = PanelMemory { chunk: Arc::clone(&current.chunk), start: current.used, len };
        current.used += size;
        memory
    }
}

/// A part of a chunk that belongs to one matrix.
#[derive(Debug)]
pub(super) struct PanelMemory {
    chunk: Arc<SystemMemory>,
    /// Offset of the part in the chunk in bytes, a multiple of [`LINE`].
    start: usize,
    /// Length of the part in bytes. The part ends inside the chunk.
    len: usize,
}

impl PanelMemory {
    /// Allocates `len` zeroed bytes from `arena`, or from the heap.
    pub(super) fn new(arena: Option<&Arena>, len: usize) -> Self {
        match arena {
            Some(arena) => arena.allocate(len),
            None => Self::on_heap(len),
        }
    }

    /// Allocates `len` zeroed bytes from the heap.
    fn on_heap(len: usize) -> Self {
        Self { chunk: Arc::new(SystemMemory::on_heap(len)), start: 0, len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the part is inside the chunk, whose memory is initialized (zeroed) and lives as
        // long as `self`. No other `PanelMemory` overlaps it, and it is written through `&mut self`
        // only.
        unsafe { std::slice::from_raw_parts(self.chunk.start.as_ptr().add(self.start), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `self` is borrowed exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(self.chunk.start.as_ptr().add(self.start), self.len)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_zeroed_aligned_and_disjoint() {
        let arena = Arena::default();
        let lengths = [1, 64, 1000, CHUNK - 100, CHUNK + 7, 0, 65];
        let mut all: Vec<PanelMemory> = Vec::new();
        for (i, &len) in lengths.iter().enumerate() {
            let source = (i != 2).then_some(&arena);
            let mut memory = PanelMemory::new(source, len);
            assert_eq!(memory.bytes().len(), len);
            assert_eq!(memory.bytes().as_ptr().align_offset(LINE), 0);
            let at_ends = |bytes: &[u8]| [bytes.first().copied(), bytes.last().copied()];
            assert!(at_ends(memory.bytes()).iter().flatten().all(|byte| *byte == 0));
            let mark = u8::try_from(i).unwrap() + 1;
            for position in [0, len.saturating_sub(1)] {
                if let Some(byte) = memory.bytes_mut().get_mut(position) {
                    *byte = mark;
                }
            }
            all.push(memory);
        }
        // Later allocations have not changed earlier ones, and survive them.
        drop(arena);
        drop(all.remove(0));
        for (memory, mark) in all.iter().zip(2..) {
            let ends = [memory.bytes().first(), memory.bytes().last()];
            assert!(ends.into_iter().flatten().all(|byte| *byte == mark), "{mark}");
        }
    }
}
