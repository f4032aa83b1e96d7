//! Read-only memory maps of weight files.

#![expect(unsafe_code, reason = "mapping a file is unsafe: the file may change while it is mapped")]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps `file` into memory, read-only.
///
/// The file must not be truncated or modified while the map exists: reading a truncated page kills
/// the process with SIGBUS, and changed bytes appear in the middle of a read. The engine's own
/// writers never modify a file in place; they write a temporary file and rename it.
///
/// Callers must copy bytes that they validate and use later (text, lengths, offsets). From the map
/// itself they may read only plain numbers, for which every bit pattern is valid.
pub(crate) fn map_read_only(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is never written, and the type of its contents is `u8`, for which every bit
    // pattern is valid. A concurrent modification of the file by another process is excluded by
    // the documented condition above, which the crate's public API repeats.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_has_the_bytes_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        std::fs::write(&path, &bytes).unwrap();
        let map = map_read_only(&File::open(&path).unwrap()).unwrap();
        assert_eq!(map[..], std::fs::read(&path).unwrap()[..]);
    }
}
