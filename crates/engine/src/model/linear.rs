//! [`Linear`]: a frozen linear layer with optional LoRA deltas.

use std::ops::Range;

use crate::kernel::{ActivationBuffer, Kernel, Lhs, Panels, Rhs, row_ops};
use crate::lora::Delta;

/// One or several frozen linear layers with the same input, stacked into one matrix.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weights: Panels,
    pub(crate) bias: Option<Vec<f32>>,
}

/// Gradients of one [`Delta`], row-major.
#[derive(Clone, Debug)]
pub(crate) struct DeltaGradient {
    /// Gradient of the stacked A matrices, `(rank · parts) × inputs`.
    pub(crate) a: Vec<f32>,
    /// Gradient of the B matrix of each part, `outputs × rank`.
    pub(crate) b: Vec<Vec<f32>>,
}

/// Computes `out = x Wᵀ` and adds each adapter's delta to its range of rows.
///
/// `hidden` receives the LoRA hidden activations: the rows of the first adapter, then the rows of
/// the second adapter, and so on. The ranges of rows must be ascending and disjoint.
pub(crate) fn linear_with_lora(
    kernel: &Kernel,
    weights: &Panels,
    x: &[f32],
    deltas: &[(Range<usize>, &Delta)],
    hidden: &mut ActivationBuffer,
    out: &mut ActivationBuffer,
) {
    let outputs = weights.rows();
    let inputs = weights.cols();
    let count = x.len() / inputs;
    let size = (count, inputs, outputs);
    let operands = (Lhs::rows(x, inputs), Rhs::packed(weights));
    if let [(rows, delta)] = deltas
        && *rows == (0..count)
    {
        delta.project_into(kernel, x, hidden);
        kernel.gemm_into(size, operands, &delta.terms(hidden), out);
    } else {
        let widths = deltas.iter().map(|(rows, delta)| rows.len() * delta.width());
        // Few rows have several adapters: only sampling mixes them.
        hidden.resize_zeroed(widths.sum());
        kernel.gemm_into(size, operands, &[], out);
        add_deltas(kernel, deltas, (x, inputs), hidden, (out, outputs));
    }
}

/// Adds the deltas of several adapters, each to its own rows, with one task per adapter.
fn add_deltas(
    kernel: &Kernel,
    deltas: &[(Range<usize>, &Delta)],
    (x, inputs): (&[f32], usize),
    mut hidden: &mut [f32],
    (mut out, outputs): (&mut [f32], usize),
) {
    let mut tasks = Vec::with_capacity(deltas.len());
    let mut work = 0;
    // First row of `out`.
    let mut first_row = 0;
    for (rows, delta) in deltas {
        let x = &x[rows.start * inputs..rows.end * inputs];
        let (own, rest) = hidden.split_at_mut(rows.len() * delta.width());
        hidden = rest;
        let (own_out, rest) =
            out[(rows.start - first_row) * outputs..].split_at_mut(rows.len() * outputs);
        out = rest;
        first_row = rows.end;
        work += own.len() * inputs + rows.len() * outputs * delta.width();
        tasks.push((*delta, x, own, own_out));
    }
    let each = work / tasks.len().max(1);
    // Several tasks run on one thread each; a single task uses all threads.
    let inner = if tasks.len() > 1 { kernel.single_threaded() } else { kernel.clone() };
    kernel.pool().for_each_row(&mut tasks, 1, each, |_, task| {
        let (delta, x, hidden, out) = &mut task[0];
        delta.project(&inner, x, hidden);
        delta.add(&inner, hidden, out, outputs);
    });
}

impl Linear {
    /// Computes `out = x Wᵀ + b` plus the deltas; see [`linear_with_lora`].
    pub(crate) fn forward<'a>(
        &self,
        kernel: &Kernel,
        x: &[f32],
        deltas: impl Iterator<Item = (Range<usize>, Option<&'a Delta>)>,
        hidden: &mut ActivationBuffer,
        out: &mut ActivationBuffer,
    ) {
        let deltas: Vec<(Range<usize>, &Delta)> =
            deltas.filter_map(|(rows, delta)| Some((rows, delta?))).collect();
        linear_with_lora(kernel, &self.weights, x, &deltas, hidden, out);
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.weights.rows()) {
                row_ops::add(kernel.isa(), row, bias);
            }
        }
    }

    /// Writes the gradient with respect to `x` to `grad_x`, and adds the gradient with respect to
    /// the delta's weights to the [`DeltaGradient`].
    ///
    /// `grad` is the gradient with respect to the output, `hidden` the value that
    /// [`forward`](Self::forward) wrote. `grad_x` is `None` for the first layer, whose input needs
    /// no gradient.
    pub(crate) fn backward(
        &self,
        kernel: &Kernel,
        x: &[f32],
        delta: Option<(&Delta, &mut DeltaGradient)>,
        hidden: &[f32],
        grad: &[f32],
        mut grad_x: Option<&mut ActivationBuffer>,
    ) {
        let outputs = self.weights.rows();
        let inputs = self.weights.cols();
        let count = x.len() / inputs;
        if let Some(grad_x) = grad_x.as_deref_mut() {
            let size = (count, outputs, inputs);
            let lhs = Lhs::rows(grad, outputs);
            kernel.gemm_into(size, (lhs, Rhs::transposed(&self.weights)), &[], grad_x);
        }
        if let Some((delta, delta_grad)) = delta {
            let grad_x = grad_x.map(|grad_x| &mut grad_x[..]);
            delta.backward(kernel, x, hidden, grad, outputs, delta_grad, grad_x);
        }
    }
}
