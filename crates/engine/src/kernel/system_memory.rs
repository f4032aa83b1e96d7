//! [`SystemMemory`]: memory from the system, on huge pages if possible.

#![expect(unsafe_code, reason = "allocates and frees memory of the system")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Alignment of every allocation in bytes: a cache line, which no aligned load crosses.
pub(super) const LINE: usize = 64;
/// Size of a huge page in bytes.
const HUGE_PAGE: usize = 2 << 20;

/// Memory from the system, zeroed when it is allocated and freed when it is dropped.
#[derive(Debug)]
pub(super) struct SystemMemory {
    /// Address of the first byte, a multiple of [`LINE`].
    pub(super) start: NonNull<u8>,
    /// Length in bytes.
    pub(super) len: usize,
    source: Source,
}

/// Where the memory comes from, which determines how it is freed.
#[derive(Debug)]
enum Source {
    Heap(Layout),
    /// A memory map of this address and length in bytes.
    #[cfg(target_os = "linux")]
    Map(NonNull<u8>, usize),
}

// SAFETY: the memory belongs to this value alone. It is accessed through raw pointers only, and code
// that dereferences them must prevent data races.
unsafe impl Send for SystemMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for SystemMemory {}

impl SystemMemory {
    /// Allocates `len` bytes on the heap. Aborts the process if the system refuses.
    pub(super) fn on_heap(len: usize) -> Self {
        Self::try_on_heap(len).unwrap_or_else(|| handle_alloc_error(Self::heap_layout(len)))
    }

    /// Allocates `len` bytes on the heap, or returns `None` if the system refuses.
    pub(super) fn try_on_heap(len: usize) -> Option<Self> {
        let layout = Self::heap_layout(len);
        // SAFETY: the size of the layout is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, len, source: Source::Heap(layout) })
    }

    fn heap_layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(LINE), LINE).expect("a size in the address space")
    }

    /// Returns the size in bytes of the huge pages that `len` bytes need.
    pub(super) fn huge_pages_len(len: usize) -> Option<usize> {
        len.checked_next_multiple_of(HUGE_PAGE)
    }

    /// Allocates [`huge_pages_len`](Self::huge_pages_len) bytes for `len` bytes. Returns `None` if
    /// the system refuses, or if it is not Linux. The system assigns physical memory when a page is
    /// written.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn on_huge_pages(_: usize) -> Option<Self> {
        None
    }

    /// Allocates [`huge_pages_len`](Self::huge_pages_len) bytes for `len` bytes. Returns `None` if
    /// the system refuses, or if it is not Linux. The system assigns physical memory when a page is
    /// written.
    #[cfg(target_os = "linux")]
    pub(super) fn on_huge_pages(len: usize) -> Option<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

        let len = Self::huge_pages_len(len)?;
        // A huge page must start at a multiple of its size.
        let map_len = len.checked_add(HUGE_PAGE)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses an unused address for the new map.
        let map = unsafe {
            mmap_anonymous(std::ptr::null_mut(), map_len, access, MapFlags::PRIVATE).ok()?
        };
        let map = NonNull::new(map.cast::<u8>())?;
        let padding = map.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: the padding is less than a huge page, by which the map is longer than `len`.
        let start = unsafe { map.add(padding) };
        // If the system does not follow the advice, the memory has small pages.
        // SAFETY: the range is inside the map and consists of whole pages. The advice does not
        // change their contents.
        let _ = unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Some(Self { start, len, source: Source::Map(map, map_len) })
    }

    /// Allows the system to take pages back. Until a page is written again, it may change from its
    /// old values to zeros at any time, so it must be written before it is read. Does nothing for
    /// memory on the heap.
    pub(super) fn allow_reclaim(&mut self) {
        #[cfg(target_os = "linux")]
        if let Source::Map(..) = self.source {
            // If the system does not follow the advice, it takes back nothing.
            // SAFETY: the range is inside the map, which is private and anonymous, and consists of
            // whole pages. No reference to it exists, because `self` is borrowed exclusively.
            let _ = unsafe {
                let start = self.start.as_ptr().cast();
                rustix::mm::madvise(start, self.len, rustix::mm::Advice::LinuxFree)
            };
        }
    }
}

impl Drop for SystemMemory {
    fn drop(&mut self) {
        match self.source {
            // SAFETY: the memory was allocated with this layout and is freed once.
            Source::Heap(layout) => unsafe { dealloc(self.start.as_ptr(), layout) },
            #[cfg(target_os = "linux")]
            // SAFETY: the map was created with this length and is removed once. References to it
            // cannot outlive this value, which owns it. Removing a whole map cannot fail.
            Source::Map(map, len) => unsafe {
                let _ = rustix::mm::munmap(map.as_ptr().cast(), len);
            },
        }
    }
}
