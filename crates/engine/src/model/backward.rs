//! The backward pass of a decoder layer, which also adds to the gradients of its LoRA deltas.

use super::attention_backward::AttentionTensors;
use super::forward::LayerActivations;
use super::linear::DeltaGradient;
use super::rope::RotaryAngles;
use super::{Model, PackedBatch};
use crate::kernel::row_ops;
use crate::lora::{Delta, LayerDeltas, PackedLora};

/// A linear layer of a decoder layer; layers with the same input are stacked into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedLinear {
    Qkv,
    O,
    GateUp,
    Down,
}

/// A norm, whose gain vector is trained. The variants of a layer contain the layer's index; `Last`
/// is the norm after the last layer.
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
    /// Returns whether gradients are wanted. If not, the calls that cost time are skipped.
    fn is_enabled(&self) -> bool;
    /// Called for each linear layer with its input and the gradient with respect to its output.
    fn linear(&mut self, model: &Model, layer: usize, site: FusedLinear, x: &[f32], grad: &[f32]);
    /// Called for each row of a norm with its input, `1 / rms`, and the gradient with respect to
    /// its output.
    fn norm(&mut self, gain: NormWeight, x: &[f32], inverse: f32, grad: &[f32]);
    /// Called for each slice of `cols` tokens of the unembedding from token `from`, with its input
    /// and the gradient with respect to the logits.
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
#[derive(Debug, Default)]
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
#[derive(Debug)]
pub(crate) struct AdapterGradients {
    pub(crate) layers: Vec<LayerGradients>,
    pub(crate) unembedding: Option<DeltaGradient>,
}

impl AdapterGradients {
    /// Returns zero gradients for an adapter, or empty ones without an adapter.
    pub(crate) fn new(model: &Model, lora: Option<&PackedLora>) -> Self {
        Self {
            layers: match lora {
                Some(lora) => lora.layers.iter().map(LayerGradients::zeros_like).collect(),
                None => model.layers.iter().map(|_| LayerGradients::default()).collect(),
            },
            unembedding: lora.and_then(|lora| lora.unembedding.as_ref()).map(Delta::zero_gradient),
        }
    }
}

/// Inputs of the backward pass of one layer.
pub(crate) struct LayerBackward<'a> {
    pub(crate) index: usize,
    pub(crate) batch: &'a PackedBatch,
    pub(crate) angles: &'a RotaryAngles,
    pub(crate) activations: &'a LayerActivations,
    pub(crate) deltas: Option<&'a LayerDeltas>,
    /// Whether to compute the gradient with respect to the layer's input.
    pub(crate) input_gradient: bool,
}

impl Model {
    /// Replaces `grad`, the gradient with respect to a layer's output, by the gradient with respect
    /// to its input, and adds to the gradients of the layer's deltas.
    pub(crate) fn layer_backward(
        &self,
        pass: &LayerBackward<'_>,
        grads: &mut LayerGradients,
        grad: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let LayerBackward { index, batch, angles, activations, deltas, input_gradient } = *pass;
        let (layer, kernel) = (&self.layers[index], &self.kernel);
        let isa = kernel.isa();
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let count = batch.tokens.len();
        let mut normed = Vec::new();
        let mut inverse = Vec::new();

        // MLP.
        let mut active = Vec::new();
        self.activate(&activations.gate_up, &mut active);
        let mut grad_active = vec![0.0; count * inner];
        sink.linear(self, index, FusedLinear::Down, &active, grad);
        let delta = deltas.and_then(|deltas| deltas.down.as_ref()).zip(grads.down.as_mut());
        let lora_hidden = &activations.down_lora;
        layer.down.backward(kernel, &active, delta, lora_hidden, grad, Some(&mut grad_active));
        drop(active);
        let mut grad_gate_up = activations.gate_up.clone();
        kernel.pool().for_each_row(&mut grad_gate_up, 2 * inner, 24 * inner, |row, gate_up| {
            let (gate, up) = gate_up.split_at_mut(inner);
            row_ops::swiglu_backward(isa, gate, up, &grad_active[row * inner..(row + 1) * inner]);
        });
        drop(grad_active);
        self.norm_rows(&activations.mlp_input, &layer.mlp_norm, &mut normed, &mut inverse);
        let mut grad_normed = vec![0.0; count * hidden];
        sink.linear(self, index, FusedLinear::GateUp, &normed, &grad_gate_up);
        let delta = deltas.and_then(|deltas| deltas.gate_up.as_ref()).zip(grads.gate_up.as_mut());
        let (lora_hidden, out) = (&activations.gate_up_lora, Some(&mut grad_normed[..]));
        layer.gate_up.backward(kernel, &normed, delta, lora_hidden, &grad_gate_up, out);
        drop(grad_gate_up);
        let norm = (NormWeight::Mlp(index), &layer.mlp_norm[..]);
        self.norm_backward(norm, &activations.mlp_input, &inverse, &grad_normed, grad, sink);

        // Attention.
        let mut grad_attention = vec![0.0; count * self.heads().query_width()];
        sink.linear(self, index, FusedLinear::O, &activations.attention_out, grad);
        let delta = deltas.and_then(|deltas| deltas.o.as_ref()).zip(grads.o.as_mut());
        let (lora_hidden, out) = (&activations.o_lora, Some(&mut grad_attention[..]));
        layer.o.backward(kernel, &activations.attention_out, delta, lora_hidden, grad, out);
        let mut rotated = activations.qkv.clone();
        self.rotate(layer, angles, &mut rotated);
        let mut grad_qkv = self.attend_backward(&AttentionTensors {
            batch,
            rotated: &rotated,
            out: &activations.attention_out,
            grad: &grad_attention,
        });
        drop((rotated, grad_attention));
        self.rotate_backward(index, angles, &activations.qkv, &mut grad_qkv, sink);
        self.norm_rows(&activations.input, &layer.attention_norm, &mut normed, &mut inverse);
        grad_normed.fill(0.0);
        sink.linear(self, index, FusedLinear::Qkv, &normed, &grad_qkv);
        let delta = deltas.and_then(|deltas| deltas.qkv.as_ref()).zip(grads.qkv.as_mut());
        let out = input_gradient.then_some(&mut grad_normed[..]);
        layer.qkv.backward(kernel, &normed, delta, &activations.qkv_lora, &grad_qkv, out);
        if input_gradient {
            let norm = (NormWeight::Attention(index), &layer.attention_norm[..]);
            self.norm_backward(norm, &activations.input, &inverse, &grad_normed, grad, sink);
        }
    }

    /// Backward pass of [`Model::norm_rows`]: adds the gradient with respect to its input to `out`.
    pub(crate) fn norm_backward(
        &self,
        (which, gain): (NormWeight, &[f32]),
        x: &[f32],
        inverse: &[f32],
        grad: &[f32],
        out: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let isa = self.kernel.isa();
        let width = gain.len();
        if sink.is_enabled() {
            for (i, inverse) in inverse.iter().enumerate() {
                let row = i * width..(i + 1) * width;
                sink.norm(which, &x[row.clone()], *inverse, &grad[row]);
            }
        }
        self.kernel.pool().for_each_row(out, width, 8 * width, |i, out| {
            let row = i * width..(i + 1) * width;
            row_ops::norm_backward(isa, &x[row.clone()], gain, inverse[i], &grad[row], out);
        });
    }

    /// Backward pass of [`Model::rotate`]: replaces `grad` in place.
    fn rotate_backward(
        &self,
        index: usize,
        angles: &RotaryAngles,
        qkv: &[f32],
        grad: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let layer = &self.layers[index];
        let (isa, heads, epsilon) = (self.kernel.isa(), self.heads(), self.config.norm_eps);
        let width = layer.qkv.weights.rows();
        let end = heads.query_width() + heads.kv_width();
        self.kernel.pool().for_each_row(grad, width, 4 * width, |row, grad| {
            let (cos, sin) = angles.row(row);
            for head in grad[..end].chunks_exact_mut(heads.head_dim) {
                row_ops::rotate(isa, head, cos, sin, -1.0);
            }
        });
        if layer.query_norm.is_none() && layer.key_norm.is_none() {
            return;
        }
        let gain_of =
            |i: usize| if i < heads.query_heads { &layer.query_norm } else { &layer.key_norm };
        if sink.is_enabled() {
            let mut out = vec![0.0; heads.head_dim];
            for (qkv, grad) in qkv.chunks_exact(width).zip(grad.chunks_exact(width)) {
                let rows =
                    qkv[..end].chunks_exact(heads.head_dim).zip(grad.chunks_exact(heads.head_dim));
                for (i, (x, grad)) in rows.enumerate() {
                    if let Some(gain) = gain_of(i) {
                        let inverse = row_ops::norm(isa, x, gain, epsilon, &mut out);
                        let which = if i < heads.query_heads {
                            NormWeight::Queries(index)
                        } else {
                            NormWeight::Keys(index)
                        };
                        sink.norm(which, x, inverse, grad);
                    }
                }
            }
        }
        self.kernel.pool().for_each_row(grad, width, 8 * width, |row, grad| {
            let mut copy = vec![0.0; heads.head_dim];
            let qkv = &qkv[row * width..(row + 1) * width];
            for (i, head) in grad[..end].chunks_exact_mut(heads.head_dim).enumerate() {
                if let Some(gain) = gain_of(i) {
                    let x = &qkv[i * heads.head_dim..(i + 1) * heads.head_dim];
                    copy.copy_from_slice(head);
                    let mut normed = vec![0.0; heads.head_dim];
                    let inverse = row_ops::norm(isa, x, gain, epsilon, &mut normed);
                    head.fill(0.0);
                    row_ops::norm_backward(isa, x, gain, inverse, &copy, head);
                }
            }
        });
    }
}
