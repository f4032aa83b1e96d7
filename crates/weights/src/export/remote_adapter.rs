//! [`RemoteAdapter`]: what is known about an adapter before it is downloaded.

use super::plan::MergePlan;

/// Size of an element in bytes: that of bf16, the smallest type of adapters.
const ELEMENT_BYTES: u64 = 2;

/// A LoRA adapter that is not on this machine yet. The default is an adapter of no module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteAdapter {
    /// Rank of its matrices.
    pub rank: u64,
    /// Whether it adapts the projections of the attention.
    pub attention: bool,
    /// Whether it adapts the projections of the MLP.
    pub mlp: bool,
    /// Whether it adapts the unembedding.
    pub unembedding: bool,
}

impl RemoteAdapter {
    /// Returns the expected size of its file in bytes, if it is an adapter of the plan's base model.
    /// The file is larger if its elements are f32, and smaller if the adapter comes from another
    /// program and covers only some of the projections.
    pub(super) fn expected_bytes(&self, plan: &MergePlan) -> u64 {
        let matrices = plan.tensors().iter().filter(|tensor| self.adapts(&tensor.name));
        let sizes =
            matrices.map(|tensor| tensor.shape.iter().map(|size| *size as u64).sum::<u64>());
        sizes.sum::<u64>().saturating_mul(self.rank).saturating_mul(ELEMENT_BYTES)
    }

    fn adapts(&self, tensor: &str) -> bool {
        let module = tensor.strip_suffix(".weight").unwrap_or_default();
        match module.rsplit('.').next().unwrap_or_default() {
            "q_proj" | "k_proj" | "v_proj" | "o_proj" => self.attention,
            "gate_proj" | "up_proj" | "down_proj" => self.mlp,
            "lm_head" => self.unembedding,
            _ => false,
        }
    }
}
