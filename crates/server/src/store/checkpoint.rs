//! Looking checkpoints up.

use tinkex_wire::{CheckpointKind, ModelId, TinkerPath, rest};

use super::{Checkpoint, Kept, Store, now, timestamp};

impl Store {
    /// A checkpoint that is there and has not expired.
    pub(crate) fn checkpoint(&self, path: &TinkerPath) -> Option<&Kept<Checkpoint>> {
        self.checkpoints.get(path).filter(|kept| !kept.row.is_expired())
    }

    /// Those of a run, oldest first.
    pub(crate) fn checkpoints_of(&self, run: &ModelId) -> Vec<&Checkpoint> {
        // They stand together, by kind and name; no name comes before a dash.
        let first = TinkerPath::new(run.clone(), CheckpointKind::Training, "-");
        let mut all: Vec<&Checkpoint> = first
            .into_iter()
            .flat_map(|first| self.checkpoints.range(first..))
            .map(|(_, kept)| &kept.row)
            .take_while(|row| row.path.run() == run)
            .filter(|row| !row.is_expired())
            .collect();
        all.sort_by_key(|row| row.created_at);
        all
    }

    /// The newest of a kind.
    pub(crate) fn last_checkpoint(
        &self,
        run: &ModelId,
        kind: CheckpointKind,
    ) -> Option<&Checkpoint> {
        self.checkpoints_of(run).into_iter().rfind(|row| row.path.kind() == kind)
    }
}

impl Checkpoint {
    pub(crate) fn is_expired(&self) -> bool {
        self.expires_at.is_some_and(|at| at <= now())
    }

    /// As the API shows it.
    pub(crate) fn shown(&self) -> rest::Checkpoint {
        rest::Checkpoint::new(&self.path, timestamp(self.created_at))
            .size_bytes(Some(self.size_bytes))
            .public(self.public)
            .user_metadata(self.user_metadata.clone())
            .expires_at(self.expires_at.map(timestamp))
    }
}
