//! LoRA: trained low-rank deltas that are added to the outputs of frozen linear layers.

use std::convert::Infallible;

use crate::kernel::{ActivationBuffer, FusedGemm, Kernel, Lhs, Panels, Precision, Rhs, row_ops};
use crate::model::DeltaGradient;

mod adapter;
mod folder;

pub use adapter::LoraConfig;
pub(crate) use adapter::{Adapter, AdapterPair};

/// An adapter packed for computation.
#[derive(Debug)]
pub(crate) struct PackedLora {
    pub(crate) layers: Vec<LayerDeltas>,
    pub(crate) unembedding: Option<Delta>,
}

/// The deltas of one layer, one for each fused linear layer; `None` where nothing is adapted.
#[derive(Debug, Default)]
pub(crate) struct LayerDeltas {
    pub(crate) qkv: Option<Delta>,
    pub(crate) o: Option<Delta>,
    pub(crate) gate_up: Option<Delta>,
    pub(crate) down: Option<Delta>,
}

/// Low-rank delta `scale · B A x` of one or several linear layers (parts) with the same input.
#[derive(Debug)]
pub(crate) struct Delta {
    rank: usize,
    scale: f32,
    /// A matrices of all parts, stacked: `(rank · parts) × inputs`.
    a: Panels,
    /// B matrix of each part: `outputs × rank`.
    b: Vec<Panels>,
}

impl Delta {
    /// Packs the row-major matrices A (`rank × inputs`) and B (`outputs × rank`) of each part, in
    /// the memory of `kernel`.
    pub(crate) fn new(
        kernel: &Kernel,
        rank: usize,
        scale: f32,
        inputs: usize,
        parts: &[(&[f32], &[f32])],
    ) -> Self {
        let read = |first: usize, out: &mut [f32]| {
            for (i, out) in (first..).zip(out.chunks_exact_mut(inputs)) {
                let part = i / rank;
                let row = i % rank;
                out.copy_from_slice(&parts[part].0[row * inputs..(row + 1) * inputs]);
            }
            Ok::<_, Infallible>(())
        };
        let Ok(a) = Panels::pack(kernel, rank * parts.len(), inputs, Precision::F32, read);
        let pack_b = |(_, b): &(&[f32], &[f32])| {
            let read = |first: usize, out: &mut [f32]| {
                out.copy_from_slice(&b[first * rank..][..out.len()]);
                Ok::<_, Infallible>(())
            };
            let Ok(b) = Panels::pack(kernel, b.len() / rank, rank, Precision::F32, read);
            b
        };
        let b = parts.iter().map(pack_b).collect();
        Self { rank, scale, a, b }
    }

    /// Returns a zero gradient of the same shape.
    pub(crate) fn zero_gradient(&self) -> DeltaGradient {
        DeltaGradient {
            a: vec![0.0; self.a.rows() * self.a.cols()],
            b: self.b.iter().map(|b| vec![0.0; b.rows() * b.cols()]).collect(),
        }
    }

    /// Returns the number of LoRA hidden activations per row: `rank · parts`.
    pub(crate) fn width(&self) -> usize {
        self.a.rows()
    }

    /// Replaces all values of `hidden` by the LoRA hidden activations of the rows of `x`; see
    /// [`project`](Self::project).
    pub(crate) fn project_into(&self, kernel: &Kernel, x: &[f32], hidden: &mut ActivationBuffer) {
        let inputs = self.a.cols();
        let size = (x.len() / inputs, inputs, self.a.rows());
        kernel.gemm_into(size, (Lhs::rows(x, inputs), Rhs::packed(&self.a)), &[], hidden);
        row_ops::scale(kernel.isa(), hidden, self.scale);
    }

    /// Computes the LoRA hidden activations `hidden = scale · x Aᵀ`, [`width`](Self::width) per
    /// row.
    pub(crate) fn project(&self, kernel: &Kernel, x: &[f32], hidden: &mut [f32]) {
        let width = self.a.rows();
        let inputs = self.a.cols();
        let size = (x.len() / inputs, inputs, width);
        kernel.gemm(size, Lhs::rows(x, inputs), Rhs::packed(&self.a), hidden, width);
        row_ops::scale(kernel.isa(), hidden, self.scale);
    }

    /// Returns the product `hidden · Bᵀ` for the `cols` outputs from `from` (a multiple of 16), of
    /// a delta with one part. `hidden` is the result of [`project`](Self::project) for the rows.
    pub(crate) fn slice<'a>(
        &'a self,
        hidden: &'a [f32],
        from: usize,
        cols: usize,
    ) -> FusedGemm<'a> {
        let rhs = Rhs::Packed { weights: &self.b[0], from };
        FusedGemm { lhs: Lhs::rows(hidden, self.rank), rhs, depth: self.rank, cols: 0..cols }
    }

    /// Returns the products `hidden · Bᵀ` of all parts, to be fused with the stacked linear layers.
    pub(crate) fn terms<'a>(&'a self, hidden: &'a [f32]) -> Vec<FusedGemm<'a>> {
        let width = self.a.rows();
        let rank = self.rank;
        let mut col = 0;
        let term = |(part, b): (usize, &'a Panels)| {
            let cols = col..col + b.rows();
            col = cols.end;
            let lhs = Lhs::rows(&hidden[part * rank..], width);
            FusedGemm { lhs, rhs: Rhs::packed(b), depth: rank, cols }
        };
        self.b.iter().enumerate().map(term).collect()
    }

    /// Adds `hidden · Bᵀ` of all parts to the rows of `out`, which start `stride` elements apart.
    pub(crate) fn add(&self, kernel: &Kernel, hidden: &[f32], out: &mut [f32], stride: usize) {
        let count = hidden.len() / self.a.rows();
        if count == 0 {
            return;
        }
        for FusedGemm { lhs, rhs, depth, cols } in self.terms(hidden) {
            let size = (count, depth, cols.len());
            kernel.gemm_accumulate(size, lhs, rhs, &mut out[cols.start..], stride);
        }
    }

    /// Backward pass: adds to the gradients of A and B and, if given, of `x`.
    ///
    /// `grad` is the gradient with respect to the output; its rows start `stride` elements apart.
    #[expect(clippy::too_many_arguments, reason = "the forward inputs and the gradients")]
    pub(crate) fn backward(
        &self,
        kernel: &Kernel,
        x: &[f32],
        hidden: &[f32],
        grad: &[f32],
        stride: usize,
        out: &mut DeltaGradient,
        grad_x: Option<&mut [f32]>,
    ) {
        let width = self.a.rows();
        let inputs = self.a.cols();
        let rank = self.rank;
        let count = x.len() / inputs;
        if count == 0 {
            return;
        }
        let mut grad_hidden = vec![0.0; count * width];
        let mut col = 0;
        for (part, (b, out)) in self.b.iter().zip(&mut out.b).enumerate() {
            let outputs = b.rows();
            let grad = &grad[col..];
            let hidden = &hidden[part * rank..];
            let grad_hidden = &mut grad_hidden[part * rank..];
            let lhs = Lhs::rows(grad, stride);
            kernel.gemm((count, outputs, rank), lhs, Rhs::transposed(b), grad_hidden, width);
            let rhs = Rhs::Rows { data: hidden, stride: width };
            let lhs = Lhs::columns(grad, stride);
            kernel.gemm_accumulate((outputs, count, rank), lhs, rhs, out, rank);
            col += outputs;
        }
        row_ops::scale(kernel.isa(), &mut grad_hidden, self.scale);
        self.backward_a(kernel, x, &grad_hidden, out, grad_x);
    }

    /// Backward pass of `x Aᵀ`: adds to the gradient of A and, if given, of `x`. `grad_hidden` is
    /// the gradient with respect to the hidden activations, multiplied by the scale.
    pub(crate) fn backward_a(
        &self,
        kernel: &Kernel,
        x: &[f32],
        grad_hidden: &[f32],
        out: &mut DeltaGradient,
        grad_x: Option<&mut [f32]>,
    ) {
        let width = self.a.rows();
        let inputs = self.a.cols();
        let count = x.len() / inputs;
        let rhs = Rhs::Rows { data: x, stride: inputs };
        let lhs = Lhs::columns(grad_hidden, width);
        kernel.gemm_accumulate((width, count, inputs), lhs, rhs, &mut out.a, inputs);
        if let Some(grad_x) = grad_x {
            let lhs = Lhs::rows(grad_hidden, width);
            let size = (count, width, inputs);
            kernel.gemm_accumulate(size, lhs, Rhs::transposed(&self.a), grad_x, inputs);
        }
    }

    /// Returns the B matrix of a delta with one part.
    pub(crate) fn only_b(&self) -> &Panels {
        &self.b[0]
    }

    /// Returns the factor `alpha / rank`.
    pub(crate) fn scale(&self) -> f32 {
        self.scale
    }
}
