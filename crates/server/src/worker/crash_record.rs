//! [`CrashRecord`]: which requests were executed alone when the process died.
//!
//! A death of the process is attributed to a request only if the request was the only one that was
//! executed, and if it was at the same place as at its previous death. The worker therefore writes
//! the record before it executes a suspect, and clears it afterwards. Both writes are done by the
//! worker itself: a process that is killed at any other time leaves no entry.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tinkex_files::{AtomicWrite, remove_file_if_exists, sync_folder};
use tinkex_store::log;
use tinkex_wire::RequestId;

/// Name of the file. Not the id of a request.
const FILE: &str = "crashes.json";

/// Number of deaths at the same place of a request after which the request is not executed again.
pub(super) const MAX_DEATHS: u32 = 3;

/// Record of the requests that may have killed the process.
pub(super) struct CrashRecord {
    path: PathBuf,
    entries: CrashEntries,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct CrashEntries {
    /// The suspect that is being executed.
    executing: Option<Execution>,
    /// Deaths of processes that executed a request, by request.
    deaths: BTreeMap<RequestId, Deaths>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Execution {
    request: RequestId,
    /// Number that changes when the request makes progress.
    place: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Deaths {
    place: usize,
    count: u32,
}

impl CrashRecord {
    /// Reads the record in `folder` and counts the death of the previous process, if that process
    /// died while it executed a suspect.
    pub(super) fn open(folder: &Path) -> Self {
        let path = folder.join(FILE);
        let read = std::fs::read(&path).ok();
        // Without a readable record, a request that kills the process is executed more often.
        let entries = read.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let entries: CrashEntries = entries.unwrap_or_default();
        let mut record = Self { path, entries };
        if let Some(Execution { request, place }) = record.entries.executing.take() {
            let deaths = record.entries.deaths.entry(request).or_insert(Deaths { place, count: 0 });
            let before = if deaths.place == place { deaths.count } else { 0 };
            *deaths = Deaths { place, count: before + 1 };
            // Otherwise the next process would count the same death again.
            record.write();
        }
        record
    }

    /// Returns whether a request must not be executed again.
    pub(super) fn is_fatal(&self, request: &RequestId) -> bool {
        self.entries.deaths.get(request).is_some_and(|deaths| deaths.count >= MAX_DEATHS)
    }

    /// Records durably that a suspect is being executed alone.
    pub(super) fn begin(&mut self, request: &RequestId, place: usize) {
        self.entries.executing = Some(Execution { request: request.clone(), place });
        self.write();
    }

    /// Records durably that the process has survived the execution of a suspect.
    pub(super) fn survived(&mut self, request: &RequestId) {
        self.entries.executing = None;
        self.entries.deaths.remove(request);
        self.write();
    }

    /// Records durably that the execution of a suspect ended without an outcome, because of a
    /// transient fault or a stop of the server. Its earlier deaths still count.
    pub(super) fn interrupted(&mut self, request: &RequestId) {
        // A request that was not being executed has nothing to record.
        if self.entries.executing.take_if(|executing| executing.request == *request).is_some() {
            self.write();
        }
    }

    /// Forgets the requests for which `is_unfinished` returns false.
    pub(super) fn retain(&mut self, is_unfinished: impl Fn(&RequestId) -> bool) {
        let count = self.entries.deaths.len();
        self.entries.deaths.retain(|request, _| is_unfinished(request));
        if self.entries.deaths.len() < count {
            self.write();
        }
    }

    fn write(&self) {
        let entries = &self.entries;
        let written = if entries.executing.is_none() && entries.deaths.is_empty() {
            // Make the removal durable: after a power loss, the entry would count as a death.
            remove_file_if_exists(&self.path).and_then(|()| match self.path.parent() {
                Some(folder) if folder.is_dir() => sync_folder(folder),
                _ => Ok(()),
            })
        } else {
            let file = AtomicWrite::new(&self.path).owner_only().create_folders().single_writer();
            serde_json::to_vec(entries).map_err(Into::into).and_then(|bytes| file.write(bytes))
        };
        if let Err(error) = written {
            // Continue: the process may then die one more time because of the request. Waiting for
            // a full disk would stop all requests.
            tracing::warn!(
                target: log::STORAGE,
                %error,
                "cannot record which request is being executed"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_deaths_at_the_same_place_count() {
        let folder = tempfile::tempdir().unwrap();
        let id = RequestId::from("a".to_owned());
        let other = RequestId::from("b".to_owned());
        let die_at = |place| CrashRecord::open(folder.path()).begin(&id, place);
        die_at(0);
        die_at(0);
        // The request made progress in between.
        die_at(5);
        die_at(5);
        let mut record = CrashRecord::open(folder.path());
        assert!(!record.is_fatal(&id));
        // A process that dies before it executes the request does not count.
        drop(CrashRecord::open(folder.path()));
        // The execution of another request does not change the count.
        record.begin(&other, 0);
        record.survived(&other);
        record.begin(&id, 5);
        drop(record);
        let mut record = CrashRecord::open(folder.path());
        assert!(record.is_fatal(&id) && !record.is_fatal(&other));
        record.retain(|_| false);
        assert!(!CrashRecord::open(folder.path()).is_fatal(&id));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_interrupted_execution_is_no_death_and_keeps_earlier_deaths() {
        let folder = tempfile::tempdir().unwrap();
        let id = RequestId::from("a".to_owned());
        for death in 1..=MAX_DEATHS {
            for _ in 0..2 {
                let mut record = CrashRecord::open(folder.path());
                record.begin(&id, 0);
                record.interrupted(&id);
            }
            // A fault before the execution.
            CrashRecord::open(folder.path()).interrupted(&id);
            CrashRecord::open(folder.path()).begin(&id, 0);
            let record = CrashRecord::open(folder.path());
            assert_eq!(record.is_fatal(&id), death == MAX_DEATHS, "{death} deaths");
        }
    }

    #[test]
    fn a_survived_execution_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let id = RequestId::from("a".to_owned());
        for _ in 0..2 * MAX_DEATHS {
            let mut record = CrashRecord::open(folder.path());
            record.begin(&id, 0);
            record.survived(&id);
        }
        assert!(!CrashRecord::open(folder.path()).is_fatal(&id));
        std::fs::write(folder.path().join(FILE), b"{").unwrap();
        assert!(!CrashRecord::open(folder.path()).is_fatal(&id), "a damaged record is ignored");
    }
}
