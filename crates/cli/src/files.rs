//! Files that are written whole or not at all.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Writes a file beside the one meant, then moves it there; folders on the way are made.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = beside(path, &format!("{}.new", std::process::id()));
    let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// The same path with an end added to its name.
pub(crate) fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(end);
    path.with_file_name(name)
}
