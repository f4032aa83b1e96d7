//! The payload file: numbered byte strings, appended, flushed, and read by number.
//!
//! The rows of the database determine the meaning of a payload and whether it is needed.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tinkex_files::{AtomicWrite, FileOperation, StagedFile, announce};

use super::frame::{FrameHeader, HEADER_LEN, MAGIC};
use super::scan::PayloadScan;
use crate::log;

/// Size of the buffer that groups small payloads into one write, in bytes.
pub(super) const BUFFER: usize = 1 << 20;

/// Number of bytes that a compaction copies between two groups of writes: 8 MiB.
const PART_BYTES: u64 = 8 << 20;

/// File that payloads are appended to. Tests implement it with a file whose operations fail.
pub(super) trait AppendFile: Send {
    /// Writes all of `bytes` at the end.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Flushes the file to disk.
    fn flush(&mut self) -> io::Result<()>;
    /// Truncates the file to `length` bytes.
    fn truncate(&mut self, length: u64) -> io::Result<()>;
}

impl AppendFile for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        announce(FileOperation::Append(self))?;
        self.write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        announce(FileOperation::SyncFile(self))?;
        self.sync_data()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        announce(FileOperation::Truncate(self, length))?;
        self.set_len(length)?;
        self.seek(SeekFrom::Start(length)).map(|_| ())
    }
}

/// Payload file as the writer thread uses it. Other threads use a [`PayloadReader`].
pub(super) struct Payloads {
    file: Box<dyn AppendFile>,
    index: Arc<Mutex<PayloadIndex>>,
    /// Whether the file has bytes of a failed write after the last committed payload.
    torn: bool,
    /// Whether the name of the file may not be durable. After a power failure, the file that it
    /// replaced would have the name again, without the payloads that were appended to the new file.
    unsynced_name: bool,
    /// First payload number that no header in the file has.
    first_free: u64,
}

/// Reads payloads by number. Cheap to clone.
#[derive(Clone)]
pub struct PayloadReader(Arc<Mutex<PayloadIndex>>);

/// Positions of the committed payloads. Hold the lock only briefly: requests read payloads while
/// the writer appends.
pub(super) struct PayloadIndex {
    pub(super) path: PathBuf,
    pub(super) extents: BTreeMap<u64, PayloadExtent>,
    /// Length of the committed part of the file in bytes.
    pub(super) length: u64,
    /// Numbers of needed payloads that are damaged or missing.
    pub(super) lost: HashSet<u64>,
}

impl PayloadIndex {
    /// Creates the index of a file with `length` bytes and without payloads.
    pub(super) fn new(path: PathBuf, length: u64) -> Self {
        Self { path, extents: BTreeMap::new(), length, lost: HashSet::new() }
    }
}

/// Position of one payload in the file, and the header that was written in front of it. The header
/// in the file may be damaged.
#[derive(Clone, Copy, Debug)]
pub(super) struct PayloadExtent {
    pub(super) start: u64,
    pub(super) header: FrameHeader,
}

/// Payloads that are flushed but that no committed row refers to yet.
pub(super) struct UncommittedPayloads {
    extents: Vec<(u64, PayloadExtent)>,
    length: u64,
}

impl Payloads {
    /// Opens or creates the file at `path`, and removes the payloads of writes that a crash
    /// interrupted: an incomplete payload at the end, and the payloads from number `next` on, which
    /// no row refers to.
    ///
    /// If a payload of `needed` is damaged, reading it fails, and nothing is removed from the file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, if it is not a payload file, or if it is empty although
    /// payloads are needed.
    pub(super) fn open(path: &Path, next: u64, needed: &HashSet<u64>) -> io::Result<Self> {
        let mut file = private_file().open(path)?;
        let scan = PayloadScan::read(&file, path, next)?;
        if scan.end == 0 && !needed.is_empty() {
            let message = "the file is empty or missing, and stored requests need its payloads; \
                           restore the data folder from a backup, or run `tinkex server check`";
            return Err(invalid_data(path, message));
        }
        scan.log();
        let lost: HashSet<u64> =
            needed.iter().copied().filter(|number| !scan.extents.contains_key(number)).collect();
        replacement(path).remove_leftover()?;
        let (length, first_free) = if lost.is_empty() {
            file.truncate(scan.end)?;
            (scan.end.max(MAGIC.len() as u64), next)
        } else {
            tracing::error!(
                target: log::STORAGE,
                payloads = lost.len(),
                "payloads are damaged or missing; the requests that need them fail. Run `tinkex \
                 server check` on the stopped server for a list"
            );
            // Keep all bytes: another program may still recover them. New payloads are appended.
            file.seek(SeekFrom::Start(scan.total))?;
            (scan.total, scan.first_free.max(next))
        };
        // Write the start of a file without payloads again: if its flush failed in an earlier process,
        // the system may have dropped the bytes although it still shows them. Needs no space if the
        // file has the bytes already.
        if lost.is_empty() && scan.extents.is_empty() {
            file.seek(SeekFrom::Start(0))?;
            file.append(MAGIC)?;
        }
        announce(FileOperation::SyncFile(&file))?;
        file.sync_all()?;
        sync_folder_of(path)?;
        let path = path.to_owned();
        let index = PayloadIndex { path, extents: scan.extents, length, lost };
        Ok(Self { first_free, ..Self::new(Box::new(file), index) })
    }

    pub(super) fn new(file: Box<dyn AppendFile>, index: PayloadIndex) -> Self {
        let index = Arc::new(Mutex::new(index));
        Self { file, index, torn: false, unsynced_name: false, first_free: 0 }
    }

    /// Returns the first payload number that no header in the file has.
    pub(super) fn first_free(&self) -> u64 {
        self.first_free
    }

    pub(super) fn reader(&self) -> PayloadReader {
        PayloadReader(Arc::clone(&self.index))
    }

    /// Writes payloads and flushes them. Readers find them after [`commit`](Self::commit).
    pub(super) fn append<'a>(
        &mut self,
        payloads: impl Iterator<Item = &'a (u64, Bytes)>,
    ) -> io::Result<UncommittedPayloads> {
        self.repair()?;
        self.sync_name()?;
        let length = self.index.lock().length;
        let mut appended = UncommittedPayloads { extents: Vec::new(), length };
        let written = self.write(payloads, &mut appended);
        if written.is_err() {
            self.abandon();
            // A failed repair is repeated before the next write.
            let _ = self.repair();
        }
        written.map(|()| appended)
    }

    fn write<'a>(
        &mut self,
        payloads: impl Iterator<Item = &'a (u64, Bytes)>,
        appended: &mut UncommittedPayloads,
    ) -> io::Result<()> {
        let mut buffer = Vec::new();
        for (number, payload) in payloads {
            let header = FrameHeader::new(*number, payload)?;
            buffer.extend_from_slice(&header.to_bytes());
            appended.extents.push((*number, PayloadExtent { start: appended.length, header }));
            appended.length += header.frame_length();
            if payload.len() < BUFFER / 4 {
                buffer.extend_from_slice(payload);
            } else {
                self.file.append(&buffer)?;
                buffer.clear();
                self.file.append(payload)?;
            }
            if buffer.len() >= BUFFER {
                self.file.append(&buffer)?;
                buffer.clear();
            }
        }
        if appended.extents.is_empty() {
            return Ok(());
        }
        self.file.append(&buffer)?;
        self.file.flush()
    }

    /// Makes appended payloads visible to readers, once rows refer to them.
    pub(super) fn commit(&mut self, appended: UncommittedPayloads) {
        let mut index = self.index.lock();
        index.length = appended.length;
        index.extents.extend(appended.extents);
    }

    /// Marks the payloads after the last committed payload for removal by [`repair`](Self::repair).
    pub(super) fn abandon(&mut self) {
        self.torn = true;
    }

    /// Truncates the file after the last committed payload, if a write failed.
    pub(super) fn repair(&mut self) -> io::Result<()> {
        if self.torn {
            let length = self.index.lock().length;
            self.file.truncate(length)?;
            self.torn = false;
        }
        Ok(())
    }

    pub(super) fn is_torn(&self) -> bool {
        self.torn
    }

    /// Returns the length of the file in bytes.
    pub(super) fn len(&self) -> u64 {
        self.index.lock().length
    }

    /// Returns the total size of the given payloads in bytes.
    pub(super) fn len_of(&self, numbers: &HashSet<u64>) -> u64 {
        let index = self.index.lock();
        let extents = numbers.iter().filter_map(|number| index.extents.get(number));
        extents.map(|extent| extent.header.frame_length()).sum()
    }

    /// Starts to copy the payloads of `needed` into a new file.
    pub(super) fn start_compaction(&mut self, needed: HashSet<u64>) -> io::Result<Compaction> {
        let (path, next) = {
            let index = self.index.lock();
            let next = index.extents.last_key_value().map_or(0, |(number, _)| number + 1);
            (index.path.clone(), next)
        };
        let mut staged = replacement(&path).stage()?;
        staged.write_all(MAGIC)?;
        let from = File::open(&path)?;
        let length = MAGIC.len() as u64;
        let extents = BTreeMap::new();
        let copied = None;
        Ok(Compaction { staged, from, needed, next, extents, length, copied })
    }

    /// Copies up to [`PART_BYTES`] bytes and flushes them. Returns whether nothing is left to copy.
    pub(super) fn copy_part(&mut self, compaction: &mut Compaction) -> io::Result<bool> {
        let Compaction { staged, from, needed, next, extents, length, copied } = compaction;
        let first = copied.map_or(0, |number| number + 1);
        // Only this thread changes the index, so the copy can run without the lock.
        let mut part: Vec<(u64, PayloadExtent)> = Vec::new();
        let mut bytes = 0;
        let mut complete = true;
        for (number, extent) in self.index.lock().extents.range(first..) {
            if bytes >= PART_BYTES {
                complete = false;
                break;
            }
            *copied = Some(*number);
            // Payloads that were written after the start may be needed.
            if *number >= *next || needed.contains(number) {
                part.push((*number, *extent));
                bytes += extent.header.frame_length();
            }
        }
        let mut out = io::BufWriter::with_capacity(BUFFER, staged);
        for (number, extent) in part {
            copy_payload(from, extent, &mut out)?;
            extents.insert(number, PayloadExtent { start: *length, ..extent });
            *length += extent.header.frame_length();
        }
        // Flush each part: flushing the whole file at the end would stop the writes for long.
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync()?;
        Ok(complete)
    }

    /// Replaces the file by the copy. Nothing may have been written since the last
    /// [`copy_part`](Self::copy_part).
    pub(super) fn switch_to(&mut self, compaction: Compaction) -> io::Result<()> {
        let Compaction { staged, extents, length, .. } = compaction;
        let file = {
            // Rename under the lock: a reader must not combine the old index with the new file.
            let mut index = self.index.lock();
            let file = staged.publish()?;
            index.extents = extents;
            index.length = length;
            file
        };
        // Switch even if flushing the folder fails: readers already use the new file. The next
        // append then flushes the folder first.
        self.file = Box::new(file);
        self.torn = false;
        self.unsynced_name = true;
        self.sync_name()
    }

    /// Flushes the folder of the file, if the last attempt failed.
    fn sync_name(&mut self) -> io::Result<()> {
        if self.unsynced_name {
            let path = self.index.lock().path.clone();
            sync_folder_of(&path)?;
            self.unsynced_name = false;
        }
        Ok(())
    }
}

/// Copy of the needed payloads that is being made. Dropping it removes the copy.
pub(super) struct Compaction {
    staged: StagedFile,
    from: File,
    /// Payloads that were needed at the start.
    needed: HashSet<u64>,
    /// First number that was not assigned at the start.
    next: u64,
    /// Positions in the copy.
    extents: BTreeMap<u64, PayloadExtent>,
    /// Length of the copy in bytes.
    length: u64,
    /// Last number that was copied or left out.
    copied: Option<u64>,
}

impl PayloadReader {
    pub(super) fn new(index: PayloadIndex) -> Self {
        Self(Arc::new(Mutex::new(index)))
    }

    /// Reads a payload.
    ///
    /// # Errors
    /// `NotFound` if there is no such payload, `InvalidData` if its checksum does not match.
    pub fn payload(&self, number: u64) -> io::Result<Bytes> {
        // Open the file under the lock, so that file and index match. A later compaction puts
        // another file under the same name and does not change the opened file.
        let damaged = || {
            let message = format!("payload {number} is damaged on the server's disk");
            io::Error::new(io::ErrorKind::InvalidData, message)
        };
        let (extent, mut file) = {
            let index = self.0.lock();
            let extent = index.extents.get(&number).copied();
            let missing =
                || io::Error::new(io::ErrorKind::NotFound, format!("payload {number} not found"));
            let is_lost = index.lost.contains(&number);
            let extent = extent.ok_or_else(|| if is_lost { damaged() } else { missing() })?;
            announce(FileOperation::Read(&index.path))?;
            (extent, File::open(&index.path)?)
        };
        file.seek(SeekFrom::Start(extent.start + HEADER_LEN as u64))?;
        let mut payload = Vec::new();
        file.take(u64::from(extent.header.length)).read_to_end(&mut payload)?;
        if extent.header.matches(&payload) { Ok(payload.into()) } else { Err(damaged()) }
    }

    /// Writes a new payload file at `path` with the given payloads. Does not check them: a damaged
    /// payload is as damaged in the copy.
    pub(crate) fn copy_into(&self, path: &Path, numbers: &HashSet<u64>) -> io::Result<()> {
        // Open the file under the lock, as in `payload`.
        let (extents, mut from) = {
            let index = self.0.lock();
            let needed = index.extents.iter().filter(|(number, _)| numbers.contains(number));
            let extents: Vec<PayloadExtent> = needed.map(|(_, extent)| *extent).collect();
            (extents, File::open(&index.path)?)
        };
        let mut to = io::BufWriter::with_capacity(BUFFER, private_file().open(path)?);
        to.write_all(MAGIC)?;
        for extent in extents {
            copy_payload(&mut from, extent, &mut to)?;
        }
        to.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }

    /// Returns the length of the file in bytes.
    pub(super) fn len(&self) -> u64 {
        self.0.lock().length
    }

    /// Returns the size of a payload with its header in bytes; 0 if there is no such payload.
    pub(super) fn len_of(&self, number: u64) -> u64 {
        self.0.lock().extents.get(&number).map_or(0, |extent| extent.header.frame_length())
    }
}

/// Copies a payload to `out`, behind the header that was written for it.
pub(super) fn copy_payload(
    from: &mut File,
    extent: PayloadExtent,
    out: &mut impl io::Write,
) -> io::Result<()> {
    out.write_all(&extent.header.to_bytes())?;
    from.seek(SeekFrom::Start(extent.start + HEADER_LEN as u64))?;
    let length = u64::from(extent.header.length);
    if io::copy(&mut from.take(length), out)? < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

/// Returns the error for a file with unusable content.
pub(super) fn invalid_data(path: &Path, message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {message}", path.display()))
}

/// Returns the atomic write with which compaction replaces the payload file.
pub(super) fn replacement(path: &Path) -> AtomicWrite {
    AtomicWrite::new(path).single_writer().owner_only()
}

/// Returns options that open or create a file readable by its owner only, because payloads contain
/// prompts.
pub(super) fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    tinkex_files::no_follow(options.read(true).write(true).create(true).truncate(false));
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Flushes the folder that contains `path`, so that a new name survives a power failure.
fn sync_folder_of(path: &Path) -> io::Result<()> {
    tinkex_files::sync_folder(path.parent().unwrap_or(Path::new(".")))
}
