//! Makes a backup.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use tinkex_files::{create_private_folder, sync_folder};

use super::{FORMAT, FileDigest, MANIFEST, Manifest, copy_file, digest_file, newest, private_file};
use crate::clock::timestamp;
use crate::disk::{DASHBOARD_SESSIONS, DATABASE, PAYLOADS, PayloadReader, WEIGHTS, snapshot_into};
use crate::record::UnixMicros;

/// Files that a backup leaves out: the lock, the description of the running process, the reserve
/// file, and the sessions of the dashboard. A session that ended after the backup must not be valid
/// again after the backup is restored.
const EXCLUDED: [&str; 4] = ["lock", "server.json", "reserve", DASHBOARD_SESSIONS];

/// Data folder of a running server. While the backup is made, the server must delete no weights and
/// must not start to compact its payloads.
pub struct BackupSource {
    pub data_dir: PathBuf,
    pub payloads: PayloadReader,
    pub created_at: UnixMicros,
}

/// Description of a finished backup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackupReport {
    /// Folder of the backup.
    pub folder: PathBuf,
    /// Number of files.
    pub files: usize,
    /// Total size in bytes.
    pub bytes: u64,
    /// Size of the files that the previous backup already had, in bytes.
    pub linked_bytes: u64,
    /// Folders of weights that the database refers to and that do not exist.
    pub missing: Vec<String>,
}

/// Makes a backup in a new folder under `dir`.
///
/// # Errors
/// If a file cannot be read or written, or if `dir` is in the data folder. A failed backup leaves no
/// folder, and earlier backups are unchanged.
pub fn create(source: &BackupSource, dir: &Path) -> io::Result<BackupReport> {
    create_private_folder(dir)?;
    if fs::canonicalize(dir)?.starts_with(fs::canonicalize(&source.data_dir)?) {
        let message = format!("{}: the backup would be a part of the data folder", dir.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let name = folder_name(dir, source.created_at);
    let staged = dir.join(format!(".{name}.partial"));
    if staged.exists() {
        fs::remove_dir_all(&staged)?;
    }
    create_private_folder(&staged)?;
    let report = fill(source, dir, &staged).and_then(|mut report| {
        let folder = dir.join(&name);
        fs::rename(&staged, &folder)?;
        sync_folder(dir)?;
        report.folder = folder;
        Ok(report)
    });
    if report.is_err() {
        // The error of the backup is more important than the error of the removal.
        let _ = fs::remove_dir_all(&staged);
    }
    report
}

/// Returns an unused name for the backup: its time, such as `2026-11-18T15-04-05Z`.
fn folder_name(dir: &Path, created_at: UnixMicros) -> String {
    let seconds = created_at - created_at.rem_euclid(1_000_000);
    let name = timestamp(seconds).to_string().replace(':', "-");
    let mut unused = name.clone();
    let mut number = 1;
    while dir.join(&unused).exists() {
        number += 1;
        unused = format!("{name}-{number}");
    }
    unused
}

fn fill(source: &BackupSource, dir: &Path, staged: &Path) -> io::Result<BackupReport> {
    // Without a readable previous backup, all files are copied.
    let previous = newest(dir).unwrap_or_default();
    let mut backup = Filling { staged, previous, files: BTreeMap::new(), linked_bytes: 0 };
    // The database first: everything that this copy of it refers to exists until the end.
    let content = snapshot_into(&source.data_dir.join(DATABASE), &staged.join(DATABASE))?;
    backup.add_written(DATABASE)?;
    source.payloads.copy_into(&staged.join(PAYLOADS), &content.payloads)?;
    backup.add_written(PAYLOADS)?;
    let mut missing = Vec::new();
    create_private_folder(staged.join(WEIGHTS))?;
    for folder in content.weights {
        let name = format!("{WEIGHTS}/{folder}");
        match fs::read_dir(source.data_dir.join(&name)) {
            Ok(entries) => backup.add_folder(&name, entries)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(folder),
            Err(error) => return Err(error),
        }
    }
    sync_folder(staged.join(WEIGHTS))?;
    for entry in fs::read_dir(&source.data_dir)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_copied = name.starts_with(DATABASE) || name.starts_with(PAYLOADS);
        if entry.file_type()?.is_file()
            && !is_copied
            && !is_temporary(&name)
            && !EXCLUDED.contains(&&*name)
        {
            let digest = copy_file(&entry.path(), &staged.join(&name))?;
            backup.files.insert(name, digest);
        }
    }
    backup.finish(source.created_at, missing)
}

/// Returns whether a file of the data folder is being written and will be renamed.
fn is_temporary(name: &str) -> bool {
    name.starts_with('.') || Path::new(name).extension().is_some_and(|end| end == "new")
}

/// A backup that is being written.
struct Filling<'a> {
    staged: &'a Path,
    previous: Option<(PathBuf, Manifest)>,
    files: BTreeMap<String, FileDigest>,
    linked_bytes: u64,
}

impl Filling<'_> {
    /// Adds a file that was written to the folder of the backup.
    fn add_written(&mut self, name: &str) -> io::Result<()> {
        let path = self.staged.join(name);
        fs::File::open(&path)?.sync_all()?;
        self.files.insert(name.to_owned(), digest_file(&path)?);
        Ok(())
    }

    /// Adds the files of a folder of weights.
    fn add_folder(&mut self, folder: &str, entries: fs::ReadDir) -> io::Result<()> {
        create_private_folder(self.staged.join(folder))?;
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            // Files that are being written have temporary names.
            if entry.file_type()?.is_file() && !name.starts_with('.') {
                let name = format!("{folder}/{name}");
                let digest = self.link_or_copy(&entry.path(), &name)?;
                self.files.insert(name, digest);
            }
        }
        sync_folder(self.staged.join(folder))
    }

    /// Links to the file of the previous backup, if it has the file, or copies the file. Names of
    /// folders of weights are unique, and their files never change.
    fn link_or_copy(&mut self, from: &Path, name: &str) -> io::Result<FileDigest> {
        let to = self.staged.join(name);
        let size = fs::metadata(from)?.len();
        if let Some((folder, manifest)) = &self.previous
            && let Some(digest) = manifest.files.get(name)
            && digest.size == size
            && fs::hard_link(folder.join(name), &to).is_ok()
        {
            self.linked_bytes += size;
            return Ok(digest.clone());
        }
        copy_file(from, &to)
    }

    /// Writes the manifest.
    fn finish(self, created_at: UnixMicros, missing: Vec<String>) -> io::Result<BackupReport> {
        let bytes = self.files.values().map(|file| file.size).sum();
        let files = self.files.len();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let manifest = Manifest { format: FORMAT, created_at, version, files: self.files };
        let mut file = private_file(&self.staged.join(MANIFEST))?;
        file.write_all(&serde_json::to_vec_pretty(&manifest)?)?;
        file.sync_all()?;
        sync_folder(self.staged)?;
        let linked_bytes = self.linked_bytes;
        Ok(BackupReport { folder: PathBuf::new(), files, bytes, linked_bytes, missing })
    }
}
