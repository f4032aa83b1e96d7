//! Computes and encodes a merged tensor a few rows at a time.

use super::dtype::encode;
use super::merge::MergedTensor;
use crate::{DType, Error};

/// Number of elements that are computed at a time, rounded to whole rows or heads.
const CHUNK: usize = 1 << 22;

/// A merged tensor to write.
pub(super) struct TensorRows<'a> {
    pub(super) merged: MergedTensor<'a>,
    /// Name for errors.
    pub(super) name: &'a str,
    /// Element type of the file.
    pub(super) dtype: DType,
    /// Number of rows of a head if the rows of each head are interleaved, which llama.cpp expects of
    /// queries and keys.
    pub(super) interleaved_heads: Option<usize>,
}

impl TensorRows<'_> {
    /// Passes the encoded rows to `write`, in order.
    ///
    /// # Errors
    /// The error of `write`; [`Error::Io`] if a file cannot be read; [`Error::InvalidTensor`] if a
    /// value is not finite or outside the range of the element type.
    pub(super) fn write<E: From<Error>>(
        &self,
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let merged = &self.merged;
        let is_vector = merged.rows() == 1;
        // Whole heads: their rows are reordered.
        let unit = self.interleaved_heads.filter(|_| !is_vector).unwrap_or(1);
        let rows = (CHUNK / merged.columns().max(1) / unit).max(1) * unit;
        let mut values = Vec::new();
        let mut bytes = Vec::new();
        let mut at = 0;
        while at < merged.rows() {
            let end = merged.rows().min(at + rows);
            merged.read_rows(self.name, at..end, &mut values)?;
            if let Some(head_dim) = self.interleaved_heads {
                // The elements of a bias are reordered like the rows of a matrix.
                let width = if is_vector { 1 } else { merged.columns() };
                values = interleave(&values, head_dim, width);
            }
            encode(self.name, &values, self.dtype, &mut bytes)?;
            write(&bytes)?;
            at = end;
        }
        Ok(())
    }
}

/// Reorders the rows of each head, which have `width` elements, so that rows that are rotated
/// together become neighbours. In Hugging Face models they are half a head apart.
fn interleave(values: &[f32], head_dim: usize, width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks(head_dim * width) {
        let half = head.len() / 2;
        for (a, b) in head[..half].chunks(width).zip(head[half..].chunks(width)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_interleaved() {
        let rows: Vec<f32> = (0..8_u8).map(f32::from).collect();
        assert_eq!(interleave(&rows, 4, 1), [0., 2., 1., 3., 4., 6., 5., 7.]);
        assert_eq!(interleave(&rows, 4, 2), [0., 1., 4., 5., 2., 3., 6., 7.]);
    }
}
