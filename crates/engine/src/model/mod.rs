//! The decoder model: hand-written forward and backward passes.
//!
//! Activations are row-major f32 matrices with one row per token; the rows of all sequences of a
//! batch are concatenated without padding. The weights are frozen, so their gradients are computed
//! only if a [`GradientSink`] asks for them.
//!
//! `load` packs the weights of a file, which `read_ahead` reads in order. `packed_batch` packs
//! sequences into rows and shares common prefixes. `forward` computes a layer from `linear` layers,
//! attention and the rotary embedding (`rope`); `backward` and `attention_backward` compute its
//! `gradients`. `output_head` computes unembedding and log-probabilities in slices.

mod attention_backward;
mod backward;
mod forward;
mod gradients;
mod linear;
mod load;
mod output_head;
mod packed_batch;
mod read_ahead;
mod rope;

pub(crate) use backward::{LayerBackward, NormBackward};
pub(crate) use forward::{AdapterRows, LayerActivations, Workspace};
pub(crate) use gradients::{
    AdapterGradients, DiscardGradients, GradientSink, LayerGradients, NormWeight,
};
pub(crate) use linear::{DeltaGradient, Linear, linear_with_lora};
pub(crate) use output_head::{LogprobQuery, OutputHead, SavedLogits, log_probability, log_sum_exp};
pub(crate) use packed_batch::{PackedBatch, PrefixTree};
#[cfg(feature = "builtin-model-tools")]
pub(crate) use {
    gradients::FusedLinear,
    load::{SourceTensor, TensorSource},
};

use crate::kernel::paged_attention::HeadLayout;
use crate::kernel::{Kernel, Panels};
use tinkex_weights::ModelConfig;

/// A model with packed weights.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) kernel: Kernel,
    pub(crate) embedding: Panels,
    pub(crate) layers: Vec<Layer>,
    /// Gain of the final norm.
    pub(crate) norm: Vec<f32>,
    /// `None` if the embedding is also the unembedding.
    pub(crate) unembedding: Option<Panels>,
    /// Rotary frequency of each pair of dimensions of a head, in radians per position.
    frequencies: Vec<f32>,
}

/// Weights of one layer. Linear layers with the same input are stacked into one matrix.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) qkv: Linear,
    pub(crate) query_norm: Option<Vec<f32>>,
    pub(crate) key_norm: Option<Vec<f32>>,
    pub(crate) o: Linear,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

impl Model {
    /// Returns the number and size of the attention heads.
    pub(crate) fn heads(&self) -> HeadLayout {
        HeadLayout {
            query_heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
        }
    }

    /// Returns the unembedding, which is the embedding if the two are tied.
    pub(crate) fn unembedding(&self) -> &Panels {
        self.unembedding.as_ref().unwrap_or(&self.embedding)
    }

    /// Returns the size of the packed matrices in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let layers: usize = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.o, &layer.gate_up, &layer.down])
            .map(|linear| linear.weights.bytes())
            .sum();
        layers + self.embedding.bytes() + self.unembedding.as_ref().map_or(0, Panels::bytes)
    }
}
