//! The forward pass of a decoder layer: attention and MLP with residual connections.

use std::ops::Range;

use super::rope::RotaryAngles;
use super::{Layer, Model};
use crate::kernel::paged_attention::{self, SequenceChunk};
use crate::kernel::{ActivationBuffer, row_ops};
use crate::lora::{LayerDeltas, PackedLora};

/// Rows of a batch that use the same adapter; `None` for the base model.
#[derive(Clone, Debug)]
pub(crate) struct AdapterRows<'a> {
    pub(crate) rows: Range<usize>,
    pub(crate) lora: Option<&'a PackedLora>,
}

/// Activations of one layer that its backward pass needs. All matrices have one row per token.
#[derive(Debug, Default)]
pub(crate) struct LayerActivations {
    /// Residual stream at the layer's input.
    pub(crate) input: ActivationBuffer,
    /// Projected queries, keys and values, before QK norm and rotation.
    pub(crate) qkv: ActivationBuffer,
    /// LoRA hidden activations of the QKV projection; see
    /// [`Delta::project`](crate::lora::Delta::project).
    pub(crate) qkv_lora: ActivationBuffer,
    /// Attention output, before the output projection.
    pub(crate) attention_out: ActivationBuffer,
    /// LoRA hidden activations of the output projection.
    pub(crate) o_lora: ActivationBuffer,
    /// Residual stream between attention and MLP.
    pub(crate) mlp_input: ActivationBuffer,
    /// Gate and up projections, side by side.
    pub(crate) gate_up: ActivationBuffer,
    /// LoRA hidden activations of the gate and up projections.
    pub(crate) gate_up_lora: ActivationBuffer,
    /// LoRA hidden activations of the down projection.
    pub(crate) down_lora: ActivationBuffer,
}

impl LayerActivations {
    /// Returns the size of the activations of `rows` rows in bytes, without the LoRA hidden
    /// activations, which are small.
    pub(crate) fn bytes(model: &Model, rows: usize) -> usize {
        let config = &model.config;
        let heads = model.heads();
        let floats = 2 * config.hidden_size
            + 2 * (heads.query_width() + heads.kv_width())
            + 2 * config.intermediate_size;
        floats * 4 * rows
    }
}

/// Buffers of the forward pass, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    /// Residual stream, `rows × hidden_size`.
    pub(crate) x: ActivationBuffer,
    pub(crate) angles: RotaryAngles,
    /// Normalized residual stream.
    normed: ActivationBuffer,
    /// `1 / rms` of each row. Only the backward pass needs these values, and computes them again.
    inverse_rms: ActivationBuffer,
    /// Queries, keys and values after QK norm and rotation.
    rotated: ActivationBuffer,
    /// Output of attention or of the MLP, which is added to `x`.
    delta: ActivationBuffer,
    /// Output of the MLP's activation function.
    active: ActivationBuffer,
}

impl Workspace {
    /// Frees the buffers that only [`Model::layer`] uses. Keeps the residual stream and the rotary
    /// angles.
    pub(crate) fn free_layer_buffers(&mut self) {
        let x = std::mem::take(&mut self.x);
        let angles = std::mem::take(&mut self.angles);
        *self = Self { x, angles, ..Self::default() };
    }
}

impl Model {
    /// Starts a forward pass: writes the embeddings of `tokens` to `work.x` and the rotary angles
    /// of their positions to `work.angles`.
    ///
    /// # Panics
    /// If a token is not in the vocabulary.
    pub(crate) fn embed(&self, tokens: &[u32], chunks: &[SequenceChunk], work: &mut Workspace) {
        let hidden = self.config.hidden_size;
        let pool = self.kernel.pool();
        work.x.fill_rows(pool, tokens.len(), hidden, hidden, |row, x| {
            self.embedding.row(tokens[row] as usize, x);
        });
        let positions = chunks.iter().flat_map(|chunk| chunk.start..chunk.start + chunk.rows.len());
        work.angles.fill(self, positions);
    }

    /// Applies layer `index` to the residual stream `work.x`, in place.
    ///
    /// Writes the keys and values of the chunks' rows to `pages`, the KV cache of this layer, and
    /// the activations for the backward pass to `activations`.
    pub(crate) fn layer(
        &self,
        index: usize,
        chunks: &[SequenceChunk],
        adapters: &[AdapterRows<'_>],
        pages: &mut [f32],
        work: &mut Workspace,
        activations: &mut LayerActivations,
    ) {
        let layer = &self.layers[index];
        let kernel = &self.kernel;
        let hidden = self.config.hidden_size;
        let count = work.x.len() / hidden;
        let heads = self.heads();
        let qkv_width = layer.qkv.weights.rows();
        let deltas_of = |select: fn(&LayerDeltas) -> &Option<crate::lora::Delta>| {
            adapters.iter().map(move |adapter| {
                let delta = adapter.lora.and_then(|lora| select(&lora.layers[index]).as_ref());
                (adapter.rows.clone(), delta)
            })
        };

        activations.input.copy_from(&work.x);
        self.norm_rows(
            &activations.input,
            &layer.attention_norm,
            &mut work.normed,
            &mut work.inverse_rms,
        );
        let deltas = deltas_of(|deltas| &deltas.qkv);
        layer.qkv.forward(
            kernel,
            &work.normed,
            deltas,
            &mut activations.qkv_lora,
            &mut activations.qkv,
        );
        self.rotate(layer, &work.angles, &activations.qkv, &mut work.rotated);
        let (queries, keys, values) = qkv_offsets(heads.query_width(), heads.kv_width());
        for chunk in chunks {
            let rows = &work.rotated[chunk.rows.start * qkv_width..];
            paged_attention::write_kv(
                heads,
                chunk,
                &rows[keys..],
                &rows[values..],
                qkv_width,
                pages,
            );
        }
        kernel.attend_into(
            heads,
            count,
            chunks,
            &work.rotated[queries..],
            qkv_width,
            pages,
            &mut activations.attention_out,
        );

        let deltas = deltas_of(|deltas| &deltas.o);
        layer.o.forward(
            kernel,
            &activations.attention_out,
            deltas,
            &mut activations.o_lora,
            &mut work.delta,
        );
        self.add_rows(&mut work.x, &work.delta);

        activations.mlp_input.copy_from(&work.x);
        self.norm_rows(
            &activations.mlp_input,
            &layer.mlp_norm,
            &mut work.normed,
            &mut work.inverse_rms,
        );
        let deltas = deltas_of(|deltas| &deltas.gate_up);
        let gate_up = &mut activations.gate_up;
        let lora_hidden = &mut activations.gate_up_lora;
        layer.gate_up.forward(kernel, &work.normed, deltas, lora_hidden, gate_up);
        self.activate(&activations.gate_up, &mut work.active);
        let deltas = deltas_of(|deltas| &deltas.down);
        layer.down.forward(
            kernel,
            &work.active,
            deltas,
            &mut activations.down_lora,
            &mut work.delta,
        );
        self.add_rows(&mut work.x, &work.delta);
    }

    /// Computes `to += from`.
    fn add_rows(&self, to: &mut [f32], from: &[f32]) {
        let isa = self.kernel.isa();
        let hidden = self.config.hidden_size;
        self.kernel.pool().for_each_row(to, hidden, hidden, |i, to| {
            row_ops::add(isa, to, &from[i * hidden..(i + 1) * hidden]);
        });
    }

    /// Computes the RMS norm of every row, and `1 / rms` of each.
    pub(crate) fn norm_rows(
        &self,
        x: &[f32],
        gain: &[f32],
        out: &mut ActivationBuffer,
        inverse: &mut ActivationBuffer,
    ) {
        let hidden = gain.len();
        inverse.resize_zeroed(x.len() / hidden);
        let isa = self.kernel.isa();
        let epsilon = self.config.norm_eps;
        let pool = self.kernel.pool();
        out.fill_rows_with(pool, hidden, inverse, 4 * hidden, |i, out, inverse| {
            let x = &x[i * hidden..(i + 1) * hidden];
            *inverse = row_ops::norm(isa, x, gain, epsilon, out);
        });
    }

    /// Writes the projected rows `qkv` to `out`, with the QK norms, if the model has them, and the
    /// rotary embedding applied to their queries and keys.
    pub(crate) fn rotate(
        &self,
        layer: &Layer,
        angles: &RotaryAngles,
        qkv: &[f32],
        out: &mut ActivationBuffer,
    ) {
        let isa = self.kernel.isa();
        let heads = self.heads();
        let width = layer.qkv.weights.rows();
        let epsilon = self.config.norm_eps;
        let count = qkv.len() / width;
        let source = |row: usize| &qkv[row * width..(row + 1) * width];
        out.copy_rows(self.kernel.pool(), count, width, width * 4, source, |row, out| {
            let (cos, sin) = angles.row(row);
            let end = heads.query_width() + heads.kv_width();
            for (i, head) in out[..end].chunks_exact_mut(heads.head_dim).enumerate() {
                let gain = if i < heads.query_heads { &layer.query_norm } else { &layer.key_norm };
                if let Some(gain) = gain {
                    row_ops::norm_in_place(isa, head, gain, epsilon);
                }
                row_ops::rotate(isa, head, cos, sin, 1.0);
            }
        });
    }

    /// Computes SwiGLU of rows that hold the gate and up projections side by side.
    pub(crate) fn activate(&self, gate_up: &[f32], out: &mut ActivationBuffer) {
        let width = self.config.intermediate_size;
        let count = gate_up.len() / (2 * width);
        let isa = self.kernel.isa();
        out.fill_rows(self.kernel.pool(), count, width, width * 16, |row, out| {
            let (gate, up) = gate_up[row * 2 * width..(row + 1) * 2 * width].split_at(width);
            row_ops::swiglu(isa, gate, up, out);
        });
    }
}

/// Returns the offsets of queries, keys and values in a projected row, given the widths of all
/// query heads and of all key heads.
pub(crate) fn qkv_offsets(queries: usize, keys: usize) -> (usize, usize, usize) {
    (0, queries, queries + keys)
}
