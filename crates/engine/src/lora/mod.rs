//! LoRA: small trained deltas beside frozen products.

use crate::kernel::{FusedGemm, Kernel, Lhs, Panels, Precision, Rhs, row_ops};
use crate::model::DeltaGradient;

mod adapter;
mod folder;

pub use adapter::LoraConfig;
pub(crate) use adapter::{Adapter, AdapterPair};

/// An adapter in the form that products read.
#[derive(Debug)]
pub(crate) struct PackedLora {
    pub(crate) layers: Vec<LayerDeltas>,
    pub(crate) unembedding: Option<Delta>,
}

/// The deltas of one layer, beside the products of the same names.
#[derive(Debug, Default)]
pub(crate) struct LayerDeltas {
    pub(crate) qkv: Option<Delta>,
    pub(crate) o: Option<Delta>,
    pub(crate) gate_up: Option<Delta>,
    pub(crate) down: Option<Delta>,
}

/// `scale · B (A x)` for one or several products of the same input.
#[derive(Debug)]
pub(crate) struct Delta {
    rank: usize,
    scale: f32,
    /// The A of each part, stacked.
    a: Panels,
    /// The B of each part.
    b: Vec<Panels>,
}

impl Delta {
    /// From row-major A (`rank × inputs`) and B (`outputs × rank`) of each part.
    pub(crate) fn new(rank: usize, scale: f32, inputs: usize, parts: &[(&[f32], &[f32])]) -> Self {
        let kernel = Kernel::plain();
        let a = Panels::pack(&kernel, rank * parts.len(), inputs, Precision::F32, |i, out| {
            let (part, row) = (i / rank, i % rank);
            out.copy_from_slice(&parts[part].0[row * inputs..(row + 1) * inputs]);
        });
        let b = parts
            .iter()
            .map(|(_, b)| Panels::from_rows(b, b.len() / rank, rank, Precision::F32))
            .collect();
        Self { rank, scale, a, b }
    }

    pub(crate) fn grad(&self) -> DeltaGradient {
        DeltaGradient {
            a: vec![0.0; self.a.rows() * self.a.cols()],
            b: self.b.iter().map(|b| vec![0.0; b.rows() * b.cols()]).collect(),
        }
    }

    /// How wide the result of the A side is.
    pub(crate) fn width(&self) -> usize {
        self.a.rows()
    }

    /// The scaled A side of these rows, [`width`](Self::width) for each.
    pub(crate) fn project(&self, kernel: &Kernel, x: &[f32], down: &mut [f32]) {
        let (width, inputs) = (self.a.rows(), self.a.cols());
        let size = (x.len() / inputs, inputs, width);
        kernel.gemm(size, Lhs::rows(x, inputs), Rhs::packed(&self.a), down, width);
        row_ops::scale(kernel.isa(), down, self.scale);
    }

    /// The B side, for outputs `from` and on (a multiple of 16), `cols` of them, of a delta with one
    /// part; `down` is what [`project`](Self::project) gave for the rows.
    pub(crate) fn slice<'a>(&'a self, down: &'a [f32], from: usize, cols: usize) -> FusedGemm<'a> {
        let rhs = Rhs::Packed { weights: &self.b[0], from };
        FusedGemm { lhs: Lhs::rows(down, self.rank), rhs, depth: self.rank, cols: 0..cols }
    }

    /// The B sides of all parts, beside the stacked product of the same input.
    pub(crate) fn terms<'a>(&'a self, down: &'a [f32]) -> Vec<FusedGemm<'a>> {
        let (width, rank) = (self.a.rows(), self.rank);
        let mut col = 0;
        let term = |(part, b): (usize, &'a Panels)| {
            let cols = col..col + b.rows();
            col = cols.end;
            let lhs = Lhs::rows(&down[part * rank..], width);
            FusedGemm { lhs, rhs: Rhs::packed(b), depth: rank, cols }
        };
        self.b.iter().enumerate().map(term).collect()
    }

    /// Adds the B side to rows of `out`, which are `stride` wide.
    pub(crate) fn add(&self, kernel: &Kernel, down: &[f32], out: &mut [f32], stride: usize) {
        let count = down.len() / self.a.rows();
        if count == 0 {
            return;
        }
        for FusedGemm { lhs, rhs, depth, cols } in self.terms(down) {
            let size = (count, depth, cols.len());
            kernel.gemm_accumulate(size, lhs, rhs, &mut out[cols.start..], stride);
        }
    }

    /// Backward of the delta: adds to the gradients of A, B and, if given, of `x`.
    #[expect(clippy::too_many_arguments, reason = "what forward knew, and the gradients")]
    pub(crate) fn backward(
        &self,
        kernel: &Kernel,
        x: &[f32],
        down: &[f32],
        grad: &[f32],
        stride: usize,
        out: &mut DeltaGradient,
        grad_x: Option<&mut [f32]>,
    ) {
        let (width, inputs, rank) = (self.a.rows(), self.a.cols(), self.rank);
        let count = x.len() / inputs;
        if count == 0 {
            return;
        }
        let mut grad_down = vec![0.0; count * width];
        let mut col = 0;
        for (part, (b, out)) in self.b.iter().zip(&mut out.b).enumerate() {
            let outputs = b.rows();
            let (grad, down) = (&grad[col..], &down[part * rank..]);
            let grad_down = &mut grad_down[part * rank..];
            let lhs = Lhs::rows(grad, stride);
            kernel.gemm((count, outputs, rank), lhs, Rhs::transposed(b), grad_down, width);
            let rhs = Rhs::Rows { data: down, stride: width };
            let lhs = Lhs::columns(grad, stride);
            kernel.gemm_accumulate((outputs, count, rank), lhs, rhs, out, rank);
            col += outputs;
        }
        row_ops::scale(kernel.isa(), &mut grad_down, self.scale);
        self.backward_a(kernel, x, &grad_down, out, grad_x);
    }

    /// The A side of the backward pass, from the scaled gradient by its result.
    pub(crate) fn backward_a(
        &self,
        kernel: &Kernel,
        x: &[f32],
        grad_down: &[f32],
        out: &mut DeltaGradient,
        grad_x: Option<&mut [f32]>,
    ) {
        let (width, inputs) = (self.a.rows(), self.a.cols());
        let count = x.len() / inputs;
        let rhs = Rhs::Rows { data: x, stride: inputs };
        let lhs = Lhs::columns(grad_down, width);
        kernel.gemm_accumulate((width, count, inputs), lhs, rhs, &mut out.a, inputs);
        if let Some(grad_x) = grad_x {
            let lhs = Lhs::rows(grad_down, width);
            let size = (count, width, inputs);
            kernel.gemm_accumulate(size, lhs, Rhs::transposed(&self.a), grad_x, inputs);
        }
    }

    /// The B of a delta with one part.
    pub(crate) fn only_b(&self) -> &Panels {
        &self.b[0]
    }

    pub(crate) fn scale(&self) -> f32 {
        self.scale
    }
}
