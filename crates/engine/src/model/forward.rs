//! The forward pass.

use std::ops::Range;

use super::rope::RotaryAngles;
use super::{Layer, Model};
use crate::kernel::paged_attention::{self, SequenceChunk};
use crate::kernel::row_ops;
use crate::lora::{LayerDeltas, PackedLora};

/// Rows of a batch and the adapter they go through.
#[derive(Clone, Debug)]
pub(crate) struct AdapterRows<'a> {
    pub(crate) rows: Range<usize>,
    pub(crate) lora: Option<&'a PackedLora>,
}

/// What a layer computed on its way, as far as its backward pass needs it.
#[derive(Debug, Default)]
pub(crate) struct LayerActivations {
    /// What came in.
    pub(crate) x: Vec<f32>,
    /// `1 / rms` of its rows.
    pub(crate) x_inverse: Vec<f32>,
    /// Queries, keys and values as projected: no norm, no rotation yet.
    pub(crate) qkv: Vec<f32>,
    pub(crate) qkv_down: Vec<f32>,
    /// What attention gave, before its output projection.
    pub(crate) mixed: Vec<f32>,
    pub(crate) o_down: Vec<f32>,
    /// The residual stream between attention and MLP.
    pub(crate) middle: Vec<f32>,
    pub(crate) middle_inverse: Vec<f32>,
    pub(crate) gate_up: Vec<f32>,
    pub(crate) gate_up_down: Vec<f32>,
    pub(crate) down_down: Vec<f32>,
}

impl LayerActivations {
    /// Memory that a trace of `rows` rows takes, without the small parts.
    pub(crate) fn bytes(model: &Model, rows: usize) -> usize {
        let config = &model.config;
        let heads = model.heads();
        let floats = 2 * config.hidden_size
            + 2 * (heads.query_width() + heads.kv_width())
            + 2 * config.intermediate_size;
        floats * 4 * rows
    }
}

/// Buffers of the forward pass, kept from call to call.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    /// The residual stream: one row for each token.
    pub(crate) x: Vec<f32>,
    pub(crate) angles: RotaryAngles,
    normed: Vec<f32>,
    rotated: Vec<f32>,
    delta: Vec<f32>,
    active: Vec<f32>,
}

impl Model {
    /// Begins a pass: the embeddings of `tokens`, which must exist, and the angles of their
    /// positions.
    pub(crate) fn begin(&self, tokens: &[u32], spans: &[SequenceChunk], work: &mut Workspace) {
        let hidden = self.config.hidden_size;
        work.x.resize(tokens.len() * hidden, 0.0);
        for (x, token) in work.x.chunks_exact_mut(hidden).zip(tokens) {
            self.embedding.row(*token as usize, x);
        }
        let positions = spans.iter().flat_map(|span| span.start..span.start + span.rows.len());
        work.angles.fill(self, positions);
    }

    /// One layer: from `work.x` to `work.x`. The keys and values of the spans' rows are written to
    /// `pages`, one layer's.
    pub(crate) fn layer(
        &self,
        index: usize,
        spans: &[SequenceChunk],
        adapted: &[AdapterRows<'_>],
        pages: &mut [f32],
        work: &mut Workspace,
        trace: &mut LayerActivations,
    ) {
        let (layer, kernel) = (&self.layers[index], &self.kernel);
        let hidden = self.config.hidden_size;
        let count = work.x.len() / hidden;
        let heads = self.heads();
        let qkv_width = layer.qkv.weights.rows();
        let of = |pick: fn(&LayerDeltas) -> &Option<crate::lora::Delta>| {
            adapted.iter().map(move |part| {
                let lora = part.lora.and_then(|lora| pick(&lora.layers[index]).as_ref());
                (part.rows.clone(), lora)
            })
        };

        trace.x.clone_from(&work.x);
        self.norm_rows(&trace.x, &layer.attention_norm, &mut work.normed, &mut trace.x_inverse);
        let deltas = of(|deltas| &deltas.qkv);
        layer.qkv.forward(kernel, &work.normed, deltas, &mut trace.qkv_down, &mut trace.qkv);
        work.rotated.clone_from(&trace.qkv);
        self.rotate(layer, &work.angles, &mut work.rotated);
        let (queries, keys, values) = split(heads.query_width(), heads.kv_width());
        for span in spans {
            let rows = &work.rotated[span.rows.start * qkv_width..];
            paged_attention::write_kv(
                heads,
                span,
                &rows[keys..],
                &rows[values..],
                qkv_width,
                pages,
            );
        }
        trace.mixed.resize(count * heads.query_width(), 0.0);
        let rotated = &work.rotated[queries..];
        kernel.attend(heads, spans, rotated, qkv_width, pages, &mut trace.mixed);

        let deltas = of(|deltas| &deltas.o);
        layer.o.forward(kernel, &trace.mixed, deltas, &mut trace.o_down, &mut work.delta);
        self.add_rows(&mut work.x, &work.delta);

        trace.middle.clone_from(&work.x);
        self.norm_rows(&trace.middle, &layer.mlp_norm, &mut work.normed, &mut trace.middle_inverse);
        let deltas = of(|deltas| &deltas.gate_up);
        let (gate_up, down) = (&mut trace.gate_up, &mut trace.gate_up_down);
        layer.gate_up.forward(kernel, &work.normed, deltas, down, gate_up);
        self.activate(&trace.gate_up, &mut work.active);
        let deltas = of(|deltas| &deltas.down);
        layer.down.forward(kernel, &work.active, deltas, &mut trace.down_down, &mut work.delta);
        self.add_rows(&mut work.x, &work.delta);
    }

    /// `to += from`.
    fn add_rows(&self, to: &mut [f32], from: &[f32]) {
        let (isa, hidden) = (self.kernel.isa(), self.config.hidden_size);
        self.kernel.pool().each_row(to, hidden, hidden, |i, to| {
            row_ops::add(isa, to, &from[i * hidden..(i + 1) * hidden]);
        });
    }

    /// Norm of every row, and `1 / rms` of each.
    pub(crate) fn norm_rows(
        &self,
        x: &[f32],
        gain: &[f32],
        out: &mut Vec<f32>,
        inverse: &mut Vec<f32>,
    ) {
        let hidden = gain.len();
        out.resize(x.len(), 0.0);
        inverse.resize(x.len() / hidden, 0.0);
        let (isa, epsilon) = (self.kernel.isa(), self.config.norm_eps);
        self.kernel.pool().each_row_with(out, hidden, inverse, 4 * hidden, |i, out, inverse| {
            let x = &x[i * hidden..(i + 1) * hidden];
            *inverse = row_ops::norm(isa, x, gain, epsilon, out);
        });
    }

    /// Norms (where the model has them) and rotates queries and keys of projected rows.
    pub(crate) fn rotate(&self, layer: &Layer, angles: &RotaryAngles, qkv: &mut [f32]) {
        let isa = self.kernel.isa();
        let heads = self.heads();
        let width = layer.qkv.weights.rows();
        let epsilon = self.config.norm_eps;
        self.kernel.pool().each_row(qkv, width, width * 4, |row, qkv| {
            let (cos, sin) = angles.row(row);
            let end = heads.query_width() + heads.kv_width();
            for (i, head) in qkv[..end].chunks_exact_mut(heads.head_dim).enumerate() {
                let gain = if i < heads.query_heads { &layer.query_norm } else { &layer.key_norm };
                if let Some(gain) = gain {
                    row_ops::norm_in_place(isa, head, gain, epsilon);
                }
                row_ops::rotate(isa, head, cos, sin, 1.0);
            }
        });
    }

    /// SwiGLU of gate and up projections that stand beside each other.
    pub(crate) fn activate(&self, gate_up: &[f32], out: &mut Vec<f32>) {
        let width = self.config.intermediate_size;
        let count = gate_up.len() / (2 * width);
        out.resize(count * width, 0.0);
        let isa = self.kernel.isa();
        self.kernel.pool().each_row(out, width, width * 16, |row, out| {
            let (gate, up) = gate_up[row * 2 * width..(row + 1) * 2 * width].split_at(width);
            row_ops::swiglu(isa, gate, up, out);
        });
    }
}

/// Where queries, keys and values begin in a projected row.
pub(crate) fn split(queries: usize, keys: usize) -> (usize, usize, usize) {
    (0, queries, queries + keys)
}
