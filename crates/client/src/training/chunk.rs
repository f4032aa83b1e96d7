//! Cutting a batch into requests.

use tinkex_wire::Datum;

/// How large a request may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkLimits {
    pub(crate) datums: u64,
    pub(crate) bytes: u64,
}

/// Part of a batch, and its estimated size.
#[derive(Debug, PartialEq)]
pub(crate) struct BatchChunk<T = Datum> {
    pub(crate) data: Vec<T>,
    pub(crate) bytes: u64,
}

/// Cuts in order, as few cuts as possible. A datum that is too large by itself goes alone.
pub(crate) fn cut(data: Vec<Datum>, limits: ChunkLimits) -> Vec<BatchChunk> {
    cut_by(data, limits, |datum| datum.training_bytes() as u64)
}

fn cut_by<T>(data: Vec<T>, limits: ChunkLimits, size: impl Fn(&T) -> u64) -> Vec<BatchChunk<T>> {
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
    fn batches_are_cut_where_the_reference_cuts_them() {
        for case in fixture::cases("chunking.json") {
            let sizes: Vec<u64> = match &case["datum_bytes"] {
                Value::Array(sizes) => sizes.iter().map(|size| size.as_u64().unwrap()).collect(),
                all => {
                    let count = usize::try_from(all["count"].as_u64().unwrap()).unwrap();
                    vec![all["repeat"].as_u64().unwrap(); count]
                }
            };
            let limits = ChunkLimits {
                datums: case["max_len"].as_u64().unwrap(),
                bytes: case["max_bytes"].as_u64().unwrap(),
            };
            let chunks = cut_by(sizes, limits, |size| *size);
            let seen: Vec<Value> = chunks
                .iter()
                .enumerate()
                .map(|(i, chunk)| {
                    json!({
                        "request_id": i, "seq_id": i + 1,
                        "len": chunk.data.len(), "bytes": chunk.bytes,
                    })
                })
                .collect();
            assert_eq!(Value::Array(seen), case["chunks"], "{}", case["id"]);
        }
    }
}
