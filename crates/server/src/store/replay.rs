//! From records back to what they were about.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Notify;

use super::record::{Line, Record, Request, Run};
use super::{Entry, Kept, Phase, Store};
use crate::journal::{Journal, Reader};

/// A request that was promised and not carried out.
pub(crate) struct Undone {
    pub(crate) row: Arc<Request>,
    pub(crate) body: Bytes,
}

impl Store {
    /// Opens the journal at `path` and comes back to where it ends.
    pub(crate) fn open(path: &Path, answer_limit: usize) -> io::Result<Self> {
        let (journal, found) = Journal::open(path)?;
        let mut store = Self {
            journal,
            sessions: Default::default(),
            runs: Default::default(),
            samplers: Default::default(),
            checkpoints: Default::default(),
            requests: Default::default(),
            lines: Default::default(),
            losses: Default::default(),
            feeds: Default::default(),
            usage: Default::default(),
            totals_number: 0,
            making: Default::default(),
            answer_bytes: 0,
            answer_limit,
        };
        for found in found {
            let record: Record = serde_json::from_slice(&found.head).map_err(|why| {
                let why = format!("{}: record {}: {why}", path.display(), found.number);
                io::Error::new(io::ErrorKind::InvalidData, why)
            })?;
            store.apply(record, found.number, found.body_len);
        }
        Ok(store)
    }

    /// What has to be carried out still, in the order it came.
    pub(crate) fn undone(&mut self) -> io::Result<Vec<Undone>> {
        let reader = self.journal.reader();
        let mut waiting: Vec<(u64, Arc<Request>)> = Vec::new();
        for entry in self.requests.values_mut() {
            if entry.answered_at().is_none() {
                entry.phase = Phase::Waiting;
                waiting.push((entry.number, Arc::clone(&entry.row)));
            }
        }
        waiting.sort_by_key(|(number, _)| *number);
        let read = |(number, row)| Ok(Undone { row, body: reader.body(number)? });
        waiting.into_iter().map(read).collect()
    }

    /// The base models that what is undone needs, and how many requests need each.
    pub(crate) fn needed(&self) -> BTreeMap<String, usize> {
        let mut needed = BTreeMap::new();
        for entry in self.requests.values().filter(|entry| entry.answered_at().is_none()) {
            let base = match &entry.row.line {
                Line::Model(id) => self.runs.get(id).map(|kept| &kept.row.base_model),
                Line::Sampler(id) => self.samplers.get(id).map(|kept| &kept.row.base_model),
                Line::Losses(_) => None,
            };
            if let Some(base) = base {
                *needed.entry(base.clone()).or_default() += 1;
            }
        }
        needed
    }

    /// Reads bodies back.
    pub(crate) fn reader(&self) -> Reader {
        self.journal.reader()
    }

    /// Makes a record true. `body` is how long its body is.
    pub(super) fn apply(&mut self, record: Record, number: u64, body: usize) {
        match record {
            Record::Session(row) => {
                if row.end.is_some() {
                    self.close_session(&row.id);
                }
                upsert(self.sessions.entry(row.id.clone()), row, number);
            }
            Record::Run(row) => self.apply_run(row, number),
            Record::Sampler(row) => {
                if let Some(folder) = &row.folder {
                    self.making.remove(folder);
                }
                upsert(self.samplers.entry(row.id.clone()), row, number);
            }
            Record::Checkpoint(row) => {
                self.making.remove(&row.folder);
                self.run_used(row.path.run(), row.created_at);
                self.checkpoints.insert(row.path.clone(), Kept::new(row, number));
            }
            Record::Gone { path } => {
                self.checkpoints.remove(&path);
            }
            Record::Request(row) => {
                let row = Arc::new(row);
                if let Line::Model(id) = &row.line {
                    self.run_used(id, row.at);
                }
                let line = self.lines.entry(row.line.clone()).or_default();
                line.insert(row.seq, row.id.clone());
                let changed = Arc::new(Notify::new());
                let phase = Phase::Writing { cancelled: false };
                let entry = Entry { row: Arc::clone(&row), number, phase, changed };
                self.requests.insert(row.id.clone(), entry);
            }
            Record::Done(done) => self.apply_done(&done, number, body),
            Record::Forget { ids } => ids.iter().for_each(|id| self.drop_request(id)),
            Record::Totals { used, last_seq } => {
                self.usage = used.into_iter().collect();
                self.totals_number = number;
                for (model, seq) in last_seq {
                    if let Some(run) = self.runs.get_mut(&model) {
                        run.row.last_seq = run.row.last_seq.max(Some(seq));
                    }
                }
            }
        }
    }

    /// A run was used then.
    fn run_used(&mut self, id: &tinkex_wire::ModelId, at: super::Micros) {
        if let Some(run) = self.runs.get_mut(id) {
            run.seen = run.seen.max(at);
        }
    }

    fn apply_run(&mut self, row: Run, number: u64) {
        let (mut since, mut last, mut seen) = (Default::default(), None, row.created_at);
        if let Some(before) = self.runs.remove(&row.id) {
            (since, last, seen) = (before.since, before.row.last_seq, before.seen);
        }
        if let Some(snapshot) = &row.snapshot {
            self.making.remove(&snapshot.folder);
            since = since.split_off(&(snapshot.seq + 1));
        }
        let row = Run { last_seq: row.last_seq.max(last), ..row };
        self.runs.insert(row.id.clone(), Kept { row, number, seen, since });
    }

    /// What only this session could use goes.
    fn close_session(&mut self, id: &tinkex_wire::SessionId) {
        self.samplers.retain(|_, sampler| sampler.row.session != *id);
        for run in self.runs.values_mut().filter(|run| run.row.session == *id) {
            run.since.clear();
            run.row.snapshot = None;
        }
        let prefix = format!("{id}:loss:");
        self.losses.retain(|loss, _| !loss.as_str().starts_with(&prefix));
    }
}

fn upsert<K, T>(slot: std::collections::hash_map::Entry<'_, K, Kept<T>>, row: T, number: u64) {
    slot.insert_entry(Kept::new(row, number));
}
