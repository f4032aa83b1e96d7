//! Backups of a data folder while its server runs, and their restoration.
//!
//! A backup folder has one folder per backup, named after its time. Each is complete: a copy of the
//! database at one moment, the payloads that this copy needs, the weights that it refers to, the key
//! and the other files of the data folder, and a manifest with the digests of all files. A
//! backup appears when it is complete. Weights never change, so a later backup has hard links to the
//! files of the earlier one, and copies only new ones.
//!
//! * [`create`] makes a backup, [`restore`] makes a data folder from a backup.

mod create;
mod restore;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::record::UnixMicros;

pub use self::create::{BackupReport, BackupSource, create};
pub use self::restore::{RestoreReport, restore};

/// File with the [`Manifest`] in the folder of a backup.
const MANIFEST: &str = "backup.json";
/// Version of the layout of backups.
const FORMAT: u32 = 1;
/// Size of the buffer with which files are copied, in bytes.
const BUFFER: usize = 1 << 20;

/// Files of a backup, with their digests.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    /// Time of the backup.
    created_at: UnixMicros,
    /// Version of the program that made the backup.
    version: String,
    /// Files by their paths in the data folder, with `/` between the parts.
    files: BTreeMap<String, FileDigest>,
}

/// Size and digest of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileDigest {
    size: u64,
    /// SHA-256 in hexadecimal digits.
    sha256: String,
}

impl Manifest {
    /// Reads the manifest of the backup in `folder`.
    fn read(folder: &Path) -> io::Result<Self> {
        let path = folder.join(MANIFEST);
        let invalid = |message: String| {
            let message = format!("{}: {message}", path.display());
            io::Error::new(io::ErrorKind::InvalidData, message)
        };
        let manifest: Self = serde_json::from_slice(&fs::read(&path)?)
            .map_err(|error| invalid(format!("not the manifest of a backup: {error}")))?;
        if manifest.format != FORMAT {
            return Err(invalid(format!(
                "the backup has format {}, and this version reads format {FORMAT}",
                manifest.format
            )));
        }
        let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_));
        if let Some(name) =
            manifest.files.keys().find(|name| !Path::new(name).components().all(is_plain))
        {
            return Err(invalid(format!("{name:?} is not a path in a data folder")));
        }
        Ok(manifest)
    }
}

/// Returns the folder and the manifest of the newest complete backup in `dir`, if there is one.
fn newest(dir: &Path) -> io::Result<Option<(PathBuf, Manifest)>> {
    let mut backups = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        // The name of an unfinished backup starts with a dot.
        let is_finished = !entry.file_name().as_encoded_bytes().starts_with(b".");
        if is_finished && path.join(MANIFEST).is_file() {
            let manifest = Manifest::read(&path)?;
            backups.push((path, manifest));
        }
    }
    // Compare the times, not the names: an administrator may have renamed a backup.
    Ok(backups.into_iter().max_by_key(|(_, manifest)| manifest.created_at))
}

/// Copies a file, flushes the copy and returns its digest.
fn copy_file(from: &Path, to: &Path) -> io::Result<FileDigest> {
    let mut to = private_file(to)?;
    let digest = read_file(from, |bytes| to.write_all(bytes))?;
    to.sync_all()?;
    Ok(digest)
}

/// Returns the digest of a file.
fn digest_file(path: &Path) -> io::Result<FileDigest> {
    read_file(path, |_| Ok(()))
}

/// Reads a file in parts and returns its digest.
fn read_file(
    path: &Path,
    mut use_part: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<FileDigest> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; BUFFER];
    let mut size = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(FileDigest { size, sha256: hex(&hasher.finalize()) });
        }
        use_part(&buffer[..read])?;
        hasher.update(&buffer[..read]);
        size += read as u64;
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Creates a new file that only its owner can read: backups contain prompts and the API key.
fn private_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    tinkex_files::no_follow(options.write(true).create_new(true));
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600);
    }
    options.open(path)
}

#[cfg(test)]
mod tests;
