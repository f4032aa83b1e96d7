//! The disk: everything that must survive a crash.
//!
//! Facts are rows of a [`database`]; bodies of requests and answers are [`payloads`], numbered, in a
//! file beside it. One thread, the [`writer`], owns both. What arrives while it writes is written
//! together next time: the payloads and a flush, then one transaction. So a hundred requests at
//! once cost two flushes, and a row never refers to a payload that is not on disk. A payload that no
//! row refers to does not exist.
//!
//! Whoever appends says what to do when it is on disk, or when it could not be written: a promise
//! is given there and nowhere else. A failed write leaves nothing behind.
//!
//! What has happened already cannot be refused: it is owed. A disk that would not take it is asked
//! again, and until it does nothing that came later is written either.

mod database;
mod frame;
mod payloads;
mod writer;

use std::io;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use bytes::Bytes;

use self::database::Database;
pub(crate) use self::database::{Answered, Found};
use self::payloads::Payloads;
pub(crate) use self::payloads::Reader;
use self::writer::{Append, Command, Writer};
use crate::fact::Fact;

/// What to do once something is on disk, or is known not to be.
pub(crate) type Then = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Where facts are, in the data folder.
const DATABASE: &str = "metadata.sqlite";
/// Where bodies and answers are.
const PAYLOADS: &str = "payloads";
/// Where all of it was before there was a database.
const JOURNAL: &str = "journal";
/// The folder of all weights, beside.
pub(crate) const WEIGHTS: &str = "weights";

/// The way in. Dropping it writes what is waiting and stops the thread.
pub(crate) struct Disk {
    next: u64,
    sender: Option<Sender<Command>>,
    reader: Reader,
    health: Arc<Mutex<Health>>,
    thread: Option<JoinHandle<()>>,
}

/// How the disk is doing.
#[derive(Debug, Default)]
struct Health {
    /// Why it does not take what is owed.
    trouble: Option<String>,
    /// Batches that it took.
    commits: u64,
}

impl Disk {
    /// Opens what is in `folder`, or begins it, and returns what it says.
    ///
    /// What a crash left unfinished is dropped: nobody was promised anything for it. A payload that
    /// a row needs and that is not to be found is an error: more may be lost than can be told.
    pub(crate) fn open(folder: &Path) -> io::Result<(Self, Found)> {
        let (path, payloads) = (folder.join(DATABASE), folder.join(PAYLOADS));
        if !path.exists() {
            nothing_before(folder)?;
        }
        let mut database = Database::open(&path)?;
        if database.is_new() {
            nothing_before(folder)?;
            database.begin()?;
        }
        let found = database.read()?;
        let next = database.next_number()?;
        let payloads = Payloads::open(&payloads, next, &database.needed()?)?;
        Ok((Self::start(database, payloads, next)?, found))
    }

    fn start(database: Database, payloads: Payloads, next: u64) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let health = Arc::default();
        let reader = payloads.reader();
        let writer = Writer::new(database, payloads, Arc::clone(&health));
        let thread = std::thread::Builder::new()
            .name("disk".to_owned())
            .spawn(move || writer.run(&receiver))?;
        Ok(Self { next, sender: Some(sender), reader, health, thread: Some(thread) })
    }

    /// The number for the next payload.
    pub(crate) fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    /// Lines up facts and the payload that they refer to, to be written together or not at all.
    /// `then` runs on a thread of the disk, never on the caller's.
    pub(crate) fn append(&mut self, facts: Vec<Fact>, payload: Option<(u64, Bytes)>, then: Then) {
        self.send(Command::Append(Append { facts, payload, owed: false, then }));
    }

    /// The same for what has happened already: it is written, however long that takes. `then` gets
    /// an error only if the server ends before.
    pub(crate) fn owe(&mut self, facts: Vec<Fact>, payload: Option<(u64, Bytes)>, then: Then) {
        self.send(Command::Append(Append { facts, payload, owed: true, then }));
    }

    /// Calls `then` when everything lined up so far is on disk, or is known not to be: with an error
    /// if something is owed still.
    pub(crate) fn settled(&mut self, then: Then) {
        self.send(Command::Settled { then });
    }

    /// Drops the payloads that no row needs, if there are `at_least` so many bytes of payloads and
    /// more than half of them are of no use.
    pub(crate) fn tidy(&mut self, at_least: u64, then: Then) {
        self.send(Command::Tidy { at_least, then });
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
            .name("disk".to_owned())
            .spawn(move || then(Err(io::Error::other("the server is stopping"))));
    }

    /// Takes nothing more in. The thread ends when all is written that can be.
    pub(crate) fn close(&mut self) -> Option<JoinHandle<()>> {
        self.sender = None;
        self.thread.take()
    }

    /// Why the disk does not take what is owed, if it does not.
    pub(crate) fn trouble(&self) -> Option<String> {
        lock(&self.health).trouble.clone()
    }

    /// Batches that were written.
    pub(crate) fn commits(&self) -> u64 {
        lock(&self.health).commits
    }

    /// Bytes of payloads.
    pub(crate) fn payload_bytes(&self) -> u64 {
        self.reader.len()
    }

    pub(crate) fn reader(&self) -> Reader {
        self.reader.clone()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let own = std::thread::current().id();
        if let Some(thread) = self.close().filter(|thread| thread.thread().id() != own) {
            // A panic there has been printed already.
            let _ = thread.join();
        }
    }
}

/// Nothing is begun where something was: weights that nothing refers to would be removed.
fn nothing_before(folder: &Path) -> io::Result<()> {
    let begun = frame::MAGIC.len() as u64;
    let payloads = std::fs::metadata(folder.join(PAYLOADS));
    let (name, why) = if folder.join(JOURNAL).exists() {
        let why = "is of an earlier form that this server does not read; use another data folder, \
                   or the version that wrote it";
        (JOURNAL, why)
    } else if payloads.is_ok_and(|file| file.len() > begun) {
        let why = "has payloads, but the database that belongs to it is gone; restore the data \
                   folder from a backup, or begin anew with another one";
        (PAYLOADS, why)
    } else if std::fs::read_dir(folder.join(WEIGHTS)).is_ok_and(|mut found| found.next().is_some())
    {
        let why = "has weights, but the database that knows them is gone; restore the data folder \
                   from a backup, or begin anew with another one";
        (WEIGHTS, why)
    } else {
        return Ok(());
    };
    let place = folder.join(name);
    Err(io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", place.display())))
}

fn lock(health: &Mutex<Health>) -> std::sync::MutexGuard<'_, Health> {
    health.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
