//! Verifies and repairs the data folder of a stopped server.
//!
//! * `tables` reads the rows of a database, also of a damaged one, and copies them to a new one.
//! * `references` lists the payloads and the folders of weights that rows refer to.

mod references;
mod tables;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use self::references::StoredReferences;
use self::tables::StoredTables;
use super::frame::MAGIC;
use super::payloads::{PayloadExtent, PayloadIndex, PayloadReader, copy_payload, replacement};
use super::scan::PayloadScan;
use super::{DATABASE, PAYLOADS, WEIGHTS};
use crate::sealed;

/// Result of a check of a data folder.
#[derive(Debug, Serialize)]
pub struct DataFolderReport {
    pub database: FileReport,
    pub payloads: FileReport,
    pub weights: Vec<WeightsReport>,
    /// Stored objects that cannot be read.
    pub lost: Vec<LostObject>,
    /// Changes that the repair made.
    pub repairs: Vec<String>,
}

/// State of the database or of the payload file.
#[derive(Debug, Serialize)]
pub struct FileReport {
    pub state: FileState,
    /// Number of rows, or of payloads, that can be read.
    pub readable: usize,
    pub problems: Vec<String>,
}

/// Whether a file can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileState {
    Intact,
    Damaged,
    Missing,
}

/// State of a folder of weights.
#[derive(Debug, Serialize)]
pub struct WeightsReport {
    /// Name of the folder under `weights/`.
    pub folder: String,
    pub state: WeightsState,
    /// Checkpoints, runs and sampling sessions that use the folder. Empty if the database cannot be
    /// read, or if the folder is waiting for its removal.
    pub used_by: Vec<String>,
    pub problem: Option<String>,
}

/// Whether the files of a folder of weights match their digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsState {
    Intact,
    /// The folder was written before digests were stored.
    Unverified,
    Damaged,
    Missing,
}

/// A stored object that cannot be read.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct LostObject {
    /// The object, for example a checkpoint or a request.
    pub object: String,
    pub reason: String,
}

impl DataFolderReport {
    /// Returns whether every file is intact.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        self.database.state == FileState::Intact
            && self.payloads.state == FileState::Intact
            && self.lost.is_empty()
            && self.weights.iter().all(|folder| !folder.state.is_lost())
    }
}

impl WeightsState {
    /// Returns whether the weights cannot be used.
    #[must_use]
    pub fn is_lost(self) -> bool {
        matches!(self, Self::Damaged | Self::Missing)
    }
}

/// Verifies the data folder `folder`, which no server uses.
///
/// # Errors
/// If the payload file or a folder cannot be read because of an I/O error. Damage is not an error,
/// and unreadable weights are reported as damaged.
pub fn check(folder: &Path) -> io::Result<DataFolderReport> {
    Ok(Check::read(folder)?.report)
}

/// Verifies the data folder `folder`, which no server uses, and repairs the database and the payload
/// file. The damaged files are kept beside the repaired files. The report describes the folder
/// before the repair.
///
/// # Errors
/// If a file cannot be read or written. Damage is not an error.
pub fn repair(folder: &Path) -> io::Result<DataFolderReport> {
    let Check { mut report, tables, payloads } = Check::read(folder)?;
    if let Some(tables) = tables
        && report.database.state == FileState::Damaged
    {
        let next = payloads.as_ref().map_or(1, |payloads| payloads.first_free);
        let repaired = folder.join(format!("{DATABASE}.new"));
        remove_database(&repaired)?;
        let written = tables.write_to(&repaired, next)?;
        let kept = set_aside(&folder.join(DATABASE), &["", "-wal", "-shm"])?;
        tinkex_files::publish(&File::open(&repaired)?, &repaired, folder.join(DATABASE))?;
        let rows = written.rows;
        report.lost.extend(written.rejected);
        report
            .repairs
            .push(format!("copied {rows} rows to a new database; {kept} has the old one"));
    }
    if let Some(payloads) = payloads
        && report.payloads.state == FileState::Damaged
    {
        let path = folder.join(PAYLOADS);
        let count = payloads.readable.len();
        let mut staged = replacement(&path).stage()?;
        staged.write_all(MAGIC)?;
        let mut from = File::open(&path)?;
        for extent in payloads.readable.into_values() {
            copy_payload(&mut from, extent, &mut staged)?;
        }
        staged.sync()?;
        let kept = set_aside(&path, &[""])?;
        staged.commit()?;
        report
            .repairs
            .push(format!("copied {count} payloads to a new file; {kept} has the old one"));
    }
    Ok(report)
}

/// Content of a data folder.
struct Check {
    report: DataFolderReport,
    /// Rows of the database; `None` if it has none.
    tables: Option<StoredTables>,
    /// Payloads; `None` if the folder has no payload file.
    payloads: Option<CheckedPayloads>,
}

/// Payloads of a payload file.
struct CheckedPayloads {
    /// Payloads whose checksums match.
    readable: BTreeMap<u64, PayloadExtent>,
    first_free: u64,
}

impl Check {
    fn read(folder: &Path) -> io::Result<Self> {
        let database = folder.join(DATABASE);
        let tables = if database.exists() { StoredTables::read(&database) } else { Err(None) };
        let mut lost = Vec::new();
        let (database, tables) = match tables {
            Ok(tables) => {
                lost.extend(tables.unreadable());
                (tables.report(), Some(tables))
            }
            Err(problem) => {
                let state = if problem.is_some() { FileState::Damaged } else { FileState::Missing };
                let problems = problem.into_iter().collect();
                (FileReport { state, readable: 0, problems }, None)
            }
        };
        let references = tables.as_ref().map(StoredReferences::read).unwrap_or_default();
        let (payload_file, payloads) = check_payloads(folder, &references, &mut lost)?;
        let weights = check_weights(folder, &references, &mut lost)?;
        let repairs = Vec::new();
        let report = DataFolderReport { database, payloads: payload_file, weights, lost, repairs };
        Ok(Self { report, tables, payloads })
    }
}

/// Reads every payload and compares its checksum.
fn check_payloads(
    folder: &Path,
    references: &StoredReferences,
    lost: &mut Vec<LostObject>,
) -> io::Result<(FileReport, Option<CheckedPayloads>)> {
    let path = folder.join(PAYLOADS);
    let mut report = FileReport { state: FileState::Missing, readable: 0, problems: Vec::new() };
    let scan = match File::open(&path) {
        Ok(file) => match PayloadScan::read(&file, &path, references.next_payload) {
            Ok(scan) => Some(scan),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                report.state = FileState::Damaged;
                report.problems.push("not a payload file of this server".to_owned());
                None
            }
            Err(error) => return Err(error),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let Some(scan) = scan else {
        for user in references.payloads.values() {
            lost.push(LostObject::new(user, "the payload file is missing or unreadable"));
        }
        return Ok((report, None));
    };
    // The end may be a write that a crash interrupted, which is not damage.
    for part in scan.damaged.iter().filter(|part| part.end <= scan.end) {
        let bytes = part.end - part.start;
        report.problems.push(format!("{bytes} bytes at byte {} are damaged", part.start));
    }
    for number in &scan.repeated {
        report.problems.push(format!("two payloads have the number {number}; neither is used"));
    }
    for number in &scan.corrected {
        report.problems.push(format!("the header of payload {number} has a wrong byte"));
    }
    let PayloadScan { extents, total, first_free, .. } = scan;
    let index = PayloadIndex { extents: extents.clone(), ..PayloadIndex::new(path, total) };
    let reader = PayloadReader::new(index);
    let mut readable = BTreeMap::new();
    for (number, extent) in extents {
        match reader.payload(number) {
            Ok(_) => drop(readable.insert(number, extent)),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                report.problems.push(format!("payload {number} does not match its checksum"));
            }
            Err(error) => return Err(error),
        }
    }
    for (number, user) in &references.payloads {
        if !readable.contains_key(number) {
            // Not a problem of the file: after a repair, the file is intact without the payload.
            lost.push(LostObject::new(user, "its payload is damaged or missing"));
        }
    }
    report.state = if report.problems.is_empty() { FileState::Intact } else { FileState::Damaged };
    report.readable = readable.len();
    Ok((report, Some(CheckedPayloads { readable, first_free })))
}

/// Verifies the digests of all folders of weights.
fn check_weights(
    folder: &Path,
    references: &StoredReferences,
    lost: &mut Vec<LostObject>,
) -> io::Result<Vec<WeightsReport>> {
    let root = folder.join(WEIGHTS);
    let mut names: Vec<String> = match fs::read_dir(&root) {
        Ok(entries) => {
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    // Folders that were being written have temporary names.
    names.retain(|name| !name.starts_with('.'));
    let missing = references.weights.keys().filter(|folder| !names.contains(folder)).cloned();
    let missing: Vec<String> = missing.collect();
    let mut reports = Vec::new();
    for folder in names.into_iter().chain(missing) {
        let path = root.join(&folder);
        let used_by = references.weights.get(&folder).cloned().unwrap_or_default();
        let (state, problem) = match sealed::verify(&path) {
            _ if !path.exists() => {
                (WeightsState::Missing, Some("the folder is missing".to_owned()))
            }
            Ok(()) if sealed::digest_of_name(&folder).is_none() => (WeightsState::Unverified, None),
            Ok(()) => (WeightsState::Intact, None),
            Err(error) => (WeightsState::Damaged, Some(error.to_string())),
        };
        for user in used_by.iter().filter(|_| state.is_lost()) {
            lost.push(LostObject::new(user, problem.as_deref().unwrap_or_default()));
        }
        reports.push(WeightsReport { folder, state, used_by, problem });
    }
    reports.sort_by(|a, b| a.folder.cmp(&b.folder));
    Ok(reports)
}

impl LostObject {
    fn new(object: &str, reason: &str) -> Self {
        Self { object: object.to_owned(), reason: reason.to_owned() }
    }
}

/// Renames a file and the files that belong to it, so that the name of the first ends with
/// `.damaged` or `.damaged-N`. Returns the new name of the first.
fn set_aside(path: &Path, suffixes: &[&str]) -> io::Result<String> {
    let with = |text: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(text);
        PathBuf::from(name)
    };
    let mut kept = ".damaged".to_owned();
    let mut number = 2;
    while with(&kept).exists() {
        kept = format!(".damaged-{number}");
        number += 1;
    }
    for suffix in suffixes {
        match fs::rename(with(suffix), with(&format!("{kept}{suffix}"))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let name = with(&kept).file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(name)
}

/// Removes a database that an interrupted repair left.
fn remove_database(path: &Path) -> io::Result<()> {
    for suffix in ["", "-wal", "-shm", "-journal"] {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        tinkex_files::remove_file_if_exists(PathBuf::from(name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
