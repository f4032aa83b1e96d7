//! Estimated sizes of requests.
//!
//! The limits in [`ClientConfig`](crate::ClientConfig) on chunk sizes and bytes in flight refer to
//! these estimates. The protocol defines them; they are not exact encoded sizes.

use crate::datum::Datum;
use crate::input::{InputChunk, ModelInput};
use crate::tensor::TensorData;

/// Bytes per token in a JSON body.
const SAMPLING_TOKEN: usize = 10;
/// Bytes per token in a protobuf body.
const TRAINING_TOKEN: usize = 4;
/// Bytes per row start or column index of a sparse tensor.
const INDEX: usize = 8;

impl ModelInput {
    /// Returns the estimated size of the input in a sampling request, in bytes.
    #[doc(hidden)]
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
    /// Returns the estimated size of the tensor in a request, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let indices = self.csr().map_or(0, |csr| csr.row_starts.len() + csr.columns.len());
        self.values().len() * self.dtype().size() + indices * INDEX
    }
}

impl Datum {
    /// Returns the estimated size of the datum in a training request, in bytes.
    #[doc(hidden)]
    #[must_use]
    pub fn training_bytes(&self) -> usize {
        let tensors: usize = self.loss_inputs().map(|(_, tensor)| tensor.bytes()).sum();
        self.model_input().bytes(TRAINING_TOKEN) + tensors
    }
}
