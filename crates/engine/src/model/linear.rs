//! [`Linear`]: a frozen product, with adapters on top.

use std::ops::Range;

use crate::kernel::{Kernel, Lhs, Panels, Rhs, row_ops};
use crate::lora::Delta;

/// One or several frozen products of the same input, stacked.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weights: Panels,
    pub(crate) bias: Option<Vec<f32>>,
}

/// Gradients of one [`Delta`], in its layout.
#[derive(Debug)]
pub(crate) struct DeltaGradient {
    /// Like the stacked A.
    pub(crate) a: Vec<f32>,
    /// Like each B.
    pub(crate) b: Vec<Vec<f32>>,
}

/// `out = W x`, and for the rows of each adapter its delta. `down` receives the scaled results of the A
/// side, one adapter's rows after the other's.
pub(crate) fn adapted(
    kernel: &Kernel,
    weights: &Panels,
    x: &[f32],
    deltas: &[(Range<usize>, &Delta)],
    down: &mut Vec<f32>,
    out: &mut [f32],
) {
    let (outputs, inputs) = (weights.rows(), weights.cols());
    let count = x.len() / inputs;
    let size = (count, inputs, outputs);
    let sides = (Lhs::rows(x, inputs), Rhs::packed(weights));
    let widths = deltas.iter().map(|(rows, delta)| rows.len() * delta.width());
    down.resize(widths.sum(), 0.0);
    if let [(rows, delta)] = deltas
        && *rows == (0..count)
    {
        delta.project(kernel, x, down);
        kernel.gemm_fused(size, sides, &delta.terms(down), out, outputs);
    } else {
        kernel.gemm(size, sides.0, sides.1, out, outputs);
        apart(kernel, deltas, (x, inputs), down, (out, outputs));
    }
}

/// Deltas of several adapters, each on rows of its own: one task for each.
fn apart(
    kernel: &Kernel,
    deltas: &[(Range<usize>, &Delta)],
    (x, inputs): (&[f32], usize),
    mut down: &mut [f32],
    (mut out, outputs): (&mut [f32], usize),
) {
    let mut tasks = Vec::with_capacity(deltas.len());
    let (mut work, mut row) = (0, 0);
    for (rows, delta) in deltas {
        let x = &x[rows.start * inputs..rows.end * inputs];
        let (own, rest) = down.split_at_mut(rows.len() * delta.width());
        down = rest;
        let (own_out, rest) =
            out[(rows.start - row) * outputs..].split_at_mut(rows.len() * outputs);
        (out, row) = (rest, rows.end);
        work += own.len() * inputs + rows.len() * outputs * delta.width();
        tasks.push((*delta, x, own, own_out));
    }
    let each = work / tasks.len().max(1);
    // With several tasks each has a thread; a single one has all of them.
    let inner = if tasks.len() > 1 { kernel.alone() } else { kernel.clone() };
    kernel.pool().each_row(&mut tasks, 1, each, |_, task| {
        let (delta, x, down, out) = &mut task[0];
        delta.project(&inner, x, down);
        delta.add(&inner, down, out, outputs);
    });
}

impl Linear {
    /// `W x + b` and deltas: see [`adapted`].
    pub(crate) fn forward<'a>(
        &self,
        kernel: &Kernel,
        x: &[f32],
        deltas: impl Iterator<Item = (Range<usize>, Option<&'a Delta>)>,
        down: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        let (outputs, inputs) = (self.weights.rows(), self.weights.cols());
        out.resize(x.len() / inputs * outputs, 0.0);
        let deltas: Vec<(Range<usize>, &Delta)> =
            deltas.filter_map(|(rows, delta)| Some((rows, delta?))).collect();
        adapted(kernel, &self.weights, x, &deltas, down, out);
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(outputs) {
                row_ops::add(kernel.isa(), row, bias);
            }
        }
    }

    /// The gradient by `x`, added to `grad_x`; `None` leaves it out, for a first layer whose input
    /// nobody trains. `down` is what `forward` left there.
    pub(crate) fn backward(
        &self,
        kernel: &Kernel,
        x: &[f32],
        delta: Option<(&Delta, &mut DeltaGradient)>,
        down: &[f32],
        grad: &[f32],
        mut grad_x: Option<&mut [f32]>,
    ) {
        let (outputs, inputs) = (self.weights.rows(), self.weights.cols());
        let count = x.len() / inputs;
        if let Some(grad_x) = grad_x.as_deref_mut() {
            let size = (count, outputs, inputs);
            let lhs = Lhs::rows(grad, outputs);
            kernel.gemm_accumulate(size, lhs, Rhs::transposed(&self.weights), grad_x, inputs);
        }
        if let Some((delta, delta_grad)) = delta {
            delta.backward(kernel, x, down, grad, outputs, delta_grad, grad_x);
        }
    }
}
