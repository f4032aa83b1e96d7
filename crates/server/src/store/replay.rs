//! From rows back to what they were about, and what facts change.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Notify;

use super::{Entry, Fact, Kept, Line, Phase, Request, Run, Store, now};
use crate::disk::{Answered, Disk, Found};

/// A request that was promised and not carried out, and its body if that can be read.
pub(crate) struct Undone {
    pub(crate) row: Arc<Request>,
    pub(crate) body: io::Result<Bytes>,
}

impl Store {
    /// Opens what is in `folder` and comes back to where it ends.
    pub(crate) fn open(folder: &Path, answer_limit: usize) -> io::Result<Self> {
        let (disk, found) = Disk::open(folder)?;
        let mut store = Self {
            disk,
            sessions: Default::default(),
            runs: Default::default(),
            samplers: Default::default(),
            checkpoints: Default::default(),
            requests: Default::default(),
            lines: Default::default(),
            losses: Default::default(),
            feeds: Default::default(),
            usage: Default::default(),
            making: Default::default(),
            answer_bytes: 0,
            answer_limit,
        };
        store.replay(found);
        Ok(store)
    }

    fn replay(&mut self, found: Found) {
        let Found { sessions, runs, changes, samplers, checkpoints, requests, usage } = found;
        self.usage = usage;
        for (row, seen) in runs {
            self.runs.insert(row.id.clone(), Kept { seen, ..Kept::new(row) });
        }
        for (run, seq, change) in changes {
            if let Some(run) = self.runs.get_mut(&run) {
                run.since.insert(seq, change);
            }
        }
        self.apply_all(samplers.into_iter().map(Fact::Sampler).collect());
        self.apply_all(checkpoints.into_iter().map(Fact::Checkpoint).collect());
        // Last: one that is over closes what was written after its end.
        self.apply_all(sessions.into_iter().map(Fact::Session).collect());
        let mut answered = Vec::new();
        for (row, answer) in requests {
            answered.extend(answer.map(|answer| (row.id.clone(), answer)));
            self.apply(Fact::Request(Arc::new(row)));
        }
        // Whoever listens is told in the order of the answers.
        answered.sort_by_key(|(_, answer)| answer.number);
        // They wait for their caller from now on: while there was no server nobody could come.
        for (id, answer) in answered {
            self.answered(&id, Answered { at: now(), ..answer }, None);
        }
    }

    /// What has to be carried out still, in the order it came.
    pub(crate) fn undone(&mut self) -> Vec<Undone> {
        let reader = self.reader();
        let mut waiting: Vec<Arc<Request>> = Vec::new();
        for entry in self.requests.values_mut() {
            if entry.answered_at().is_none() {
                entry.phase = Phase::Waiting;
                waiting.push(Arc::clone(&entry.row));
            }
        }
        waiting.sort_by_key(|row| row.number);
        let read = |row: Arc<Request>| Undone { body: reader.payload(row.number), row };
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

    /// Makes a fact true.
    pub(super) fn apply(&mut self, fact: Fact) {
        match fact {
            Fact::Session(row) => {
                if row.end.is_some() {
                    self.close_session(&row.id);
                }
                self.sessions.insert(row.id.clone(), Kept::new(row));
            }
            Fact::Left { ids } => {
                for id in ids {
                    self.sessions.remove(&id);
                }
            }
            Fact::Run(row) => self.apply_run(row),
            Fact::Sampler(row) => {
                if let Some(folder) = &row.folder {
                    self.making.remove(folder);
                }
                self.samplers.insert(row.id.clone(), Kept::new(row));
            }
            Fact::Checkpoint(row) => {
                self.making.remove(&row.folder);
                self.run_used(row.path.run(), row.created_at);
                self.checkpoints.insert(row.path.clone(), Kept::new(row));
            }
            Fact::Gone { path } => {
                self.checkpoints.remove(&path);
            }
            Fact::Request(row) => {
                if let Line::Model(id) = &row.line {
                    self.run_used(id, row.at);
                }
                let line = self.lines.entry(row.line.clone()).or_default();
                line.insert(row.seq, row.id.clone());
                let changed = Arc::new(Notify::new());
                let phase = Phase::Writing { cancelled: false };
                let id = row.id.clone();
                self.requests.insert(id, Entry { row, phase, changed });
            }
            Fact::Done(done) => self.account(&done),
            Fact::Forget { ids } => self.drop_requests(&ids),
        }
    }

    /// A run was used then.
    fn run_used(&mut self, id: &tinkex_wire::ModelId, at: super::Micros) {
        if let Some(run) = self.runs.get_mut(id) {
            run.seen = run.seen.max(at);
        }
    }

    fn apply_run(&mut self, row: Run) {
        let (mut since, mut last, mut seen) = (Default::default(), None, row.created_at);
        if let Some(before) = self.runs.remove(&row.id) {
            (since, last, seen) = (before.since, before.row.last_seq, before.seen);
        }
        if let Some(snapshot) = &row.snapshot {
            self.making.remove(&snapshot.folder);
            since = since.split_off(&(snapshot.seq + 1));
        }
        let row = Run { last_seq: row.last_seq.max(last), ..row };
        self.runs.insert(row.id.clone(), Kept { row, seen, since });
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
