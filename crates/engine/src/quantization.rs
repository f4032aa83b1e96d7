//! [`Quantization`]: quantization of the frozen weights while a model is loaded.

use tinkex_weights::BlockFormat;

use crate::Precision;

/// Quantization of the frozen weight matrices while a model is loaded.
///
/// Norms and biases stay f32. A matrix whose number of inputs is not a multiple of 32 is not
/// quantized. Adapters are always f32, and gradients are computed with the quantized weights.
/// Training and sampling use the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quantization {
    /// 8.5 bits per weight: GGUF's `Q8_0`.
    Q8,
    /// 4.5 bits per weight: GGUF's `Q4_K`. The embedding and the unembedding use `Q6_K` (6.6 bits).
    /// If the number of inputs is not a multiple of 256, `Q4_0` replaces `Q4_K`, and `Q8_0`
    /// replaces `Q6_K`.
    Q4,
}

impl Quantization {
    /// Returns the format of a matrix with `cols` inputs, or `None` if no block format fits: the
    /// number of inputs is not a multiple of 32.
    pub(crate) fn block_format(self, cols: usize, is_embedding: bool) -> Option<BlockFormat> {
        let choices = match (self, is_embedding) {
            (Self::Q8, _) => [BlockFormat::Q8_0, BlockFormat::Q8_0],
            (Self::Q4, false) => [BlockFormat::Q4K, BlockFormat::Q4_0],
            (Self::Q4, true) => [BlockFormat::Q6K, BlockFormat::Q8_0],
        };
        choices.into_iter().find(|format| cols.is_multiple_of(format.block_len()))
    }
}

/// Storage of the frozen weight matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightStorage {
    /// Precision of matrices that are not quantized.
    pub(crate) precision: Precision,
    pub(crate) quantization: Option<Quantization>,
}

impl From<Precision> for WeightStorage {
    fn from(precision: Precision) -> Self {
        Self { precision, quantization: None }
    }
}
