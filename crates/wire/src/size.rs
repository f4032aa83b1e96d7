//! How many bytes a request will need, before it is encoded.
//!
//! These are the estimates that limits are stated in: where a batch is cut, and how much may be on
//! its way at once. They are part of the protocol, not exact sizes.

use crate::datum::Datum;
use crate::input::{InputChunk, ModelInput};
use crate::tensor::TensorData;

/// A token in the text of a JSON body.
const SAMPLING_TOKEN: usize = 10;
/// A token in a binary body.
const TRAINING_TOKEN: usize = 4;
/// A row start or column index of a sparse tensor.
const INDEX: usize = 8;

impl ModelInput {
    /// The estimated size of this prompt in a sampling request.
    #[must_use]
    pub fn sampling_bytes(&self) -> usize {
        self.bytes(SAMPLING_TOKEN)
    }

    fn bytes(&self, per_token: usize) -> usize {
        self.chunks
            .iter()
            .map(|chunk| match chunk {
                InputChunk::EncodedText { tokens } => tokens.len() * per_token,
                InputChunk::Image { data, .. } => data.len(),
                InputChunk::ImageAssetPointer { location, .. } => location.len(),
                InputChunk::Dmel { dmel } => dmel.len(),
            })
            .sum()
    }
}

impl TensorData {
    /// The estimated size of this tensor in a request.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let indices = self.csr().map_or(0, |csr| csr.row_starts.len() + csr.columns.len());
        self.values().len() * self.dtype().size() + indices * INDEX
    }
}

impl Datum {
    /// The estimated size of this datum in a training request.
    #[must_use]
    pub fn training_bytes(&self) -> usize {
        let tensors: usize = self.loss_inputs().map(|(_, tensor)| tensor.bytes()).sum();
        self.model_input().bytes(TRAINING_TOKEN) + tensors
    }
}
