//! The decoder: forward and backward, written by hand.
//!
//! Rows of all sequences of a batch stand one after the other, without padding. The weights are
//! frozen, so no gradient of theirs is formed unless someone asks for it (see [`Sink`]).

mod attention;
mod backward;
mod batch;
mod forward;
mod head;
mod linear;
mod load;
mod rope;

pub(crate) use backward::{Gain, Grads, LayerBackward, LayerGrads, NoSink, Sink, Site};
pub(crate) use batch::Batch;
pub(crate) use forward::{Adapted, Trace, Workspace};
pub(crate) use head::{Head, Kept, Pair, log_probability, log_sum_exp};
pub(crate) use linear::{DeltaGrad, Linear, adapted};
pub(crate) use load::{Numbers, Source};

use crate::file::ModelConfig;
use crate::kernel::pages::Heads;
use crate::kernel::{Kernel, Panels};

/// A model ready to compute.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) kernel: Kernel,
    pub(crate) embedding: Panels,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
    /// `None` where the embedding is the unembedding too.
    pub(crate) unembedding: Option<Panels>,
    /// Radians per position of each pair of a head.
    frequencies: Vec<f32>,
}

/// One layer's weights. Products of the same input are one matrix.
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
    pub(crate) fn heads(&self) -> Heads {
        Heads {
            queries: self.config.heads,
            keys: self.config.kv_heads,
            width: self.config.head_dim,
        }
    }

    pub(crate) fn unembedding(&self) -> &Panels {
        self.unembedding.as_ref().unwrap_or(&self.embedding)
    }

    /// Memory that the weights take.
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
