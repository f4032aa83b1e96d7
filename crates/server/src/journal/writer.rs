//! The thread that owns the file.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;

use super::frame::{self, MAGIC};
use super::{Disk, Index, Place, Then, lock};

/// What the thread is told.
pub(super) enum Command {
    Append(Append),
    Settled { then: Then },
    Keep { live: HashSet<u64>, below: u64, then: Then },
}

/// Records to be written together.
pub(super) struct Append {
    pub(super) parts: Vec<Part>,
    /// Whether they must be written in the end.
    pub(super) owed: bool,
    pub(super) then: Then,
}

/// A record to be written.
pub(super) struct Part {
    pub(super) number: u64,
    pub(super) head: Vec<u8>,
    pub(super) body: Bytes,
}

impl Part {
    fn len(&self) -> usize {
        frame::FIXED + self.head.len() + self.body.len()
    }
}

impl Command {
    pub(super) fn then(self) -> Then {
        match self {
            Self::Append(Append { then, .. })
            | Self::Settled { then }
            | Self::Keep { then, .. } => then,
        }
    }
}

/// What the thread works with.
pub(super) struct Writer {
    disk: Box<dyn Disk>,
    index: Arc<Mutex<Index>>,
    path: PathBuf,
    /// What the disk would not take and has to, in order.
    owed: Vec<Append>,
    /// Whether something half written stands behind the last good record.
    torn: bool,
}

/// Bytes of small records that are written at once.
pub(super) const BUFFER: usize = 1 << 20;
/// Appends that share one flush.
const MOST: usize = 4_096;
/// How long a disk that failed is left alone, if nothing new comes.
const AGAIN: Duration = Duration::from_millis(200);

impl Writer {
    pub(super) fn new(disk: Box<dyn Disk>, index: Arc<Mutex<Index>>, path: PathBuf) -> Self {
        Self { disk, index, path, owed: Vec::new(), torn: false }
    }

    pub(super) fn run(mut self, receiver: &Receiver<Command>) {
        loop {
            let first = if self.owed.is_empty() && !self.torn {
                receiver.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                receiver.recv_timeout(AGAIN)
            };
            let first = match first {
                Ok(first) => Some(first),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let mut batch = Vec::new();
            let mut last = None;
            for command in first.into_iter().chain(receiver.try_iter().take(MOST)) {
                match command {
                    Command::Append(append) => batch.push(append),
                    // What comes behind it has to wait for it.
                    other => {
                        last = Some(other);
                        break;
                    }
                }
            }
            self.write(batch);
            match last {
                Some(Command::Settled { then }) => then(self.nothing_owed()),
                Some(Command::Keep { live, below, then }) => {
                    let kept = self.nothing_owed().and_then(|()| self.rewrite(&live, below));
                    if kept.is_err() {
                        // Half a copy helps nobody, and the disk may be full.
                        let _ = std::fs::remove_file(self.aside());
                    }
                    then(kept);
                }
                Some(Command::Append(_)) | None => {}
            }
        }
        self.write(Vec::new());
        for Append { then, .. } in self.owed.drain(..) {
            then(Err(io::Error::other("the server stopped before the disk took it")));
        }
    }

    fn nothing_owed(&self) -> io::Result<()> {
        if self.owed.is_empty() {
            return Ok(());
        }
        let why = lock(&self.index).trouble.clone().unwrap_or_default();
        Err(io::Error::other(format!("the disk does not take what is owed to it: {why}")))
    }

    /// Writes what is owed and then a batch, each whole or not at all.
    fn write(&mut self, batch: Vec<Append>) {
        let batch = fitting(batch);
        // Whoever was refused must not find it done after a restart. If it fails again the next
        // write does too.
        let _ = self.mend();
        if !self.owed.is_empty() {
            let owed = std::mem::take(&mut self.owed);
            self.write_together(owed);
        }
        if batch.is_empty() {
            return;
        }
        if self.owed.is_empty() {
            self.write_together(batch);
            if !self.owed.is_empty() {
                // Without what was refused it may fit.
                let owed = std::mem::take(&mut self.owed);
                self.write_together(owed);
            }
        } else {
            let why = lock(&self.index).trouble.clone().unwrap_or_default();
            self.refuse(batch, &io::Error::other(why));
        }
    }

    fn write_together(&mut self, batch: Vec<Append>) {
        match self.try_write(&batch) {
            Ok(()) => {
                lock(&self.index).trouble = None;
                for append in batch {
                    (append.then)(Ok(()));
                }
            }
            Err(why) => self.refuse(batch, &why),
        }
    }

    /// Tells who can be told no; the others are tried again.
    fn refuse(&mut self, batch: Vec<Append>, why: &io::Error) {
        for append in batch {
            if append.owed {
                self.owed.push(append);
            } else {
                (append.then)(Err(io::Error::new(why.kind(), why.to_string())));
            }
        }
        let trouble = (!self.owed.is_empty()).then(|| why.to_string());
        let mut index = lock(&self.index);
        if trouble.is_some() && index.trouble.is_none() {
            crate::log::warn(format_args!("answers wait for the disk, which says: {why}"));
        }
        index.trouble = trouble;
    }

    /// Cuts off what a failed write left.
    fn mend(&mut self) -> io::Result<()> {
        if self.torn {
            let length = lock(&self.index).length;
            self.disk.cut(length)?;
            self.torn = false;
        }
        Ok(())
    }

    fn try_write(&mut self, batch: &[Append]) -> io::Result<()> {
        self.mend()?;
        let start = lock(&self.index).length;
        let mut places = Vec::with_capacity(batch.len());
        match self.put(batch, start, &mut places) {
            Ok(end) => {
                let mut index = lock(&self.index);
                index.length = end;
                index.places.extend(places);
                Ok(())
            }
            Err(why) => {
                // If this fails too it is done before anything else is written.
                self.torn = self.disk.cut(start).is_err();
                Err(why)
            }
        }
    }

    /// Writes records behind `start` and returns where they end.
    fn put(
        &mut self,
        batch: &[Append],
        start: u64,
        places: &mut Vec<(u64, Place)>,
    ) -> io::Result<u64> {
        let mut end = start;
        let mut buffer = Vec::new();
        for Part { number, head, body } in batch.iter().flat_map(|append| &append.parts) {
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
    }

    fn aside(&self) -> PathBuf {
        self.path.with_extension("new")
    }

    /// Copies the live records into a new file, which then takes the old one's name.
    fn rewrite(&mut self, live: &HashSet<u64>, below: u64) -> io::Result<()> {
        let aside = self.aside();
        // Only this thread changes the places, so nobody has to wait while they are copied.
        let old = lock(&self.index).places.clone();
        // A fact that was replaced by one that is not on disk would be lost.
        if let Some(missing) = live.iter().find(|number| !old.contains_key(number)) {
            return Err(io::Error::other(format!("record {missing} is not on disk yet")));
        }
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&aside)?;
        let mut out = io::BufWriter::with_capacity(BUFFER, &mut file);
        out.write_all(MAGIC)?;
        let mut at = MAGIC.len() as u64;
        let mut places = BTreeMap::new();
        let mut from = File::open(&self.path)?;
        let kept = |number: &u64| *number >= below || live.contains(number);
        for (number, place) in old.into_iter().filter(|(number, _)| kept(number)) {
            from.seek(SeekFrom::Start(place.start))?;
            let copied = io::copy(&mut (&from).take(place.len()), &mut out)?;
            if copied < place.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            places.insert(number, Place { start: at, ..place });
            at += place.len();
        }
        out.flush()?;
        drop(out);
        file.sync_all()?;
        {
            // Together: whoever opens the file finds the places in it.
            let mut index = lock(&self.index);
            std::fs::rename(&aside, &self.path)?;
            index.places = places;
            index.length = at;
        }
        if let Some(folder) = self.path.parent() {
            // The rename itself; some systems cannot flush folders.
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        self.disk = Box::new(file);
        self.torn = false;
        Ok(())
    }
}

/// Those that can be written at all. The others are told so, also if they are owed: the disk would
/// refuse them for ever, and with them everything behind.
fn fitting(batch: Vec<Append>) -> Vec<Append> {
    let fits = |append: &Append| append.parts.iter().all(|part| part.len() <= frame::LONGEST);
    let (fitting, long): (Vec<Append>, Vec<Append>) = batch.into_iter().partition(fits);
    for append in long {
        let why = "the record is too long";
        (append.then)(Err(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    fitting
}
