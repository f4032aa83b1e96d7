//! The backward pass of a decoder layer, which also adds to the gradients of its LoRA deltas.
//!
//! Because of the residual connections, the gradient with respect to a layer's output is also part
//! of the gradient with respect to its input. Each half of the layer adds the gradient through its
//! own computation: first the MLP, then attention.

use super::attention_backward::AttentionTensors;
use super::forward::LayerActivations;
use super::gradients::{FusedLinear, GradientSink, LayerGradients, NormWeight};
use super::rope::RotaryAngles;
use super::{Layer, Model, PackedBatch};
use crate::kernel::{ActivationBuffer, row_ops};
use crate::lora::LayerDeltas;

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

/// Operands of the backward pass of a linear layer, one row per token.
struct LinearBackward<'a> {
    input: &'a [f32],
    /// Gradient with respect to the output.
    grad_output: &'a [f32],
    /// Receives the gradient with respect to the input. `None` if the input needs no gradient.
    grad_input: Option<&'a mut ActivationBuffer>,
}

/// Operands of the backward pass of a norm, one row per token.
pub(crate) struct NormBackward<'a> {
    pub(crate) which: NormWeight,
    pub(crate) gain: &'a [f32],
    pub(crate) input: &'a [f32],
    /// `1 / rms` of each row of `input`.
    pub(crate) inverse_rms: &'a [f32],
    /// Gradient with respect to the output.
    pub(crate) grad_output: &'a [f32],
}

impl Model {
    /// Replaces `grad`, the gradient with respect to a layer's output, by the gradient with respect
    /// to its input, and adds to the gradients of the layer's deltas.
    ///
    /// Without [`LayerBackward::input_gradient`], `grad` is unspecified afterwards.
    pub(crate) fn layer_backward(
        &self,
        pass: &LayerBackward<'_>,
        grads: &mut LayerGradients,
        grad: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        self.mlp_backward(pass, grads, grad, sink);
        self.attention_backward(pass, grads, grad, sink);
    }

    /// Adds to `grad`, the gradient with respect to the layer's output, the gradient through the
    /// MLP.
    fn mlp_backward(
        &self,
        pass: &LayerBackward<'_>,
        grads: &mut LayerGradients,
        grad: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let LayerBackward { index, batch, activations, .. } = *pass;
        let layer = &self.layers[index];
        let isa = self.kernel.isa();
        let inner = self.config.intermediate_size;
        let count = batch.tokens.len();

        let mut active = ActivationBuffer::default();
        self.activate(&activations.gate_up, &mut active);
        let mut grad_active = ActivationBuffer::default();
        let down = LinearBackward {
            input: &active,
            grad_output: grad,
            grad_input: Some(&mut grad_active),
        };
        self.linear_backward(pass, FusedLinear::Down, down, grads, sink);
        drop(active);

        let mut grad_gate_up = ActivationBuffer::default();
        let pool = self.kernel.pool();
        let width = 2 * inner;
        let gate_up = |row: usize| &activations.gate_up[row * width..(row + 1) * width];
        grad_gate_up.copy_rows(pool, count, width, 12 * width, gate_up, |row, grad_gate_up| {
            let (gate, up) = grad_gate_up.split_at_mut(inner);
            row_ops::swiglu_backward(isa, gate, up, &grad_active[row * inner..(row + 1) * inner]);
        });
        drop(grad_active);

        let mut normed = ActivationBuffer::default();
        let mut inverse_rms = ActivationBuffer::default();
        self.norm_rows(&activations.mlp_input, &layer.mlp_norm, &mut normed, &mut inverse_rms);
        let mut grad_normed = ActivationBuffer::default();
        let gate_up = LinearBackward {
            input: &normed,
            grad_output: &grad_gate_up,
            grad_input: Some(&mut grad_normed),
        };
        self.linear_backward(pass, FusedLinear::GateUp, gate_up, grads, sink);
        drop(grad_gate_up);

        let norm = NormBackward {
            which: NormWeight::Mlp(index),
            gain: &layer.mlp_norm,
            input: &activations.mlp_input,
            inverse_rms: &inverse_rms,
            grad_output: &grad_normed,
        };
        self.norm_backward(&norm, grad, sink);
    }

    /// Adds to `grad`, the gradient with respect to the residual stream between attention and MLP,
    /// the gradient through attention.
    fn attention_backward(
        &self,
        pass: &LayerBackward<'_>,
        grads: &mut LayerGradients,
        grad: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let LayerBackward { index, batch, angles, activations, input_gradient, .. } = *pass;
        let layer = &self.layers[index];

        let mut grad_attention = ActivationBuffer::default();
        let o = LinearBackward {
            input: &activations.attention_out,
            grad_output: grad,
            grad_input: Some(&mut grad_attention),
        };
        self.linear_backward(pass, FusedLinear::O, o, grads, sink);

        let mut rotated = ActivationBuffer::default();
        self.rotate(layer, angles, &activations.qkv, &mut rotated);
        let mut grad_qkv = self.attend_backward(&AttentionTensors {
            batch,
            rotated: &rotated,
            out: &activations.attention_out,
            grad: &grad_attention,
        });
        drop((rotated, grad_attention));
        self.rotate_backward(index, angles, &activations.qkv, &mut grad_qkv, sink);

        let mut normed = ActivationBuffer::default();
        let mut inverse_rms = ActivationBuffer::default();
        self.norm_rows(&activations.input, &layer.attention_norm, &mut normed, &mut inverse_rms);
        let mut grad_normed = ActivationBuffer::default();
        let qkv = LinearBackward {
            input: &normed,
            grad_output: &grad_qkv,
            grad_input: input_gradient.then_some(&mut grad_normed),
        };
        self.linear_backward(pass, FusedLinear::Qkv, qkv, grads, sink);
        drop(grad_qkv);

        if input_gradient {
            let norm = NormBackward {
                which: NormWeight::Attention(index),
                gain: &layer.attention_norm,
                input: &activations.input,
                inverse_rms: &inverse_rms,
                grad_output: &grad_normed,
            };
            self.norm_backward(&norm, grad, sink);
        }
    }

    /// Backward pass of one linear layer and its delta; see
    /// [`Linear::backward`](super::Linear::backward).
    fn linear_backward(
        &self,
        pass: &LayerBackward<'_>,
        site: FusedLinear,
        operands: LinearBackward<'_>,
        grads: &mut LayerGradients,
        sink: &mut dyn GradientSink,
    ) {
        let LinearBackward { input, grad_output, grad_input } = operands;
        sink.linear(self, pass.index, site, input, grad_output);
        let delta = pass.deltas.and_then(|deltas| site.delta(deltas)).zip(site.gradient(grads));
        let lora_hidden = site.lora_hidden(pass.activations);
        let linear = site.of_layer(&self.layers[pass.index]);
        linear.backward(&self.kernel, input, delta, lora_hidden, grad_output, grad_input);
    }

    /// Backward pass of [`Model::norm_rows`]: adds the gradient with respect to its input to `out`.
    pub(crate) fn norm_backward(
        &self,
        norm: &NormBackward<'_>,
        out: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let NormBackward { which, gain, input, inverse_rms, grad_output } = *norm;
        let isa = self.kernel.isa();
        let width = gain.len();
        let elements = |row: usize| row * width..(row + 1) * width;
        if sink.is_enabled() {
            for (row, inverse) in inverse_rms.iter().enumerate() {
                sink.norm(which, &input[elements(row)], *inverse, &grad_output[elements(row)]);
            }
        }
        self.kernel.pool().for_each_row(out, width, 8 * width, |row, out| {
            let x = &input[elements(row)];
            let grad = &grad_output[elements(row)];
            row_ops::norm_backward(isa, x, gain, inverse_rms[row], grad, out);
        });
    }

    /// Backward pass of [`Model::rotate`]: replaces `grad`, the gradient with respect to its
    /// output, by the gradient with respect to `qkv`, its input.
    fn rotate_backward(
        &self,
        index: usize,
        angles: &RotaryAngles,
        qkv: &[f32],
        grad: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let layer = &self.layers[index];
        let isa = self.kernel.isa();
        let heads = self.heads();
        let width = layer.qkv.weights.rows();
        let rotated_width = heads.query_width() + heads.kv_width();
        self.kernel.pool().for_each_row(grad, width, 4 * width, |row, grad| {
            let (cos, sin) = angles.row(row);
            for head in grad[..rotated_width].chunks_exact_mut(heads.head_dim) {
                row_ops::rotate(isa, head, cos, sin, -1.0);
            }
        });
        if layer.query_norm.is_some() || layer.key_norm.is_some() {
            self.qk_norm_backward(index, qkv, grad, sink);
        }
    }

    /// Backward pass of the QK norms: replaces `grad`, the gradient with respect to their output,
    /// by the gradient with respect to `qkv`, their input.
    fn qk_norm_backward(
        &self,
        index: usize,
        qkv: &[f32],
        grad: &mut [f32],
        sink: &mut dyn GradientSink,
    ) {
        let layer = &self.layers[index];
        let isa = self.kernel.isa();
        let heads = self.heads();
        let width = layer.qkv.weights.rows();
        // The queries and keys of a row are consecutive heads; the values follow and have no norm.
        let head_count = heads.query_heads + heads.kv_heads;
        let elements = |head: usize| head * heads.head_dim..(head + 1) * heads.head_dim;
        let norm_of = |head: usize| {
            if head < heads.query_heads {
                layer.query_norm.as_deref().map(|gain| (NormWeight::Queries(index), gain))
            } else {
                layer.key_norm.as_deref().map(|gain| (NormWeight::Keys(index), gain))
            }
        };
        let inverse_rms = self.qk_inverse_rms(layer, qkv);
        if sink.is_enabled() {
            let rows = qkv.chunks_exact(width).zip(grad.chunks_exact(width));
            for ((qkv, grad), inverse_rms) in rows.zip(inverse_rms.chunks_exact(head_count)) {
                for (head, inverse) in inverse_rms.iter().enumerate() {
                    if let Some((which, _)) = norm_of(head) {
                        sink.norm(which, &qkv[elements(head)], *inverse, &grad[elements(head)]);
                    }
                }
            }
        }
        self.kernel.pool().for_each_row(grad, width, 8 * width, |row, grad| {
            let mut grad_output = vec![0.0; heads.head_dim];
            let qkv = &qkv[row * width..(row + 1) * width];
            let inverse_rms = &inverse_rms[row * head_count..(row + 1) * head_count];
            for (head, inverse) in inverse_rms.iter().enumerate() {
                if let Some((_, gain)) = norm_of(head) {
                    let grad = &mut grad[elements(head)];
                    grad_output.copy_from_slice(grad);
                    // `norm_backward` adds to its output.
                    grad.fill(0.0);
                    let x = &qkv[elements(head)];
                    row_ops::norm_backward(isa, x, gain, *inverse, &grad_output, grad);
                }
            }
        });
    }

    /// Returns `1 / rms` of every query and key head of every row, 0 for heads without a norm.
    fn qk_inverse_rms(&self, layer: &Layer, qkv: &[f32]) -> Vec<f32> {
        let isa = self.kernel.isa();
        let heads = self.heads();
        let epsilon = self.config.norm_eps;
        let width = layer.qkv.weights.rows();
        let head_count = heads.query_heads + heads.kv_heads;
        let mut inverse_rms = vec![0.0; qkv.len() / width * head_count];
        self.kernel.pool().for_each_row(&mut inverse_rms, head_count, 4 * width, |row, out| {
            let mut normed = vec![0.0; heads.head_dim];
            let qkv = qkv[row * width..(row + 1) * width].chunks_exact(heads.head_dim);
            for (head, (inverse, x)) in out.iter_mut().zip(qkv).enumerate() {
                let gain =
                    if head < heads.query_heads { &layer.query_norm } else { &layer.key_norm };
                if let Some(gain) = gain {
                    *inverse = row_ops::norm(isa, x, gain, epsilon, &mut normed);
                }
            }
        });
        inverse_rms
    }
}
