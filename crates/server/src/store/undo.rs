//! Taking back what could not be written.

use super::{Fact, Kept, Store};

/// Puts back what was there before facts were made true.
pub(super) type Undo = Box<dyn FnOnce(&mut Store) + Send>;

impl Store {
    /// What is there before these facts are made true. Until it is known whether they are written
    /// nobody else may change what they are about, but for the worker, which saves.
    pub(crate) fn before(&self, facts: &[Fact]) -> Undo {
        let mut undo: Vec<Undo> = Vec::new();
        for fact in facts {
            match fact {
                Fact::Session(row) => {
                    let (id, old) = (row.id.clone(), self.sessions.get(&row.id).cloned());
                    undo.push(Box::new(move |store| back(store.sessions.entry(id), old)));
                }
                Fact::Run(row) => {
                    let (id, old) = (row.id.clone(), self.runs.get(&row.id).cloned());
                    undo.push(Box::new(move |store| back(store.runs.entry(id), old)));
                }
                Fact::Sampler(row) => {
                    let (id, old) = (row.id.clone(), self.samplers.get(&row.id).cloned());
                    undo.push(Box::new(move |store| back(store.samplers.entry(id), old)));
                }
                Fact::Checkpoint(super::Checkpoint { path, .. }) | Fact::Gone { path } => {
                    let (path, old) = (path.clone(), self.checkpoints.get(path).cloned());
                    let put = match fact {
                        Fact::Checkpoint(row) => Some(row.folder.clone()),
                        _ => None,
                    };
                    undo.push(Box::new(move |store| {
                        // A save does not wait for its turn: what it put there meanwhile stays.
                        let there = store.checkpoints.get(&path).map(|kept| &kept.row.folder);
                        if there != put.as_ref() {
                            return;
                        }
                        match old {
                            Some(old) => store.checkpoints.insert(path, old),
                            None => store.checkpoints.remove(&path),
                        };
                    }));
                }
                Fact::Left { .. } | Fact::Request(_) | Fact::Done(_) | Fact::Forget { .. } => {}
            }
        }
        Box::new(move |store| undo.into_iter().rev().for_each(|undo| undo(store)))
    }
}

fn back<K, T>(entry: std::collections::hash_map::Entry<'_, K, Kept<T>>, old: Option<Kept<T>>) {
    use std::collections::hash_map::Entry;
    match (entry, old) {
        (entry, Some(old)) => drop(entry.insert_entry(old)),
        (Entry::Occupied(entry), None) => drop(entry.remove()),
        (Entry::Vacant(_), None) => {}
    }
}
