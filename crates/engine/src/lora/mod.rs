//! LoRA: small trained deltas beside frozen products.

use crate::kernel::{Kernel, Lhs, Panels, Pool, Precision, Rhs, rows};
use crate::model::DeltaGrad;

mod adapter;
mod folder;

pub use adapter::LoraConfig;
pub(crate) use adapter::{Adapter, Pair};

/// An adapter in the form that products read.
#[derive(Debug)]
pub(crate) struct Lora {
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
        let pool = Pool::alone();
        let a = Panels::pack(&pool, rank * parts.len(), inputs, Precision::F32, |i, out| {
            let (part, row) = (i / rank, i % rank);
            out.copy_from_slice(&parts[part].0[row * inputs..(row + 1) * inputs]);
        });
        let b = parts
            .iter()
            .map(|(_, b)| Panels::from_rows(b, b.len() / rank, rank, Precision::F32))
            .collect();
        Self { rank, scale, a, b }
    }

    pub(crate) fn grad(&self) -> DeltaGrad {
        DeltaGrad {
            a: vec![0.0; self.a.rows() * self.a.cols()],
            b: self.b.iter().map(|b| vec![0.0; b.rows() * b.cols()]).collect(),
        }
    }

    /// How wide the result of the A side is.
    pub(crate) fn width(&self) -> usize {
        self.a.rows()
    }

    /// The scaled A side of these rows, appended to `down`.
    pub(crate) fn project(&self, kernel: &Kernel, x: &[f32], down: &mut Vec<f32>) {
        let (width, inputs) = (self.a.rows(), self.a.cols());
        let count = x.len() / inputs;
        let start = down.len();
        down.resize(start + count * width, 0.0);
        let size = (count, inputs, width);
        let down = &mut down[start..];
        kernel.product(size, Lhs::rows(x, inputs), Rhs::packed(&self.a), down, width);
        rows::scale(kernel.isa(), down, self.scale);
    }

    /// Adds the B side of outputs `from` and on, `cols` of them, of a delta with one part.
    pub(crate) fn expand(
        &self,
        kernel: &Kernel,
        down: &[f32],
        from: usize,
        cols: usize,
        out: &mut [f32],
    ) {
        let rhs = Rhs::Packed { weights: &self.b[0], from };
        let size = (down.len() / self.rank, self.rank, cols);
        kernel.add_product(size, Lhs::rows(down, self.rank), rhs, out, cols);
    }

    /// Adds the delta to `out`, whose rows are `stride` wide.
    pub(crate) fn forward(
        &self,
        kernel: &Kernel,
        x: &[f32],
        down: &mut Vec<f32>,
        out: &mut [f32],
        stride: usize,
    ) {
        let start = down.len();
        self.project(kernel, x, down);
        let (width, rank) = (self.a.rows(), self.rank);
        let count = x.len() / self.a.cols();
        if count == 0 {
            return;
        }
        let mut col = 0;
        for (part, b) in self.b.iter().enumerate() {
            let lhs = Lhs::rows(&down[start + part * rank..], width);
            let size = (count, rank, b.rows());
            kernel.add_product(size, lhs, Rhs::packed(b), &mut out[col..], stride);
            col += b.rows();
        }
    }

    /// Backward of [`Delta::forward`]: adds to the gradients of A, B and, if given, of `x`.
    #[expect(clippy::too_many_arguments, reason = "what forward knew, and the gradients")]
    pub(crate) fn backward(
        &self,
        kernel: &Kernel,
        x: &[f32],
        down: &[f32],
        grad: &[f32],
        stride: usize,
        out: &mut DeltaGrad,
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
            kernel.product((count, outputs, rank), lhs, Rhs::turned(b), grad_down, width);
            let rhs = Rhs::Rows { data: down, stride: width };
            let lhs = Lhs::columns(grad, stride);
            kernel.add_product((outputs, count, rank), lhs, rhs, out, rank);
            col += outputs;
        }
        rows::scale(kernel.isa(), &mut grad_down, self.scale);
        self.backward_a(kernel, x, &grad_down, out, grad_x);
    }

    /// The A side of the backward pass, from the scaled gradient by its result.
    pub(crate) fn backward_a(
        &self,
        kernel: &Kernel,
        x: &[f32],
        grad_down: &[f32],
        out: &mut DeltaGrad,
        grad_x: Option<&mut [f32]>,
    ) {
        let (width, inputs) = (self.a.rows(), self.a.cols());
        let count = x.len() / inputs;
        let rhs = Rhs::Rows { data: x, stride: inputs };
        let lhs = Lhs::columns(grad_down, width);
        kernel.add_product((width, count, inputs), lhs, rhs, &mut out.a, inputs);
        if let Some(grad_x) = grad_x {
            let lhs = Lhs::rows(grad_down, width);
            let size = (count, width, inputs);
            kernel.add_product(size, lhs, Rhs::turned(&self.a), grad_x, inputs);
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
