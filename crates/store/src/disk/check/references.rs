//! Lists the payloads and the folders of weights that rows refer to.

use std::collections::BTreeMap;

use super::tables::{StoredTable, StoredTables};
use crate::record::{
    CheckpointRecord, ModelRunRecord, RequestKind, RequestRecord, SamplerRecord, SequenceScope,
};
use crate::weights::WeightsLocation;

/// Payloads and folders that rows refer to, with descriptions of the objects that need them.
pub(super) struct StoredReferences {
    pub(super) payloads: BTreeMap<u64, String>,
    pub(super) weights: BTreeMap<String, Vec<String>>,
    /// First payload number that no row refers to; the maximum if it is not known.
    pub(super) next_payload: u64,
}

impl Default for StoredReferences {
    fn default() -> Self {
        Self { payloads: BTreeMap::new(), weights: BTreeMap::new(), next_payload: u64::MAX }
    }
}

impl StoredReferences {
    pub(super) fn read(tables: &StoredTables) -> Self {
        let mut references = Self::default();
        if let Some(table) = tables.get("writer_state")
            && let Some(next) = table.rows.first().and_then(|row| table.number(row, "next_payload"))
        {
            references.next_payload = next;
        }
        if let Some(table) = tables.get("checkpoints") {
            for row in &table.rows {
                if let Some(record) = table.record::<CheckpointRecord>(row) {
                    references.add_weights(&record.weights, format!("checkpoint {}", record.path));
                }
            }
        }
        if let Some(table) = tables.get("runs") {
            for row in &table.rows {
                if let Some(ModelRunRecord { id, snapshot: Some(snapshot), .. }) = table.record(row)
                {
                    references.add_weights(&snapshot.weights, format!("snapshot of run {id}"));
                }
            }
        }
        if let Some(table) = tables.get("samplers") {
            for row in &table.rows {
                let Some(record) = table.record::<SamplerRecord>(row) else { continue };
                if let Some(weights) = record.needed_weights() {
                    references.add_weights(weights, format!("sampling session {}", record.id));
                }
            }
        }
        if let Some(table) = tables.get("changes") {
            for row in &table.rows {
                let payload = table.number(row, "body_payload");
                let seq = table.number(row, "seq");
                if let (Some(payload), Some(seq), Some(rusqlite::types::Value::Text(run))) =
                    (payload, seq, table.value(row, "run"))
                {
                    let user =
                        format!("state of run {run} since its last snapshot (request {seq})");
                    references.payloads.insert(payload, user);
                }
            }
        }
        if let Some(table) = tables.get("requests") {
            for row in &table.rows {
                references.add_request(table, row);
            }
        }
        references
    }

    fn add_weights(&mut self, weights: &WeightsLocation, user: String) {
        if let Some(folder) = weights.local() {
            self.weights.entry(folder.to_owned()).or_default().push(user);
        }
    }

    /// Adds the payloads and the weights of a request, with the same rule as the server: the body of
    /// a finished request is not needed, except for a custom loss.
    fn add_request(&mut self, table: &StoredTable, row: &[rusqlite::types::Value]) {
        let Some(record) = table.record::<RequestRecord>(row) else { return };
        let owner = match &record.scope {
            SequenceScope::Model(run) => format!("run {run}"),
            SequenceScope::Sampler(sampler) => format!("sampling session {sampler}"),
            SequenceScope::CustomLosses(session) => format!("session {session}"),
        };
        let request = format!("request {} ({} of {owner})", record.id, record.kind.name());
        let result = table.number(row, "result_payload");
        if let Some(result) = result {
            self.payloads.insert(result, format!("result of {request}"));
        }
        if result.is_none() || record.kind == RequestKind::CreateCustomLoss {
            if let Some(body) = table.number(row, "body_payload") {
                self.payloads.insert(body, request.clone());
            }
            if let Some(source) = &record.source {
                self.add_weights(source, request);
            }
        }
    }
}
