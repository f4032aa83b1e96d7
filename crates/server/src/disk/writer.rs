//! The thread that writes.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;

use super::database::Database;
use super::frame::LONGEST;
use super::payloads::Payloads;
use super::{Health, Then, lock};
use crate::fact::Fact;

/// What the thread is told.
pub(super) enum Command {
    Append(Append),
    Settled { then: Then },
    Tidy { at_least: u64, then: Then },
}

/// What is to be written together.
pub(super) struct Append {
    pub(super) facts: Vec<Fact>,
    pub(super) payload: Option<(u64, Bytes)>,
    /// Whether it must be written in the end.
    pub(super) owed: bool,
    pub(super) then: Then,
}

impl Command {
    pub(super) fn then(self) -> Then {
        match self {
            Self::Append(Append { then, .. })
            | Self::Settled { then }
            | Self::Tidy { then, .. } => then,
        }
    }
}

/// What the thread works with.
pub(super) struct Writer {
    database: Database,
    payloads: Payloads,
    health: Arc<Mutex<Health>>,
    /// What the disk would not take and has to, in order.
    owed: Vec<Append>,
}

/// Appends that share one commit.
const MOST: usize = 4_096;
/// How long a disk that failed is left alone, if nothing new comes.
const AGAIN: Duration = Duration::from_millis(200);

impl Writer {
    pub(super) fn new(database: Database, payloads: Payloads, health: Arc<Mutex<Health>>) -> Self {
        Self { database, payloads, health, owed: Vec::new() }
    }

    pub(super) fn run(mut self, receiver: &Receiver<Command>) {
        loop {
            let first = if self.owed.is_empty() && !self.has_to_mend() {
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
                Some(Command::Tidy { at_least, then }) => {
                    then(self.nothing_owed().and_then(|()| self.tidy(at_least)));
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
        let why = lock(&self.health).trouble.clone().unwrap_or_default();
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
            let why = lock(&self.health).trouble.clone().unwrap_or_default();
            self.refuse(batch, &io::Error::other(why));
        }
    }

    fn write_together(&mut self, batch: Vec<Append>) {
        match self.try_write(&batch) {
            Ok(()) => {
                {
                    let mut health = lock(&self.health);
                    health.trouble = None;
                    health.commits += 1;
                }
                for append in batch {
                    (append.then)(Ok(()));
                }
            }
            Err(why) => self.refuse(batch, &why),
        }
    }

    /// Tells who can be told no; the others are tried again.
    fn refuse(&mut self, batch: Vec<Append>, why: &io::Error) {
        let (owed, refused): (Vec<Append>, Vec<Append>) =
            batch.into_iter().partition(|append| append.owed);
        self.owed.extend(owed);
        {
            let trouble = (!self.owed.is_empty()).then(|| why.to_string());
            let mut health = lock(&self.health);
            if trouble.is_some() && health.trouble.is_none() {
                crate::log::warn(format_args!("answers wait for the disk, which says: {why}"));
            }
            health.trouble = trouble;
        }
        for append in refused {
            (append.then)(Err(io::Error::new(why.kind(), why.to_string())));
        }
    }

    fn has_to_mend(&self) -> bool {
        self.payloads.is_torn() || self.database.is_doubtful()
    }

    /// Takes away what a failed write left: the payloads last, while no row can refer to them.
    fn mend(&mut self) -> io::Result<()> {
        self.database.mend()?;
        self.payloads.mend()
    }

    /// The payloads first: no row refers to one that is not on disk.
    fn try_write(&mut self, batch: &[Append]) -> io::Result<()> {
        self.mend()?;
        let payloads = || batch.iter().filter_map(|append| append.payload.as_ref());
        let appended = self.payloads.append(payloads())?;
        let next = payloads().map(|(number, _)| number + 1).max();
        match self.database.write(batch.iter().flat_map(|append| &append.facts), next) {
            Ok(()) => {
                self.payloads.accept(appended);
                Ok(())
            }
            Err(why) => {
                self.payloads.disown();
                // Tried again before the next write.
                let _ = self.mend();
                Err(why)
            }
        }
    }

    fn tidy(&mut self, at_least: u64) -> io::Result<()> {
        // Rows of a commit in doubt may come back, and need their payloads then.
        self.mend()?;
        let length = self.payloads.len();
        if length < at_least {
            return Ok(());
        }
        let needed = self.database.needed()?;
        if self.payloads.len_of(&needed) > length / 2 {
            return Ok(());
        }
        self.payloads.keep(&needed)
    }
}

/// Those that can be written at all. The others are told so, also if they are owed: the disk would
/// refuse them for ever, and with them everything behind.
fn fitting(batch: Vec<Append>) -> Vec<Append> {
    let fits = |append: &Append| {
        append.payload.as_ref().is_none_or(|(_, payload)| payload.len() <= LONGEST)
    };
    let (fitting, long): (Vec<Append>, Vec<Append>) = batch.into_iter().partition(fits);
    for append in long {
        let why = "the payload is too long";
        (append.then)(Err(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    fitting
}
