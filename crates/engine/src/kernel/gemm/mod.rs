//! Matrix products: what they are made of, and who computes which block.

use std::ops::Range;

use self::block::{CheckedGemm, chunk_range};
use super::task_pool::SharedMut;
use super::{Kernel, PANEL, Panels};

mod block;

/// Rows whose part of the left side stays in the second-level cache while panels pass by.
const BLOCK_ROWS: usize = 192;
/// The same where panels have to be turned first, which pays only over more rows.
const BLOCK_ROWS_TRANSPOSED: usize = 768;

/// The left side of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lhs<'a> {
    data: &'a [f32],
    row: usize,
    step: usize,
}

impl<'a> Lhs<'a> {
    /// Rows that begin `stride` apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, row: stride, step: 1 }
    }

    /// The columns of a matrix whose rows begin `stride` apart.
    pub(crate) fn columns(data: &'a [f32], stride: usize) -> Self {
        Self { data, row: 1, step: stride }
    }
}

/// The right side of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rhs<'a> {
    /// Packed weights: outputs `from` and on (a multiple of 16), summed over the inputs.
    Packed { weights: &'a Panels, from: usize },
    /// The same matrix turned: inputs, summed over the outputs `from` and on (a multiple of 16).
    Transposed { weights: &'a Panels, from: usize },
    /// Rows of outputs, `stride` apart, summed over the rows.
    Rows { data: &'a [f32], stride: usize },
}

impl<'a> Rhs<'a> {
    pub(crate) fn packed(weights: &'a Panels) -> Self {
        Self::Packed { weights, from: 0 }
    }

    pub(crate) fn transposed(weights: &'a Panels) -> Self {
        Self::Transposed { weights, from: 0 }
    }
}

/// A product that goes on the chains of another one, in some of its columns.
#[derive(Clone, Debug)]
pub(crate) struct FusedGemm<'a> {
    pub(crate) lhs: Lhs<'a>,
    pub(crate) rhs: Rhs<'a>,
    pub(crate) depth: usize,
    pub(crate) cols: Range<usize>,
}

/// Sizes of a product: `rows × depth` times `depth × cols`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmShape {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) cols: usize,
}

impl Kernel {
    /// `out = lhs · rhs`, rows of `out` being `stride` apart.
    pub(crate) fn gemm(
        &self,
        (rows, depth, cols): (usize, usize, usize),
        lhs: Lhs<'_>,
        rhs: Rhs<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        self.multiply(GemmShape { rows, depth, cols }, (lhs, rhs), &[], out, stride, true);
    }

    /// [`gemm`](Self::gemm), then `more` of them on top, as [`gemm_accumulate`](Self::gemm_accumulate)
    /// would; but the sums are still at hand.
    pub(crate) fn gemm_fused(
        &self,
        (rows, depth, cols): (usize, usize, usize),
        (lhs, rhs): (Lhs<'_>, Rhs<'_>),
        more: &[FusedGemm<'_>],
        out: &mut [f32],
        stride: usize,
    ) {
        let aligned = |more: &&FusedGemm<'_>| more.cols.start.is_multiple_of(PANEL);
        let fused: Vec<FusedGemm<'_>> = more.iter().filter(aligned).cloned().collect();
        self.multiply(GemmShape { rows, depth, cols }, (lhs, rhs), &fused, out, stride, true);
        for more in more.iter().filter(|more| !aligned(more)) {
            let size = (rows, more.depth, more.cols.len());
            self.gemm_accumulate(size, more.lhs, more.rhs, &mut out[more.cols.start..], stride);
        }
    }

    /// `out += lhs · rhs`: the chains go on from what is there.
    pub(crate) fn gemm_accumulate(
        &self,
        (rows, depth, cols): (usize, usize, usize),
        lhs: Lhs<'_>,
        rhs: Rhs<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        self.multiply(GemmShape { rows, depth, cols }, (lhs, rhs), &[], out, stride, false);
    }

    fn multiply(
        &self,
        size: GemmShape,
        (lhs, rhs): (Lhs<'_>, Rhs<'_>),
        more: &[FusedGemm<'_>],
        out: &mut [f32],
        stride: usize,
        zero_init: bool,
    ) {
        let GemmShape { rows, depth, cols } = size;
        if rows == 0 || cols == 0 {
            return;
        }
        check(size, lhs, rhs, out.len(), stride);
        if depth == 0 {
            if zero_init {
                out.chunks_mut(stride).take(rows).for_each(|row| row[..cols].fill(0.0));
            }
            for more in more {
                let size = (rows, more.depth, more.cols.len());
                self.gemm_accumulate(size, more.lhs, more.rhs, &mut out[more.cols.start..], stride);
            }
            return;
        }
        let isa = self.isa;
        let len = out.len();
        let mut work = depth * cols;
        let out = SharedMut::new(out);
        let mut after = Vec::with_capacity(more.len());
        for more in more.iter().filter(|more| more.depth > 0 && !more.cols.is_empty()) {
            let &FusedGemm { lhs, rhs, depth, ref cols } = more;
            assert!(cols.start % PANEL == 0 && cols.end <= size.cols, "columns: {cols:?}");
            let size = GemmShape { rows, depth, cols: cols.len() };
            check(size, lhs, rhs, len - cols.start, stride);
            let col = cols.start;
            after.push(CheckedGemm {
                isa,
                size,
                lhs,
                rhs,
                out,
                col,
                stride,
                zero_init: false,
                after: &[],
            });
            work += depth * cols.len();
        }
        let most = match rhs {
            Rhs::Transposed { .. } => BLOCK_ROWS_TRANSPOSED,
            _ => BLOCK_ROWS,
        };
        let blocks = rows.div_ceil(most);
        let panels = cols.div_ceil(PANEL);
        // Enough tasks for every thread to have several, of four panels at least.
        let wanted = (self.pool.threads() * 4).div_ceil(blocks);
        let per_task = panels.div_ceil(wanted).next_multiple_of(4);
        let tasks = panels.div_ceil(per_task);
        let job =
            CheckedGemm { isa, size, lhs, rhs, out, col: 0, stride, zero_init, after: &after };
        self.pool.each_if_worth(rows * work, blocks * tasks, |task| {
            let (block, task) = (task / tasks, task % tasks);
            let rows = chunk_range(rows, blocks, block);
            let panels = task * per_task..panels.min((task + 1) * per_task);
            job.block(rows, panels);
        });
    }
}

/// Every address that a product touches lies inside its slices.
fn check(size: GemmShape, lhs: Lhs<'_>, rhs: Rhs<'_>, out: usize, stride: usize) {
    let GemmShape { rows, depth, cols } = size;
    assert!(stride >= cols && out >= (rows - 1) * stride + cols, "out is too short: {size:?}");
    if depth == 0 {
        return;
    }
    let last = (rows - 1) * lhs.row + (depth - 1) * lhs.step;
    assert!(last < lhs.data.len(), "the left side is too short: {size:?}");
    match rhs {
        Rhs::Packed { weights, from } => {
            assert!(from % PANEL == 0 && from + cols <= weights.rows(), "outputs: {size:?}");
            assert_eq!(depth, weights.cols(), "inputs");
        }
        Rhs::Transposed { weights, from } => {
            assert!(from % PANEL == 0 && from + depth <= weights.rows(), "outputs: {size:?}");
            assert_eq!(cols, weights.cols(), "inputs");
        }
        Rhs::Rows { data, stride } => {
            assert!(stride >= cols && data.len() >= (depth - 1) * stride + cols, "right: {size:?}");
        }
    }
}

#[cfg(test)]
mod tests;
