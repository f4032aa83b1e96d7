//! [`RemoteAdapter`]: properties of an adapter that are known before it is downloaded.

use super::plan::MergePlan;
use crate::config::UNEMBEDDING;

/// Size in bytes of an element of bf16 or f16, the smallest element types of adapters.
const ELEMENT_BYTES: u64 = 2;

/// A LoRA adapter that is not on this machine yet. The default is an adapter of unknown size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteAdapter {
    /// Rank of the matrices.
    pub rank: u64,
    /// Whether the adapter adapts the unembedding.
    pub unembedding: bool,
}

impl RemoteAdapter {
    /// Returns the minimum size in bytes of the file of an adapter of the plan's base model: the size
    /// of the matrices of the unembedding. Adapters of other programs may adapt any subset of the
    /// other modules, so these do not count.
    pub(super) fn min_bytes(&self, plan: &MergePlan) -> u64 {
        let unembedding = plan.tensors().iter().find(|tensor| tensor.name == UNEMBEDDING);
        let Some(tensor) = unembedding.filter(|_| self.unembedding) else { return 0 };
        let sizes = tensor.shape.iter().map(|size| *size as u64).sum::<u64>();
        sizes.saturating_mul(self.rank).saturating_mul(ELEMENT_BYTES)
    }
}
