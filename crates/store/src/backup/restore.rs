//! Makes a data folder from a backup.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tinkex_files::{create_private_folder, sync_folder};

use super::{MANIFEST, Manifest, copy_file, newest};
use crate::disk::WEIGHTS;
use crate::record::UnixMicros;

/// Description of a restored data folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreReport {
    /// Folder of the backup that was restored.
    pub backup: PathBuf,
    /// Time of the backup.
    pub created_at: UnixMicros,
    /// Number of files.
    pub files: usize,
    /// Total size in bytes.
    pub bytes: u64,
}

/// Restores the backup in `backup`, or the newest backup under it, as the data folder `data_dir`.
/// Checks the digests of all files. `data_dir` appears when it is complete.
///
/// # Errors
/// If `data_dir` exists and is not empty, or if a file of the backup is missing or damaged.
pub fn restore(backup: &Path, data_dir: &Path) -> io::Result<RestoreReport> {
    let folder = if backup.join(MANIFEST).is_file() {
        backup.to_owned()
    } else {
        let found = newest(backup)?.ok_or_else(|| {
            let message = format!("{}: contains no complete backup", backup.display());
            io::Error::new(io::ErrorKind::NotFound, message)
        })?;
        found.0
    };
    let manifest = Manifest::read(&folder)?;
    if fs::read_dir(data_dir).is_ok_and(|mut entries| entries.next().is_some()) {
        let message = format!("{}: exists and is not empty", data_dir.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    }
    let data_dir = std::path::absolute(data_dir)?;
    let parent = data_dir.parent().map(Path::to_owned).unwrap_or_default();
    fs::create_dir_all(&parent)?;
    let mut name = std::ffi::OsString::from(".");
    name.push(data_dir.file_name().unwrap_or_default());
    name.push(".partial");
    let staged = parent.join(name);
    if staged.exists() {
        fs::remove_dir_all(&staged)?;
    }
    create_private_folder(&staged)?;
    let restored = fill(&folder, &manifest, &staged).and_then(|()| {
        if data_dir.exists() {
            // It is empty.
            fs::remove_dir(&data_dir)?;
        }
        fs::rename(&staged, &data_dir)?;
        sync_folder(&parent)
    });
    if let Err(error) = restored {
        // The error of the restoration is more important than the error of the removal.
        let _ = fs::remove_dir_all(&staged);
        return Err(error);
    }
    let files = manifest.files.len();
    let bytes = manifest.files.values().map(|file| file.size).sum();
    Ok(RestoreReport { backup: folder, created_at: manifest.created_at, files, bytes })
}

/// Copies the files of a backup, and checks their digests.
fn fill(folder: &Path, manifest: &Manifest, staged: &Path) -> io::Result<()> {
    create_private_folder(staged.join(WEIGHTS))?;
    let mut folders = BTreeSet::from([staged.join(WEIGHTS), staged.to_owned()]);
    for (name, expected) in &manifest.files {
        let from = folder.join(name);
        let to = staged.join(name);
        let failed = |message: String| {
            let message = format!("{}: {message}; restore another backup", from.display());
            io::Error::new(io::ErrorKind::InvalidData, message)
        };
        if let Some(parent) = to.parent() {
            create_private_folder(parent)?;
            folders.insert(parent.to_owned());
        }
        let digest = copy_file(&from, &to).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => failed("the file is missing".to_owned()),
            _ => error,
        })?;
        if digest != *expected {
            return Err(failed("the file is damaged".to_owned()));
        }
    }
    folders.iter().try_for_each(sync_folder)
}
