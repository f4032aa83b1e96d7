//! Converts the datum indices in error messages from positions in a chunk to positions in the
//! batch.

use std::ops::Range;

use crate::error::Error;

/// Name of the list of datums in the messages of this crate and of servers.
const DATA: &str = "data[";

/// Errors whose message contains datum indices of a chunk.
pub(super) trait DatumIndices {
    /// Converts datum indices in the message from positions in a chunk to positions in the batch.
    /// `datums` is the range of the chunk in the batch.
    fn in_datums(self, datums: &Range<usize>) -> Self;
}

impl DatumIndices for Error {
    fn in_datums(self, datums: &Range<usize>) -> Self {
        if datums.start == 0 {
            return self;
        }
        self.map_message(|message| shift(&message, datums))
    }
}

/// Replaces `data[i]` with `data[start + i]`. An index outside the chunk stays unchanged, because
/// it does not refer to a datum of the chunk.
fn shift(message: &str, datums: &Range<usize>) -> String {
    let mut shifted = String::with_capacity(message.len() + 8);
    let mut rest = message;
    while let Some(at) = rest.find(DATA) {
        let (before, after) = rest.split_at(at + DATA.len());
        // Do not match a longer name that ends in `data`, such as `metadata[`.
        let is_data = !rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        shifted.push_str(before);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        match after[..digits].parse::<usize>() {
            Ok(index) if is_data && index < datums.len() && after[digits..].starts_with(']') => {
                shifted.push_str(&(datums.start + index).to_string());
            }
            _ => shifted.push_str(&after[..digits]),
        }
        rest = &after[digits..];
    }
    shifted + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datum_indices_are_relative_to_the_batch() {
        for (message, expected) in [
            ("data[952].weights: too short", "data[3000].weights: too short"),
            ("data[0]: a, data[1]: b", "data[2048]: a, data[2049]: b"),
            ("metadata[1] and data[x] and data[7", "metadata[1] and data[x] and data[7"),
            ("data[953] is not in the chunk", "data[953] is not in the chunk"),
            ("no index", "no index"),
        ] {
            assert_eq!(shift(message, &(2048..3001)), expected);
        }
    }
}
