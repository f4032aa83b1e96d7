//! The file of payloads: numbered bytes, appended, flushed, read back by number.
//!
//! It knows neither what a payload means nor whether it is needed; the rows of the database do.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tinkex_files::AtomicWrite;

use super::frame::{HEAD, Head, MAGIC};

/// Bytes of small payloads that are written at once.
pub(super) const BUFFER: usize = 1 << 20;

/// What payloads are written on. A test has one that fails.
pub(super) trait Medium: Send {
    /// Writes all of it behind what is there.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Makes it last.
    fn flush(&mut self) -> io::Result<()>;
    /// Forgets everything behind `length`.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

impl Medium for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sync_data()
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)?;
        self.seek(SeekFrom::Start(length)).map(|_| ())
    }
}

/// The writer's side of the file.
pub(super) struct Payloads {
    medium: Box<dyn Medium>,
    index: Arc<Mutex<Index>>,
    /// Whether something half written stands behind the last good payload.
    torn: bool,
}

/// Reads payloads back; cheap to clone.
#[derive(Clone)]
pub(crate) struct Reader(Arc<Mutex<Index>>);

/// Where the payloads lie. Locked for moments only: calls are answered meanwhile.
pub(super) struct Index {
    pub(super) path: PathBuf,
    pub(super) places: BTreeMap<u64, Place>,
    pub(super) length: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Place {
    start: u64,
    /// Bytes of head and payload.
    length: u64,
}

/// Payloads that are on disk and belong to nothing yet.
pub(super) struct Appended {
    places: Vec<(u64, Place)>,
    length: u64,
}

impl Payloads {
    /// Opens or begins the file at `path`. What a crash left is cut off: a payload cut short, and
    /// those from number `next` on, which nothing refers to. The `needed` ones must be there.
    pub(super) fn open(path: &Path, next: u64, needed: &HashSet<u64>) -> io::Result<Self> {
        let mut file = own_file().open(path)?;
        let index = scan(&file, path, next)?;
        if let Some(missing) = needed.iter().find(|number| !index.places.contains_key(number)) {
            let why = format!(
                "is damaged at byte {}: payload {missing} is needed and not found; restore the data \
                 folder from a backup, or begin anew with another one",
                index.length
            );
            return Err(wrong(path, &why));
        }
        replacement(path).remove_leftover()?;
        file.cut(index.length)?;
        if index.length == 0 {
            file.append(MAGIC)?;
        }
        file.sync_all()?;
        sync_folder_of(path)?;
        let index = Index { length: index.length.max(MAGIC.len() as u64), ..index };
        Ok(Self::on(Box::new(file), index))
    }

    pub(super) fn on(medium: Box<dyn Medium>, index: Index) -> Self {
        Self { medium, index: Arc::new(Mutex::new(index)), torn: false }
    }

    pub(super) fn reader(&self) -> Reader {
        Reader(Arc::clone(&self.index))
    }

    /// Writes payloads and flushes them. They are found once they are [accepted](Self::accept).
    pub(super) fn append<'a>(
        &mut self,
        payloads: impl Iterator<Item = &'a (u64, Bytes)>,
    ) -> io::Result<Appended> {
        self.mend()?;
        let length = lock(&self.index).length;
        let mut appended = Appended { places: Vec::new(), length };
        let written = self.put(payloads, &mut appended);
        if written.is_err() {
            self.disown();
            // Tried again before the next write.
            let _ = self.mend();
        }
        written.map(|()| appended)
    }

    fn put<'a>(
        &mut self,
        payloads: impl Iterator<Item = &'a (u64, Bytes)>,
        appended: &mut Appended,
    ) -> io::Result<()> {
        let mut buffer = Vec::new();
        for (number, payload) in payloads {
            buffer.extend_from_slice(&Head::of(*number, payload)?.to_bytes());
            let length = (HEAD + payload.len()) as u64;
            appended.places.push((*number, Place { start: appended.length, length }));
            appended.length += length;
            if payload.len() < BUFFER / 4 {
                buffer.extend_from_slice(payload);
            } else {
                self.medium.append(&buffer)?;
                buffer.clear();
                self.medium.append(payload)?;
            }
            if buffer.len() >= BUFFER {
                self.medium.append(&buffer)?;
                buffer.clear();
            }
        }
        if appended.places.is_empty() {
            return Ok(());
        }
        self.medium.append(&buffer)?;
        self.medium.flush()
    }

    /// Rows refer to what was appended.
    pub(super) fn accept(&mut self, appended: Appended) {
        let mut index = lock(&self.index);
        index.length = appended.length;
        index.places.extend(appended.places);
    }

    /// What was appended and not accepted is to be cut off.
    pub(super) fn disown(&mut self) {
        self.torn = true;
    }

    /// Cuts off what a failed write left.
    pub(super) fn mend(&mut self) -> io::Result<()> {
        if self.torn {
            let length = lock(&self.index).length;
            self.medium.cut(length)?;
            self.torn = false;
        }
        Ok(())
    }

    pub(super) fn is_torn(&self) -> bool {
        self.torn
    }

    /// Bytes of the file.
    pub(super) fn len(&self) -> u64 {
        lock(&self.index).length
    }

    /// Bytes of these payloads.
    pub(super) fn len_of(&self, needed: &HashSet<u64>) -> u64 {
        let index = lock(&self.index);
        needed.iter().filter_map(|number| index.places.get(number)).map(|place| place.length).sum()
    }

    /// Copies the needed payloads into a new file, which then takes the old one's name.
    pub(super) fn keep(&mut self, needed: &HashSet<u64>) -> io::Result<()> {
        let path = lock(&self.index).path.clone();
        // Only this thread changes the places, so nobody has to wait while they are copied.
        let old = lock(&self.index).places.clone();
        let mut staged = replacement(&path).stage()?;
        let mut out = io::BufWriter::with_capacity(BUFFER, &mut staged);
        out.write_all(MAGIC)?;
        let mut length = MAGIC.len() as u64;
        let mut places = BTreeMap::new();
        let mut from = File::open(&path)?;
        for (number, place) in old.into_iter().filter(|(number, _)| needed.contains(number)) {
            from.seek(SeekFrom::Start(place.start))?;
            if io::copy(&mut (&from).take(place.length), &mut out)? < place.length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            places.insert(number, Place { start: length, ..place });
            length += place.length;
        }
        out.flush()?;
        drop(out);
        staged.sync()?;
        let file = {
            // Rename under the lock: a reader that opens the file expects these places in it.
            let mut index = lock(&self.index);
            let file = staged.publish()?;
            index.places = places;
            index.length = length;
            file
        };
        // Even if flushing the folder fails: the old file is no longer read.
        self.medium = Box::new(file);
        self.torn = false;
        sync_folder_of(&path)
    }
}

impl Reader {
    /// A payload. One that is not what was written is an error of kind `InvalidData`.
    pub(crate) fn payload(&self, number: u64) -> io::Result<Bytes> {
        // Opened under the lock: the file that has these places. It stays so when it is tidied.
        let (place, mut file) = {
            let index = lock(&self.0);
            let place = index.places.get(&number).copied();
            let gone = || io::Error::new(io::ErrorKind::NotFound, "there is no such payload");
            (place.ok_or_else(gone)?, File::open(&index.path)?)
        };
        file.seek(SeekFrom::Start(place.start))?;
        let head = Head::read(&mut file)?;
        let mut payload = Vec::new();
        file.take(place.length - HEAD as u64).read_to_end(&mut payload)?;
        if head.is_none_or(|head| head.number != number || !head.fits(&payload)) {
            let why = format!("payload {number} is damaged on the server's disk");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(payload.into())
    }

    /// Bytes of the file.
    pub(super) fn len(&self) -> u64 {
        lock(&self.0).length
    }
}

/// Finds where the payloads below `next` lie, from head to head.
fn scan(file: &File, path: &Path, next: u64) -> io::Result<Index> {
    let total = file.metadata()?.len();
    let mut index = Index { path: path.to_owned(), places: BTreeMap::new(), length: 0 };
    if total < MAGIC.len() as u64 {
        // New, or cut off while it was begun.
        return Ok(index);
    }
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut magic = [0; MAGIC.len()];
    reader.read_exact(&mut magic)?;
    if magic != *MAGIC {
        return Err(wrong(path, "is not a file of this server's payloads"));
    }
    index.length = MAGIC.len() as u64;
    let mut last = 0;
    while let Some(head) = Head::read(&mut reader)? {
        let length = HEAD as u64 + u64::from(head.length);
        if head.number <= last || head.number >= next || length > total - index.length {
            break;
        }
        index.places.insert(head.number, Place { start: index.length, length });
        index.length += length;
        last = head.number;
        reader.seek_relative(i64::from(head.length))?;
    }
    Ok(index)
}

fn wrong(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
}

/// How the file is replaced by a copy with the needed payloads only.
fn replacement(path: &Path) -> AtomicWrite {
    AtomicWrite::new(path).single_writer().owner_only()
}

/// How to make or open a file that only its owner reads: prompts stand in it.
pub(super) fn own_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Flushes the folder that holds `path`, so that a new name survives a power failure.
fn sync_folder_of(path: &Path) -> io::Result<()> {
    tinkex_files::sync_folder(path.parent().unwrap_or(Path::new(".")))
}

fn lock(index: &Mutex<Index>) -> MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}
