//! Checkpoint lookups.

use tinkex_wire::{CheckpointKind, ModelId, TinkerPath, rest};

use super::LoraSettings;
use super::{CheckpointRecord, Store, Tracked, UnixMicros};
use crate::clock::timestamp;
use crate::weights::WeightsLocation;

impl Store {
    /// Returns a checkpoint that exists and has not expired.
    pub fn checkpoint(&self, path: &TinkerPath) -> Option<&Tracked<CheckpointRecord>> {
        let now = self.clock.now();
        self.checkpoints.get(path).filter(|entry| !entry.row.is_expired(now))
    }

    /// Returns the checkpoints of a run, oldest first.
    pub fn checkpoints_of(&self, run: &ModelId) -> Vec<&CheckpointRecord> {
        let now = self.clock.now();
        // The map is sorted by run, kind and name, and "-" sorts before every valid name.
        let first = TinkerPath::new(run.clone(), CheckpointKind::Training, "-");
        let mut all: Vec<&CheckpointRecord> = first
            .into_iter()
            .flat_map(|first| self.checkpoints.range(first..))
            .map(|(_, entry)| &entry.row)
            .take_while(|row| row.path.run() == run)
            .filter(|row| !row.is_expired(now))
            .collect();
        all.sort_by_key(|row| row.created_at);
        all
    }

    /// Returns the run and the LoRA settings of weights, which belong to a checkpoint or were saved
    /// for a sampling session only.
    pub fn origin_of_weights(&self, weights: &WeightsLocation) -> Option<(ModelId, LoraSettings)> {
        let checkpoint = self.checkpoints.values().find(|entry| entry.row.weights == *weights);
        if let Some(checkpoint) = checkpoint {
            return Some((checkpoint.row.path.run().clone(), checkpoint.row.lora));
        }
        let mut samplers = self.samplers.values().map(|entry| &entry.row);
        let sampler = samplers.find(|row| row.weights.as_ref() == Some(weights))?;
        let run = &self.runs.get(sampler.run.as_ref()?)?.row;
        Some((run.id.clone(), run.lora))
    }

    /// Returns the newest checkpoint of a kind.
    pub fn last_checkpoint(
        &self,
        run: &ModelId,
        kind: CheckpointKind,
    ) -> Option<&CheckpointRecord> {
        self.checkpoints_of(run).into_iter().rfind(|row| row.path.kind() == kind)
    }
}

impl CheckpointRecord {
    pub fn is_expired(&self, now: UnixMicros) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    /// Converts the record to the API's form, without the metadata.
    pub fn to_wire(&self) -> rest::Checkpoint {
        rest::Checkpoint::new(&self.path, timestamp(self.created_at))
            // 0 if the size is not known: the weights are on an upstream.
            .size_bytes((self.size_bytes > 0).then_some(self.size_bytes))
            .public(self.public)
            .expires_at(self.expires_at.map(timestamp))
    }
}
