//! Matrix products (GEMM) of f32 activations with packed or row-major operands.
//!
//! Computes `out[m × n] = lhs[m × k] · rhs[k × n]`, row-major, with f32 accumulation. Every output
//! element is one chain of fused multiply-adds over `k` in ascending order, however the product is
//! divided into blocks, tiles and tasks. This file checks the operands and divides the product into
//! tasks; [`block`] computes one of them.

use std::ops::Range;

use self::block::{CheckedGemm, chunk_range};
use super::task_pool::SharedMut;
use super::{Kernel, PANEL, Panels};

mod block;

/// Maximum number of left-hand rows per task. Their part of the left operand stays in the
/// second-level cache while the task reads one panel after the other.
const BLOCK_ROWS: usize = 192;
/// Maximum number of left-hand rows per task if the panels must be transposed first. More rows
/// amortize the cost of transposing.
const BLOCK_ROWS_TRANSPOSED: usize = 768;

/// The left operand of a product: element `(i, k)` is at offset `i · row + k · step`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lhs<'a> {
    data: &'a [f32],
    row: usize,
    step: usize,
}

impl<'a> Lhs<'a> {
    /// A row-major matrix whose rows start `stride` elements apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, row: stride, step: 1 }
    }

    /// The transpose of a row-major matrix whose rows start `stride` elements apart.
    pub(crate) fn columns(data: &'a [f32], stride: usize) -> Self {
        Self { data, row: 1, step: stride }
    }
}

/// The right operand of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rhs<'a> {
    /// Packed weights `W` as `Wᵀ`: the columns of the product are the outputs from index `from` (a
    /// multiple of 16), and the reduction runs over the inputs.
    Packed { weights: &'a Panels, from: usize },
    /// Packed weights `W` as `W`: the columns of the product are the inputs, and the reduction runs
    /// over the outputs from index `from` (a multiple of 16).
    Transposed { weights: &'a Panels, from: usize },
    /// A row-major `k × n` matrix whose rows start `stride` elements apart.
    Rows { data: &'a [f32], stride: usize },
}

impl<'a> Rhs<'a> {
    /// All of `weights` as `Wᵀ`.
    pub(crate) fn packed(weights: &'a Panels) -> Self {
        Self::Packed { weights, from: 0 }
    }

    /// All of `weights` as `W`.
    pub(crate) fn transposed(weights: &'a Panels) -> Self {
        Self::Transposed { weights, from: 0 }
    }
}

/// A product that is accumulated into some columns of another product's output while that output is
/// still in the cache.
#[derive(Clone, Debug)]
pub(crate) struct FusedGemm<'a> {
    pub(crate) lhs: Lhs<'a>,
    pub(crate) rhs: Rhs<'a>,
    pub(crate) depth: usize,
    /// Columns of the output that the product is added to.
    pub(crate) cols: Range<usize>,
}

/// Shape of a product: `rows × depth` times `depth × cols`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmShape {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) cols: usize,
}

impl Kernel {
    /// Computes `out = lhs · rhs`. The rows of `out` start `stride` elements apart.
    ///
    /// # Panics
    /// If an operand or `out` is too short for the shape `(rows, depth, cols)`.
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

    /// Computes `out = lhs · rhs` and accumulates the `fused` products into it.
    ///
    /// The result has the bits of [`gemm`](Self::gemm) followed by
    /// [`gemm_accumulate`](Self::gemm_accumulate) for each of `fused`.
    ///
    /// # Panics
    /// As [`gemm`](Self::gemm), for every product.
    pub(crate) fn gemm_fused(
        &self,
        (rows, depth, cols): (usize, usize, usize),
        (lhs, rhs): (Lhs<'_>, Rhs<'_>),
        fused: &[FusedGemm<'_>],
        out: &mut [f32],
        stride: usize,
    ) {
        let is_aligned = |fused: &&FusedGemm<'_>| fused.cols.start.is_multiple_of(PANEL);
        let aligned: Vec<FusedGemm<'_>> = fused.iter().filter(is_aligned).cloned().collect();
        self.multiply(GemmShape { rows, depth, cols }, (lhs, rhs), &aligned, out, stride, true);
        for other in fused.iter().filter(|fused| !is_aligned(fused)) {
            let size = (rows, other.depth, other.cols.len());
            self.gemm_accumulate(size, other.lhs, other.rhs, &mut out[other.cols.start..], stride);
        }
    }

    /// Computes `out += lhs · rhs`, continuing the accumulation from the current values of `out`.
    ///
    /// # Panics
    /// As [`gemm`](Self::gemm).
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

    /// Checks the operands, divides the product into blocks and computes them in parallel. If
    /// `zero_init` is false, the product is added to the current values of `out`.
    fn multiply(
        &self,
        size: GemmShape,
        (lhs, rhs): (Lhs<'_>, Rhs<'_>),
        fused: &[FusedGemm<'_>],
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
            for other in fused {
                let (size, first) = ((rows, other.depth, other.cols.len()), other.cols.start);
                self.gemm_accumulate(size, other.lhs, other.rhs, &mut out[first..], stride);
            }
            return;
        }
        let isa = self.isa;
        let len = out.len();
        let mut work = depth * cols;
        let out = SharedMut::new(out);
        let mut epilogue = Vec::with_capacity(fused.len());
        for other in fused.iter().filter(|fused| fused.depth > 0 && !fused.cols.is_empty()) {
            let &FusedGemm { lhs, rhs, depth, ref cols } = other;
            assert!(
                cols.start % PANEL == 0 && cols.end <= size.cols,
                "fused columns {cols:?} outside {size:?}"
            );
            let size = GemmShape { rows, depth, cols: cols.len() };
            check(size, lhs, rhs, len - cols.start, stride);
            let col = cols.start;
            epilogue.push(CheckedGemm {
                isa,
                size,
                lhs,
                rhs,
                out,
                col,
                stride,
                zero_init: false,
                epilogue: &[],
            });
            work += depth * cols.len();
        }
        let max_rows = match rhs {
            Rhs::Transposed { .. } => BLOCK_ROWS_TRANSPOSED,
            _ => BLOCK_ROWS,
        };
        let blocks = rows.div_ceil(max_rows);
        let panels = cols.div_ceil(PANEL);
        // About four tasks per thread balance the load. Their number of panels is a multiple of
        // four, the largest number of panels in a tile.
        let wanted = (self.pool.threads() * 4).div_ceil(blocks);
        let per_task = panels.div_ceil(wanted).next_multiple_of(4);
        let tasks = panels.div_ceil(per_task);
        let product = CheckedGemm {
            isa,
            size,
            lhs,
            rhs,
            out,
            col: 0,
            stride,
            zero_init,
            epilogue: &epilogue,
        };
        self.pool.for_each_if_large(rows * work, blocks * tasks, |task| {
            let (block, task) = (task / tasks, task % tasks);
            let rows = chunk_range(rows, blocks, block);
            let panels = task * per_task..panels.min((task + 1) * per_task);
            product.compute_block(rows, panels);
        });
    }
}

/// Panics unless every address that a product reads or writes lies inside its slices. The
/// micro-kernels rely on this and check nothing. `out_len` is the length of the output slice.
fn check(size: GemmShape, lhs: Lhs<'_>, rhs: Rhs<'_>, out_len: usize, stride: usize) {
    let GemmShape { rows, depth, cols } = size;
    assert!(
        stride >= cols && fits(out_len, (rows, stride), (cols, 1)),
        "the output is too short for {size:?}"
    );
    if depth == 0 {
        return;
    }
    assert!(
        fits(lhs.data.len(), (rows, lhs.row), (depth, lhs.step)),
        "the left operand is too short for {size:?}"
    );
    match rhs {
        Rhs::Packed { weights, from } => {
            assert!(
                from % PANEL == 0 && from <= weights.rows() && cols <= weights.rows() - from,
                "the packed weights have too few outputs for {size:?} from {from}"
            );
            assert_eq!(depth, weights.cols(), "inputs of the packed weights");
        }
        Rhs::Transposed { weights, from } => {
            assert!(
                from % PANEL == 0 && from <= weights.rows() && depth <= weights.rows() - from,
                "the packed weights have too few outputs for {size:?} from {from}"
            );
            assert_eq!(cols, weights.cols(), "inputs of the packed weights");
        }
        Rhs::Rows { data, stride } => {
            assert!(
                stride >= cols && fits(data.len(), (depth, stride), (cols, 1)),
                "the right operand is too short for {size:?}"
            );
        }
    }
}

/// Returns whether a slice of `len` elements holds a matrix, given the count and the stride of its
/// rows and of its columns. The counts must not be 0. An overflowing offset does not fit.
pub(in crate::kernel) fn fits(
    len: usize,
    (rows, row_stride): (usize, usize),
    (cols, col_stride): (usize, usize),
) -> bool {
    let last_row = (rows - 1).checked_mul(row_stride);
    let last_col = (cols - 1).checked_mul(col_stride);
    let last = last_row.zip(last_col).and_then(|(row, col)| row.checked_add(col));
    last.is_some_and(|last| last < len)
}

#[cfg(test)]
mod tests;
