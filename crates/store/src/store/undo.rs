//! Rolls back records whose write failed.

use std::collections::hash_map;

use super::{CheckpointRecord, Record, Store};
use crate::user::KeyRecord;

/// Function that restores the entries that records replaced.
pub(super) type Undo = Box<dyn FnOnce(&mut Store) + Send>;

impl Store {
    /// Captures the current entries that `records` will replace. Until the write of the records is
    /// confirmed, only the worker may change the same entries, by saving a checkpoint.
    pub fn prepare_undo(&self, records: &[Record]) -> Undo {
        let mut undo: Vec<Undo> = Vec::new();
        for record in records {
            match record {
                Record::Session(row) => {
                    let old = self.sessions.get(&row.id).cloned();
                    let id = row.id.clone();
                    undo.push(Box::new(move |store| restore(store.sessions.entry(id), old)));
                }
                Record::Run(row) => {
                    let old = self.runs.get(&row.id).cloned();
                    let id = row.id.clone();
                    undo.push(Box::new(move |store| restore(store.runs.entry(id), old)));
                }
                Record::RunDeleted { id } => {
                    let old = self.runs.get(id).cloned();
                    let id = id.clone();
                    let of_run = self.checkpoints.iter().filter(|(path, _)| *path.run() == id);
                    let checkpoints: Vec<_> =
                        of_run.map(|(path, entry)| (path.clone(), entry.clone())).collect();
                    undo.push(Box::new(move |store| {
                        restore(store.runs.entry(id), old);
                        store.checkpoints.extend(checkpoints);
                    }));
                }
                Record::Sampler(row) => {
                    let old = self.samplers.get(&row.id).cloned();
                    let id = row.id.clone();
                    undo.push(Box::new(move |store| restore(store.samplers.entry(id), old)));
                }
                Record::Checkpoint(CheckpointRecord { path, .. })
                | Record::CheckpointDeleted { path, .. } => {
                    let old = self.checkpoints.get(path).cloned();
                    let path = path.clone();
                    let written = match record {
                        Record::Checkpoint(row) => Some(row.weights.clone()),
                        _ => None,
                    };
                    undo.push(Box::new(move |store| {
                        // A save does not take the change lock. Keep the checkpoint if a save has
                        // replaced it since the change.
                        let current = store.checkpoints.get(&path).map(|entry| &entry.row.weights);
                        if current != written.as_ref() {
                            return;
                        }
                        store.deleted_checkpoints.remove(&path);
                        match old {
                            Some(old) => store.checkpoints.insert(path, old),
                            None => store.checkpoints.remove(&path),
                        };
                    }));
                }
                Record::Key(KeyRecord { id, .. }) | Record::KeyRemoved { id } => {
                    let old = self.keys.get(id).cloned();
                    let id = id.clone();
                    undo.push(Box::new(move |store| match old {
                        Some(old) => drop(store.keys.insert(id, old)),
                        None => drop(store.keys.remove(&id)),
                    }));
                }
                Record::User(row) => {
                    let old = self.limits.get(&row.id).copied();
                    let id = row.id.clone();
                    undo.push(Box::new(move |store| match old {
                        Some(old) => drop(store.limits.insert(id, old)),
                        None => drop(store.limits.remove(&id)),
                    }));
                }
                Record::Audit(entry) => {
                    let number = entry.number;
                    undo.push(Box::new(move |store| {
                        store.audit.retain(|entry| entry.number != number);
                    }));
                }
                Record::SessionsRemoved { .. }
                | Record::Metadata(_)
                | Record::MetadataCopied { .. }
                | Record::UsageMerged { .. }
                | Record::Request(_)
                | Record::RequestsStarted { .. }
                | Record::Result(_)
                | Record::Usage(_)
                | Record::History(_)
                | Record::Clock(_)
                | Record::RequestsRemoved { .. } => {}
            }
        }
        Box::new(move |store| undo.into_iter().rev().for_each(|undo| undo(store)))
    }
}

fn restore<K, T>(entry: hash_map::Entry<'_, K, T>, old: Option<T>) {
    match (entry, old) {
        (entry, Some(old)) => drop(entry.insert_entry(old)),
        (hash_map::Entry::Occupied(entry), None) => drop(entry.remove()),
        (hash_map::Entry::Vacant(_), None) => {}
    }
}
