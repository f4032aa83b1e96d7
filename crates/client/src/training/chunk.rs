//! Splits a batch into chunks that fit the server's request limits.

use tinkex_wire::Datum;

/// Maximum size of one request, set by the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkLimits {
    /// Maximum number of examples. 0 counts as 1.
    pub(crate) datums: u64,
    /// Maximum estimated size in bytes.
    pub(crate) bytes: u64,
}

/// Consecutive examples of a batch that are sent in one request.
#[derive(Debug, PartialEq)]
pub(crate) struct BatchChunk<T = Datum> {
    pub(crate) data: Vec<T>,
    /// Estimated size of the encoded request in bytes.
    pub(crate) bytes: u64,
}

/// Splits `data` into as few chunks as `limits` allow, in order.
///
/// A single example that exceeds the byte limit gets a chunk of its own.
pub(crate) fn split(data: Vec<Datum>, limits: ChunkLimits) -> Vec<BatchChunk> {
    split_by(data, limits, |datum| datum.training_bytes() as u64)
}

fn split_by<T>(data: Vec<T>, limits: ChunkLimits, size: impl Fn(&T) -> u64) -> Vec<BatchChunk<T>> {
    let mut chunks: Vec<BatchChunk<T>> = Vec::new();
    for datum in data {
        let bytes = size(&datum);
        match chunks.last_mut() {
            Some(last)
                if (last.data.len() as u64) < limits.datums.max(1)
                    && last.bytes.saturating_add(bytes) <= limits.bytes =>
            {
                last.data.push(datum);
                last.bytes += bytes;
            }
            _ => chunks.push(BatchChunk { data: vec![datum], bytes }),
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    #[test]
    fn batches_are_split_where_the_python_sdk_splits_them() {
        for case in fixture::cases("chunking.json") {
            let sizes: Vec<u64> = match &case["datum_bytes"] {
                Value::Array(sizes) => sizes.iter().map(|size| size.as_u64().unwrap()).collect(),
                equal => {
                    let count = usize::try_from(equal["count"].as_u64().unwrap()).unwrap();
                    vec![equal["repeat"].as_u64().unwrap(); count]
                }
            };
            let limits = ChunkLimits {
                datums: case["max_len"].as_u64().unwrap(),
                bytes: case["max_bytes"].as_u64().unwrap(),
            };
            let chunks = split_by(sizes, limits, |size| *size);
            let actual: Vec<Value> = chunks
                .iter()
                .enumerate()
                .map(|(i, chunk)| {
                    json!({
                        "request_id": i, "seq_id": i + 1,
                        "len": chunk.data.len(), "bytes": chunk.bytes,
                    })
                })
                .collect();
            assert_eq!(Value::Array(actual), case["chunks"], "{}", case["id"]);
        }
    }
}
