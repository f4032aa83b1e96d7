//! Gradients that the backward pass computes: [`AdapterGradients`] hold the gradients of an adapter,
//! a [`GradientSink`] receives the gradients of the model's own weights.

use super::forward::LayerActivations;
use super::linear::DeltaGradient;
use super::{Layer, Linear, Model};
use crate::lora::{Delta, LayerDeltas, PackedLora};

/// A linear layer of a decoder layer; layers with the same input are stacked into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedLinear {
    Qkv,
    O,
    GateUp,
    Down,
}

impl FusedLinear {
    /// Returns the frozen weights of this linear layer.
    pub(super) fn of_layer(self, layer: &Layer) -> &Linear {
        match self {
            Self::Qkv => &layer.qkv,
            Self::O => &layer.o,
            Self::GateUp => &layer.gate_up,
            Self::Down => &layer.down,
        }
    }

    /// Returns the LoRA delta of this linear layer, if the adapter has one.
    pub(super) fn delta(self, deltas: &LayerDeltas) -> Option<&Delta> {
        match self {
            Self::Qkv => deltas.qkv.as_ref(),
            Self::O => deltas.o.as_ref(),
            Self::GateUp => deltas.gate_up.as_ref(),
            Self::Down => deltas.down.as_ref(),
        }
    }

    /// Returns the gradient of the LoRA delta of this linear layer, if the adapter has one.
    pub(super) fn gradient(self, grads: &mut LayerGradients) -> Option<&mut DeltaGradient> {
        match self {
            Self::Qkv => grads.qkv.as_mut(),
            Self::O => grads.o.as_mut(),
            Self::GateUp => grads.gate_up.as_mut(),
            Self::Down => grads.down.as_mut(),
        }
    }

    /// Returns the LoRA hidden activations that the forward pass of this linear layer saved.
    pub(super) fn lora_hidden(self, activations: &LayerActivations) -> &[f32] {
        match self {
            Self::Qkv => &activations.qkv_lora,
            Self::O => &activations.o_lora,
            Self::GateUp => &activations.gate_up_lora,
            Self::Down => &activations.down_lora,
        }
    }
}

/// Gain vector of a norm. The variants of a layer contain the layer's index; `Last` is the norm
/// after the last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormWeight {
    Attention(usize),
    Queries(usize),
    Keys(usize),
    Mlp(usize),
    Last,
}

/// Receives the operands from which gradients of the model's own weights can be computed.
pub(crate) trait GradientSink: Send {
    /// Returns whether the sink uses the operands. If not, the backward pass skips the calls that
    /// need additional computations.
    fn is_enabled(&self) -> bool;
    /// Called for each linear layer with its input and the gradient with respect to its output.
    fn linear(&mut self, model: &Model, layer: usize, site: FusedLinear, x: &[f32], grad: &[f32]);
    /// Called for each row of a norm with its input, `1 / rms`, and the gradient with respect to
    /// its output.
    fn norm(&mut self, which: NormWeight, x: &[f32], inverse: f32, grad: &[f32]);
    /// Called for each slice of the unembedding, the `cols` tokens from token `from`, with its
    /// input and the gradient with respect to the logits.
    fn unembedding(&mut self, model: &Model, from: usize, cols: usize, x: &[f32], grad: &[f32]);
    /// Called with the gradient with respect to the embeddings of `tokens`.
    fn embedding(&mut self, tokens: &[u32], grad: &[f32]);
}

/// Ignores the gradients of the model's own weights.
#[derive(Debug)]
pub(crate) struct DiscardGradients;

impl GradientSink for DiscardGradients {
    fn is_enabled(&self) -> bool {
        false
    }
    fn linear(&mut self, _: &Model, _: usize, _: FusedLinear, _: &[f32], _: &[f32]) {}
    fn norm(&mut self, _: NormWeight, _: &[f32], _: f32, _: &[f32]) {}
    fn unembedding(&mut self, _: &Model, _: usize, _: usize, _: &[f32], _: &[f32]) {}
    fn embedding(&mut self, _: &[u32], _: &[f32]) {}
}

/// Gradients of the deltas of one layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerGradients {
    pub(crate) qkv: Option<DeltaGradient>,
    pub(crate) o: Option<DeltaGradient>,
    pub(crate) gate_up: Option<DeltaGradient>,
    pub(crate) down: Option<DeltaGradient>,
}

impl LayerGradients {
    /// Returns zero gradients of the shape of `deltas`.
    fn zeros_like(deltas: &LayerDeltas) -> Self {
        let grad = |delta: &Option<Delta>| delta.as_ref().map(Delta::zero_gradient);
        Self {
            qkv: grad(&deltas.qkv),
            o: grad(&deltas.o),
            gate_up: grad(&deltas.gate_up),
            down: grad(&deltas.down),
        }
    }
}

/// Gradients of an adapter, in the layout of [`PackedLora`].
#[derive(Clone, Debug)]
pub(crate) struct AdapterGradients {
    pub(crate) layers: Vec<LayerGradients>,
    pub(crate) unembedding: Option<DeltaGradient>,
}

impl AdapterGradients {
    /// Returns zero gradients for an adapter, or empty gradients without an adapter.
    pub(crate) fn new(model: &Model, lora: Option<&PackedLora>) -> Self {
        Self {
            layers: match lora {
                Some(lora) => lora.layers.iter().map(LayerGradients::zeros_like).collect(),
                None => model.layers.iter().map(|_| LayerGradients::default()).collect(),
            },
            unembedding: lora.and_then(|lora| lora.unembedding.as_ref()).map(Delta::zero_gradient),
        }
    }

    /// Returns all tensors in a fixed order.
    pub(crate) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Vec<f32>> {
        let layers = self
            .layers
            .iter_mut()
            .flat_map(|layer| [&mut layer.qkv, &mut layer.o, &mut layer.gate_up, &mut layer.down]);
        let deltas = layers.chain([&mut self.unembedding]).flatten();
        deltas.flat_map(|delta| std::iter::once(&mut delta.a).chain(&mut delta.b))
    }

    /// Returns all tensors, in the order of [`tensors_mut`](Self::tensors_mut).
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Vec<f32>> {
        let layers = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.o, &layer.gate_up, &layer.down]);
        let deltas = layers.chain([&self.unembedding]).flatten();
        deltas.flat_map(|delta| std::iter::once(&delta.a).chain(&delta.b))
    }
}
