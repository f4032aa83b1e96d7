//! The journal: everything that must survive a crash, in the order it happened.
//!
//! One thread owns the file. Records that arrive while it writes are written and flushed together
//! next time, so a hundred requests at once cost one flush. Whoever appends says what to do when
//! the record is on disk, or when it could not be written: a promise is given there and nowhere
//! else. A failed write is cut off again, so that what follows it is found.
//!
//! What has happened already cannot be refused: such records are owed. A disk that would not take
//! them is asked again, and until it does nothing that came later is written either.
//!
//! It knows neither what a record means nor which are still needed; [`Journal::keep`] is told.

mod frame;
mod scan;
mod writer;

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use bytes::Bytes;

use self::scan::scan;
use self::writer::{Append, Command, Part, Writer};

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

/// Where the body of each record lies. Locked for moments only: calls are answered meanwhile.
struct Index {
    path: PathBuf,
    places: BTreeMap<u64, Place>,
    length: u64,
    /// Why the disk does not take what is owed.
    trouble: Option<String>,
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
    /// One that is damaged in the middle is an error: what follows it would be lost silently. Where a
    /// power cut left a hole in what was not flushed yet, that is put aside and told.
    pub(crate) fn open(path: &Path) -> io::Result<(Self, Vec<Found>)> {
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let (found, places, length) = scan(&mut file, path)?;
        file.set_len(length)?;
        file.seek(SeekFrom::Start(length))?;
        file.sync_all()?;
        let disk = Box::new(file.try_clone()?);
        let next = found.last().map_or(1, |last| last.number + 1);
        let index = Index { path: path.to_owned(), places, length, trouble: None };
        Ok((Self::with_disk(disk, index, next, path)?, found))
    }

    fn with_disk(disk: Box<dyn Disk>, index: Index, next: u64, path: &Path) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let index = Arc::new(Mutex::new(index));
        let writer = Writer::new(disk, Arc::clone(&index), path.to_owned());
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run(&receiver))?;
        Ok(Self { next, sender: Some(sender), index, thread: Some(thread) })
    }

    /// Lines records up, to be written together or not at all, and returns the number of the first.
    /// `then` runs on a thread of the journal, never on the caller's.
    pub(crate) fn append(&mut self, records: Vec<(Vec<u8>, Bytes)>, then: Then) -> u64 {
        self.line_up(records, false, then)
    }

    /// The same for what has happened already: it is written, however long that takes. `then` gets
    /// an error only if the server ends before.
    pub(crate) fn owe(&mut self, records: Vec<(Vec<u8>, Bytes)>, then: Then) -> u64 {
        self.line_up(records, true, then)
    }

    fn line_up(&mut self, records: Vec<(Vec<u8>, Bytes)>, owed: bool, then: Then) -> u64 {
        let first = self.next;
        let parts: Vec<Part> = (first..)
            .zip(records)
            .map(|(number, (head, body))| Part { number, head, body })
            .collect();
        self.next += parts.len() as u64;
        self.send(Command::Append(Append { parts, owed, then }));
        first
    }

    /// Calls `then` when everything lined up so far is on disk, or is known not to be: with an error
    /// if something is owed still.
    pub(crate) fn settled(&mut self, then: Then) {
        self.send(Command::Settled { then });
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
        let Some(then) = failed.map(Command::then) else { return };
        // Not on the caller's stack: it may hold what `then` locks. If there is no thread to be had
        // nobody is told, which is what happens to those who wait when a server ends.
        let _ = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || then(Err(io::Error::other("the server is stopping"))));
    }

    /// Takes nothing more in. The thread ends when all is written that can be.
    pub(crate) fn close(&mut self) -> Option<JoinHandle<()>> {
        self.sender = None;
        self.thread.take()
    }

    /// Why the disk does not take what is owed, if it does not.
    pub(crate) fn trouble(&self) -> Option<String> {
        lock(&self.index).trouble.clone()
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
        let own = std::thread::current().id();
        if let Some(thread) = self.close().filter(|thread| thread.thread().id() != own) {
            // A panic there has been printed already.
            let _ = thread.join();
        }
    }
}

impl Reader {
    /// The body of a record.
    pub(crate) fn body(&self, number: u64) -> io::Result<Bytes> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the journal has no such record");
        // Opened under the lock: the file that has these places. It stays so when it is tidied.
        let (place, mut file) = {
            let index = lock(&self.0);
            let place = *index.places.get(&number).ok_or_else(gone)?;
            (place, File::open(&index.path)?)
        };
        let mut body = vec![0; place.body];
        file.seek(SeekFrom::Start(place.start + place.lead as u64))?;
        file.read_exact(&mut body)?;
        Ok(body.into())
    }
}

fn lock(index: &Mutex<Index>) -> std::sync::MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
