//! Columns of numbers as blobs, and the hash that identifies a sequence of tokens.

/// Converts tokens to a blob; [`tokens_from_blob`] converts back.
pub fn tokens_to_blob(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// Reads the tokens of a blob. Bytes after the last complete token are ignored.
pub fn tokens_from_blob(blob: &[u8]) -> Vec<u32> {
    blob.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// Converts log-probabilities to a blob; [`floats_from_blob`] converts back.
pub fn floats_to_blob(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Reads the log-probabilities of a blob.
pub fn floats_from_blob(blob: &[u8]) -> Vec<f32> {
    blob.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Converts the values of metrics to a blob; [`values_from_blob`] converts back.
pub fn values_to_blob(values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    values.into_iter().flat_map(f64::to_le_bytes).collect()
}

/// Reads the values of metrics of a blob.
pub fn values_from_blob(blob: &[u8]) -> impl Iterator<Item = f64> {
    blob.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes))
}

/// Reads the most probable tokens of all positions from a blob that starts with their number per
/// position.
pub fn top_from_blob(blob: &[u8]) -> Vec<Vec<(u32, f32)>> {
    let Some((count, pairs)) = blob.split_first_chunk() else { return Vec::new() };
    let Ok(count) = usize::try_from(u32::from_le_bytes(*count)) else { return Vec::new() };
    let pairs = pairs.as_chunks::<8>().0;
    let read = |pair: &[u8; 8]| {
        let [a, b, c, d, e, f, g, h] = *pair;
        (u32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]))
    };
    pairs.chunks(count.max(1)).map(|row| row.iter().map(read).collect()).collect()
}

/// Returns a hash of tokens: FNV-1a, whose values are the same in every version of the server.
pub fn sequence_hash(tokens: impl IntoIterator<Item = u32>) -> i64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in tokens.into_iter().flat_map(u32::to_le_bytes) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash.cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs_are_read_back_and_damaged_ones_do_not_fail() {
        assert_eq!(tokens_from_blob(&tokens_to_blob(&[1, u32::MAX])), [1, u32::MAX]);
        assert_eq!(floats_from_blob(&floats_to_blob(&[-0.5, 2.0])), [-0.5, 2.0]);
        let values: Vec<f64> = values_from_blob(&values_to_blob([1e-4, 7.0])).collect();
        assert_eq!(values, [1e-4, 7.0]);
        assert_eq!(tokens_from_blob(&[1, 0, 0, 0, 9]), [1]);
        for damaged in [&[][..], &[255; 3], &[255; 4], &[0; 4], &[255; 21]] {
            assert!(top_from_blob(damaged).len() <= 2);
        }
    }

    #[test]
    fn the_hash_of_a_sequence_does_not_change() {
        assert_eq!(sequence_hash([]), 0xcbf2_9ce4_8422_2325_u64.cast_signed());
        assert_eq!(sequence_hash([1, 2]), sequence_hash(vec![1, 2]));
        assert_ne!(sequence_hash([1, 2]), sequence_hash([2, 1]));
    }
}
