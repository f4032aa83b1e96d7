//! Records that only delete objects: on a full disk they are written before outstanding results.

use tinkex_wire::{ModelId, TinkerPath};

use crate::history::{HistoryRecord, folder_prefix};
use crate::record::{Record, SequenceScope};

/// A deletion that may be written before earlier writes that do not concern the same object.
pub(super) enum Deletion<'a> {
    Checkpoint(&'a TinkerPath),
    Run(&'a ModelId),
}

impl<'a> Deletion<'a> {
    /// Returns the deletion that a record describes; `None` for other records.
    pub(super) fn of(record: &'a Record) -> Option<Self> {
        match record {
            Record::CheckpointDeleted { path, .. } => Some(Self::Checkpoint(path)),
            Record::RunDeleted { id } => Some(Self::Run(id)),
            _ => None,
        }
    }

    /// Returns whether an earlier record concerns the deleted object. The deletion must then be
    /// written after it, because the record would create the object again.
    pub(super) fn concerns(&self, earlier: &Record) -> bool {
        match (self, earlier) {
            (Self::Checkpoint(path), Record::Checkpoint(row)) => row.path == **path,
            (Self::Checkpoint(path), Record::CheckpointDeleted { path: other, .. }) => {
                other == *path
            }
            (Self::Run(id), Record::Run(row)) => row.id == **id,
            (Self::Run(id), Record::Checkpoint(row)) => row.path.run() == *id,
            (Self::Run(id), Record::Result(result)) => {
                result.request.scope == SequenceScope::Model((*id).clone())
            }
            (Self::Run(id), Record::Request(request)) => {
                request.scope == SequenceScope::Model((*id).clone())
            }
            (Self::Run(id), Record::History(history)) => match &**history {
                HistoryRecord::Request(request) => request.run == **id,
                HistoryRecord::Sample(sample) => {
                    let prefix = folder_prefix(id.as_str());
                    sample.weights.folder.as_ref().is_some_and(|name| name.starts_with(&prefix))
                }
                HistoryRecord::Cutoff(_) => false,
            },
            _ => false,
        }
    }
}
