//! [`Linear`]: a frozen product, with adapters on top.

use std::ops::Range;

use crate::kernel::{Kernel, Lhs, Panels, Rhs, rows};
use crate::lora::Delta;

/// One or several frozen products of the same input, stacked.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weights: Panels,
    pub(crate) bias: Option<Vec<f32>>,
}

/// Gradients of one [`Delta`], in its layout.
#[derive(Debug)]
pub(crate) struct DeltaGrad {
    /// Like the stacked A.
    pub(crate) a: Vec<f32>,
    /// Like each B.
    pub(crate) b: Vec<Vec<f32>>,
}

impl Linear {
    /// `out = W x + b`, and for the rows of each adapter its delta. `down` receives the scaled
    /// results of the A side, one adapter's rows after the other's.
    pub(crate) fn forward<'a>(
        &self,
        kernel: &Kernel,
        x: &[f32],
        deltas: impl Iterator<Item = (Range<usize>, Option<&'a Delta>)>,
        down: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        let (outputs, inputs) = (self.weights.rows(), self.weights.cols());
        let count = x.len() / inputs;
        out.resize(count * outputs, 0.0);
        let size = (count, inputs, outputs);
        kernel.product(size, Lhs::rows(x, inputs), Rhs::packed(&self.weights), out, outputs);
        down.clear();
        for (rows, delta) in deltas {
            if let Some(delta) = delta {
                let x = &x[rows.start * inputs..rows.end * inputs];
                let out = &mut out[rows.start * outputs..rows.end * outputs];
                delta.forward(kernel, x, down, out, outputs);
            }
        }
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(outputs) {
                rows::add(kernel.isa(), row, bias);
            }
        }
    }

    /// The gradient by `x`, added to `grad_x`; `None` leaves it out, for a first layer whose input
    /// nobody trains. `down` is what `forward` left there.
    pub(crate) fn backward(
        &self,
        kernel: &Kernel,
        x: &[f32],
        delta: Option<(&Delta, &mut DeltaGrad)>,
        down: &[f32],
        grad: &[f32],
        mut grad_x: Option<&mut [f32]>,
    ) {
        let (outputs, inputs) = (self.weights.rows(), self.weights.cols());
        let count = x.len() / inputs;
        if let Some(grad_x) = grad_x.as_deref_mut() {
            let size = (count, outputs, inputs);
            let lhs = Lhs::rows(grad, outputs);
            kernel.add_product(size, lhs, Rhs::turned(&self.weights), grad_x, inputs);
        }
        if let Some((delta, delta_grad)) = delta {
            delta.backward(kernel, x, down, grad, outputs, delta_grad, grad_x);
        }
    }
}
