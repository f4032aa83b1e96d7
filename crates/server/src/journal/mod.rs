//! The journal: everything that must survive a crash, in the order it happened.
//!
//! One thread owns the file. Records that arrive while it writes are written and flushed together
//! next time, so a hundred requests at once cost one flush. Whoever appends says what to do when
//! the record is on disk, or when it could not be written: a promise is given there and nowhere
//! else. A failed write is cut off again, so that what follows it is found.
//!
//! It knows neither what a record means nor which are still needed; [`Journal::keep`] is told.

mod frame;

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use bytes::Bytes;

use self::frame::{FIXED, MAGIC, Next, PREFIX};

/// What to do once a record is on disk, or is known not to be.
pub(crate) type Then = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Where records are written. A test has one that fails.
pub(crate) trait Disk: Send {
    /// Writes all of it behind what is there.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Makes it last.
    fn flush(&mut self) -> io::Result<()>;
    /// Forgets everything behind `length`.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

impl Disk for File {
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

/// A record that was found when the journal was opened.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) number: u64,
    pub(crate) head: Vec<u8>,
    pub(crate) body_len: usize,
}

/// The way in. Dropping it writes what is waiting and stops the thread.
pub(crate) struct Journal {
    next: u64,
    sender: Option<Sender<Command>>,
    index: Arc<Mutex<Index>>,
    thread: Option<JoinHandle<()>>,
}

/// Reads bodies back; cheap to clone.
#[derive(Clone)]
pub(crate) struct Reader(Arc<Mutex<Index>>);

enum Command {
    Append { number: u64, head: Vec<u8>, body: Bytes, then: Then },
    Keep { live: HashSet<u64>, below: u64, then: Then },
}

/// Where the body of each record lies.
struct Index {
    file: File,
    places: BTreeMap<u64, Place>,
    length: u64,
}

#[derive(Clone, Copy)]
struct Place {
    start: u64,
    lead: usize,
    body: usize,
}

impl Place {
    fn len(self) -> u64 {
        (self.lead + self.body) as u64
    }
}

impl Journal {
    /// Opens or begins the journal at `path`, and returns what it holds.
    ///
    /// A record that a crash cut off at the end is dropped: nobody was promised anything for it.
    /// One that is damaged in the middle is an error: what follows it would be lost silently.
    pub(crate) fn open(path: &Path) -> io::Result<(Self, Vec<Found>)> {
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let (found, places, length) = scan(&mut file, path)?;
        file.set_len(length)?;
        file.seek(SeekFrom::Start(length))?;
        file.sync_all()?;
        let disk = Box::new(file.try_clone()?);
        let next = found.last().map_or(1, |last| last.number + 1);
        let index = Index { file: File::open(path)?, places, length };
        Ok((Self::with_disk(disk, index, next, path.to_owned())?, found))
    }

    fn with_disk(disk: Box<dyn Disk>, index: Index, next: u64, path: PathBuf) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let index = Arc::new(Mutex::new(index));
        let shared = Arc::clone(&index);
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || Writer { disk, index: shared, path }.run(&receiver))?;
        Ok(Self { next, sender: Some(sender), index, thread: Some(thread) })
    }

    /// Lines a record up and returns its number. `then` runs on the journal's thread.
    pub(crate) fn append(&mut self, head: Vec<u8>, body: Bytes, then: Then) -> u64 {
        let number = self.next;
        self.next += 1;
        self.send(Command::Append { number, head, body, then });
        number
    }

    /// Rewrites the file with the `live` records alone, and those lined up after this call.
    pub(crate) fn keep(&mut self, live: HashSet<u64>, then: Then) {
        let below = self.next;
        self.send(Command::Keep { live, below, then });
    }

    fn send(&mut self, command: Command) {
        let failed = match &self.sender {
            Some(sender) => sender.send(command).err().map(|unsent| unsent.0),
            None => Some(command),
        };
        if let Some(Command::Append { then, .. } | Command::Keep { then, .. }) = failed {
            then(Err(io::Error::other("the journal has stopped")));
        }
    }

    pub(crate) fn reader(&self) -> Reader {
        Reader(Arc::clone(&self.index))
    }

    /// The number of the next record.
    pub(crate) fn next_number(&self) -> u64 {
        self.next
    }

    /// Bytes of the file.
    pub(crate) fn len(&self) -> u64 {
        lock(&self.index).length
    }

    /// Bytes of these records.
    pub(crate) fn len_of(&self, live: &HashSet<u64>) -> u64 {
        let index = lock(&self.index);
        live.iter().filter_map(|number| index.places.get(number)).map(|place| place.len()).sum()
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.sender = None;
        let own = std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != own) {
            // A panic there has been printed already.
            let _ = thread.join();
        }
    }
}

impl Reader {
    /// The body of a record.
    pub(crate) fn body(&self, number: u64) -> io::Result<Bytes> {
        let mut index = lock(&self.0);
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the journal has no such record");
        let place = *index.places.get(&number).ok_or_else(gone)?;
        let mut body = vec![0; place.body];
        index.file.seek(SeekFrom::Start(place.start + place.lead as u64))?;
        index.file.read_exact(&mut body)?;
        Ok(body.into())
    }
}

fn lock(index: &Mutex<Index>) -> std::sync::MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a whole journal; returns the records, where they lie, and where the good part ends.
fn scan(file: &mut File, path: &Path) -> io::Result<(Vec<Found>, BTreeMap<u64, Place>, u64)> {
    let total = file.metadata()?.len();
    if total < MAGIC.len() as u64 {
        // New, or cut off while it was begun.
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(MAGIC)?;
        return Ok((Vec::new(), BTreeMap::new(), MAGIC.len() as u64));
    }
    let mut reader = BufReader::with_capacity(1 << 18, &*file);
    let mut magic = [0; MAGIC.len()];
    reader.read_exact(&mut magic)?;
    let wrong = |why: String| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
    };
    if magic != *MAGIC {
        return Err(wrong("is not a journal of this server".to_owned()));
    }
    let (mut found, mut places) = (Vec::new(), BTreeMap::new());
    let mut at = MAGIC.len() as u64;
    loop {
        match frame::read(&mut reader)? {
            Next::End => break,
            Next::Torn => {
                if has_more(path, at)? {
                    let why = format!(
                        "is damaged at byte {at}, and more follows; restore it from a backup, or move it away to begin anew"
                    );
                    return Err(wrong(why));
                }
                break;
            }
            Next::Frame(frame) => {
                let lead = PREFIX + FIXED + frame.head.len();
                let place = Place { start: at, lead, body: frame.body.len() };
                places.insert(frame.number, place);
                found.push(Found {
                    number: frame.number,
                    head: frame.head,
                    body_len: frame.body.len(),
                });
                at += place.len();
            }
        }
    }
    Ok((found, places, at))
}

/// Whether a whole record stands behind the damaged one that begins at `at`.
fn has_more(path: &Path, at: u64) -> io::Result<bool> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(at))?;
    let mut prefix = [0; 4];
    if file.read_exact(&mut prefix).is_err() {
        return Ok(false);
    }
    let skip = PREFIX as u64 + u64::from(u32::from_le_bytes(prefix));
    file.seek(SeekFrom::Start(at + skip))?;
    Ok(matches!(frame::read(&mut BufReader::new(file))?, Next::Frame(_)))
}

/// What the thread works with.
struct Writer {
    disk: Box<dyn Disk>,
    index: Arc<Mutex<Index>>,
    path: PathBuf,
}

/// Bytes of small records that are written at once.
const BUFFER: usize = 1 << 20;

impl Writer {
    fn run(mut self, receiver: &Receiver<Command>) {
        let mut batch = Vec::new();
        while let Ok(first) = receiver.recv() {
            let mut keep = None;
            match first {
                Command::Keep { live, below, then } => keep = Some((live, below, then)),
                append @ Command::Append { .. } => {
                    batch.push(append);
                    for next in receiver.try_iter().take(4096) {
                        match next {
                            Command::Keep { live, below, then } => {
                                keep = Some((live, below, then));
                                break;
                            }
                            append @ Command::Append { .. } => batch.push(append),
                        }
                    }
                }
            }
            self.write(&mut batch);
            if let Some((live, below, then)) = keep {
                then(self.rewrite(&live, below));
            }
        }
    }

    /// Writes a batch whole or not at all.
    fn write(&mut self, batch: &mut Vec<Command>) {
        let start = lock(&self.index).length;
        let (result, places) = self.try_write(batch, start);
        match &result {
            Ok(end) => {
                let mut index = lock(&self.index);
                index.length = *end;
                index.places.extend(places);
            }
            // If even this fails the next write does too, and says so.
            Err(_) => drop(self.disk.cut(start)),
        }
        for command in batch.drain(..) {
            let Command::Append { then, .. } = command else { continue };
            then(match &result {
                Ok(_) => Ok(()),
                Err(why) => Err(io::Error::new(why.kind(), why.to_string())),
            });
        }
    }

    fn try_write(&mut self, batch: &[Command], start: u64) -> (io::Result<u64>, Vec<(u64, Place)>) {
        let mut places = Vec::with_capacity(batch.len());
        let mut end = start;
        let mut buffer = Vec::new();
        let mut write = || {
            for command in batch {
                let Command::Append { number, head, body, .. } = command else { continue };
                let lead = frame::lead(*number, head, body)?;
                let place = Place { start: end, lead: lead.len(), body: body.len() };
                places.push((*number, place));
                end += place.len();
                buffer.extend_from_slice(&lead);
                if body.len() < BUFFER / 4 {
                    buffer.extend_from_slice(body);
                } else {
                    self.disk.append(&buffer)?;
                    buffer.clear();
                    self.disk.append(body)?;
                }
                if buffer.len() >= BUFFER {
                    self.disk.append(&buffer)?;
                    buffer.clear();
                }
            }
            self.disk.append(&buffer)?;
            self.disk.flush()?;
            Ok(end)
        };
        let result = write();
        (result, places)
    }

    /// Copies the live records into a new file, which then takes the old one's name.
    fn rewrite(&mut self, live: &HashSet<u64>, below: u64) -> io::Result<()> {
        let aside = self.path.with_extension("new");
        let mut index = lock(&self.index);
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&aside)?;
        let mut out = io::BufWriter::with_capacity(BUFFER, &mut file);
        out.write_all(MAGIC)?;
        let mut at = MAGIC.len() as u64;
        let mut places = BTreeMap::new();
        let kept: Vec<(u64, Place)> = index
            .places
            .iter()
            .filter(|(number, _)| **number >= below || live.contains(number))
            .map(|(number, place)| (*number, *place))
            .collect();
        for (number, place) in kept {
            index.file.seek(SeekFrom::Start(place.start))?;
            let copied = io::copy(&mut (&index.file).take(place.len()), &mut out)?;
            if copied < place.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            places.insert(number, Place { start: at, ..place });
            at += place.len();
        }
        out.flush()?;
        drop(out);
        file.sync_all()?;
        std::fs::rename(&aside, &self.path)?;
        if let Some(folder) = self.path.parent() {
            // The rename itself; some systems cannot flush folders.
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        index.file = File::open(&self.path)?;
        index.places = places;
        index.length = at;
        self.disk = Box::new(file);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
