//! The payload file: numbered byte strings, appended, flushed, and read by number.
//!
//! The rows of the database determine the meaning of a payload and whether it is needed.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tinkex_files::{AtomicWrite, FileOperation, StagedFile, announce};

use super::frame::{FrameHeader, HEADER_LEN, MAGIC};

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
}

/// Position of one payload in the file.
#[derive(Clone, Copy)]
pub(super) struct PayloadExtent {
    start: u64,
    /// Bytes of the header and the payload.
    length: u64,
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
    /// # Errors
    /// Fails if a payload of `needed` is missing.
    pub(super) fn open(path: &Path, next: u64, needed: &HashSet<u64>) -> io::Result<Self> {
        let mut file = private_file().open(path)?;
        let index = scan(&file, path, next)?;
        if let Some(missing) = needed.iter().find(|number| !index.extents.contains_key(number)) {
            let message = format!(
                "damaged at byte {}: payload {missing} is needed and not found; restore the data \
                 folder from a backup, or use another one",
                index.length
            );
            return Err(invalid_data(path, &message));
        }
        replacement(path).remove_leftover()?;
        file.truncate(index.length)?;
        if index.length == 0 {
            file.append(MAGIC)?;
        }
        announce(FileOperation::SyncFile(&file))?;
        file.sync_all()?;
        sync_folder_of(path)?;
        let index = PayloadIndex { length: index.length.max(MAGIC.len() as u64), ..index };
        Ok(Self::new(Box::new(file), index))
    }

    pub(super) fn new(file: Box<dyn AppendFile>, index: PayloadIndex) -> Self {
        Self { file, index: Arc::new(Mutex::new(index)), torn: false, unsynced_name: false }
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
            buffer.extend_from_slice(&FrameHeader::new(*number, payload)?.to_bytes());
            let length = (HEADER_LEN + payload.len()) as u64;
            appended.extents.push((*number, PayloadExtent { start: appended.length, length }));
            appended.length += length;
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
        extents.map(|extent| extent.length).sum()
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
                bytes += extent.length;
            }
        }
        let mut out = io::BufWriter::with_capacity(BUFFER, staged);
        for (number, extent) in part {
            from.seek(SeekFrom::Start(extent.start))?;
            if io::copy(&mut io::Read::take(&mut *from, extent.length), &mut out)? < extent.length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            extents.insert(number, PayloadExtent { start: *length, ..extent });
            *length += extent.length;
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
    /// Reads a payload.
    ///
    /// # Errors
    /// `NotFound` if there is no such payload, `InvalidData` if its checksum does not match.
    pub fn payload(&self, number: u64) -> io::Result<Bytes> {
        // Open the file under the lock, so that file and index match. A later compaction puts
        // another file under the same name and does not change the opened file.
        let (extent, mut file) = {
            let index = self.0.lock();
            let extent = index.extents.get(&number).copied();
            let missing =
                || io::Error::new(io::ErrorKind::NotFound, format!("payload {number} not found"));
            let extent = extent.ok_or_else(missing)?;
            announce(FileOperation::Read(&index.path))?;
            (extent, File::open(&index.path)?)
        };
        file.seek(SeekFrom::Start(extent.start))?;
        let header = FrameHeader::read(&mut file)?;
        let mut payload = Vec::new();
        file.take(extent.length - HEADER_LEN as u64).read_to_end(&mut payload)?;
        if header.is_none_or(|header| header.number != number || !header.matches(&payload)) {
            let message = format!("payload {number} is damaged on the server's disk");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(payload.into())
    }

    /// Returns the length of the file in bytes.
    pub(super) fn len(&self) -> u64 {
        self.0.lock().length
    }
}

/// Finds the payloads with numbers below `next` by following the headers from the start.
fn scan(file: &File, path: &Path, next: u64) -> io::Result<PayloadIndex> {
    let total = file.metadata()?.len();
    let mut index = PayloadIndex { path: path.to_owned(), extents: BTreeMap::new(), length: 0 };
    if total < MAGIC.len() as u64 {
        // A new file, or a file whose creation was interrupted by a crash.
        return Ok(index);
    }
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut magic = [0; MAGIC.len()];
    reader.read_exact(&mut magic)?;
    if magic != *MAGIC {
        return Err(invalid_data(path, "not a payload file of this server"));
    }
    index.length = MAGIC.len() as u64;
    let mut last = 0;
    while let Some(header) = FrameHeader::read(&mut reader)? {
        let length = HEADER_LEN as u64 + u64::from(header.length);
        if header.number <= last || header.number >= next || length > total - index.length {
            break;
        }
        index.extents.insert(header.number, PayloadExtent { start: index.length, length });
        index.length += length;
        last = header.number;
        reader.seek_relative(i64::from(header.length))?;
    }
    Ok(index)
}

fn invalid_data(path: &Path, message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {message}", path.display()))
}

/// Returns the atomic write with which compaction replaces the payload file.
fn replacement(path: &Path) -> AtomicWrite {
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
