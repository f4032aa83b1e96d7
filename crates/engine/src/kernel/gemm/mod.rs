//! Matrix products (GEMM) of f32 activations with packed or row-major operands.
//!
//! Computes `out[m × n] = lhs[m × k] · rhs[k × n]`, row-major, with f32 accumulation. Every output
//! element is one chain of fused multiply-adds over `k` in ascending order, however the product is
//! divided into blocks, tiles and tasks. This file checks the operands, [`grid`] divides the
//! product into blocks with one task each, [`block`] computes a block tile by tile, and
//! [`operands`] copies operands to the layout of the micro-kernel where necessary.

use std::ops::Range;

use self::block::CheckedGemm;
use self::grid::BlockGrid;
use super::task_pool::SharedMut;
use super::{ActivationBuffer, Kernel, PANEL, Panels};

mod block;
mod grid;
mod operands;

/// The left operand of a product: element `(i, k)` is at offset `i · row_stride + k · step_stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lhs<'a> {
    data: &'a [f32],
    row_stride: usize,
    step_stride: usize,
}

impl<'a> Lhs<'a> {
    /// A row-major matrix whose rows start `stride` elements apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, row_stride: stride, step_stride: 1 }
    }

    /// The transpose of a row-major matrix whose rows start `stride` elements apart.
    pub(crate) fn columns(data: &'a [f32], stride: usize) -> Self {
        Self { data, row_stride: 1, step_stride: stride }
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

impl From<(usize, usize, usize)> for GemmShape {
    /// Converts `(rows, depth, cols)`.
    fn from((rows, depth, cols): (usize, usize, usize)) -> Self {
        Self { rows, depth, cols }
    }
}

/// Initial value of the accumulators of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InitialSum {
    /// Zero: the product replaces the output.
    Zero,
    /// The current values of the output, to which the product is added.
    Output,
}

/// Output of a product, row-major.
struct GemmOutput<'a> {
    data: &'a mut [f32],
    /// Distance between rows in elements.
    stride: usize,
    initial: InitialSum,
}

impl Kernel {
    /// Computes `out = lhs · rhs`. The rows of `out` start `stride` elements apart.
    ///
    /// # Panics
    /// If an operand or `out` is too short for `size`, which is `(rows, depth, cols)`.
    pub(crate) fn gemm(
        &self,
        size: (usize, usize, usize),
        lhs: Lhs<'_>,
        rhs: Rhs<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        self.gemm_fused(size, (lhs, rhs), &[], out, stride);
    }

    /// Computes `out = lhs · rhs` and accumulates the `fused` products into it.
    ///
    /// The result has the bits of [`gemm`](Self::gemm) followed by
    /// [`gemm_accumulate`](Self::gemm_accumulate) for each of `fused`, whose columns must not
    /// overlap.
    ///
    /// # Panics
    /// As [`gemm`](Self::gemm), for every product.
    pub(crate) fn gemm_fused(
        &self,
        size: (usize, usize, usize),
        operands: (Lhs<'_>, Rhs<'_>),
        fused: &[FusedGemm<'_>],
        out: &mut [f32],
        stride: usize,
    ) {
        let size = GemmShape::from(size);
        // Blocks consist of whole panels, so only products that start with a panel can be fused.
        let is_aligned = |fused: &&FusedGemm<'_>| fused.cols.start.is_multiple_of(PANEL);
        let aligned: Vec<FusedGemm<'_>> = fused.iter().filter(is_aligned).cloned().collect();
        let output = GemmOutput { data: &mut *out, stride, initial: InitialSum::Zero };
        self.multiply(size, operands, &aligned, output);
        for unaligned in fused.iter().filter(|fused| !is_aligned(fused)) {
            self.accumulate_separately(size.rows, unaligned, out, stride);
        }
    }

    /// Computes `out = lhs · rhs` and accumulates the `fused` products into it. Replaces all values
    /// of `out`, whose rows are adjacent.
    ///
    /// # Panics
    /// As [`gemm_fused`](Self::gemm_fused).
    #[expect(unsafe_code, reason = "replaces the values of a buffer without clearing it first")]
    pub(crate) fn gemm_into(
        &self,
        size: (usize, usize, usize),
        operands: (Lhs<'_>, Rhs<'_>),
        fused: &[FusedGemm<'_>],
        out: &mut ActivationBuffer,
    ) {
        let GemmShape { rows, cols, .. } = GemmShape::from(size);
        let write = |out: &mut [f32]| self.gemm_fused(size, operands, fused, out, cols);
        // SAFETY: the blocks of the product cover all rows and columns of the output. The first
        // reduction steps of a block start from zero and write every element; later steps and the
        // fused products read elements that these steps wrote. A product of depth 0 fills the output
        // with zeros before anything is added.
        unsafe { out.overwrite(rows * cols, write) }
    }

    /// Computes `out += lhs · rhs`, continuing the accumulation from the current values of `out`.
    ///
    /// # Panics
    /// As [`gemm`](Self::gemm).
    pub(crate) fn gemm_accumulate(
        &self,
        size: (usize, usize, usize),
        lhs: Lhs<'_>,
        rhs: Rhs<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        let output = GemmOutput { data: out, stride, initial: InitialSum::Output };
        self.multiply(size.into(), (lhs, rhs), &[], output);
    }

    /// Accumulates a product into its columns of `out` without fusing it.
    fn accumulate_separately(
        &self,
        rows: usize,
        product: &FusedGemm<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        let FusedGemm { lhs, rhs, depth, cols } = product;
        let size = (rows, *depth, cols.len());
        self.gemm_accumulate(size, *lhs, *rhs, &mut out[cols.start..], stride);
    }

    /// Checks the operands, divides the product into blocks and computes them in parallel. The
    /// columns of the `fused` products must start with a panel.
    fn multiply(
        &self,
        size: GemmShape,
        (lhs, rhs): (Lhs<'_>, Rhs<'_>),
        fused: &[FusedGemm<'_>],
        GemmOutput { data: out, stride, initial }: GemmOutput<'_>,
    ) {
        let GemmShape { rows, depth, cols } = size;
        if rows == 0 || cols == 0 {
            return;
        }
        let out_len = out.len();
        check_bounds(size, lhs, rhs, out_len, stride);
        if depth == 0 {
            if initial == InitialSum::Zero {
                out.chunks_mut(stride).take(rows).for_each(|row| row[..cols].fill(0.0));
            }
            for other in fused {
                self.accumulate_separately(rows, other, out, stride);
            }
            return;
        }
        let product = CheckedGemm {
            isa: self.isa,
            size,
            lhs,
            rhs,
            out: SharedMut::new(out),
            first_col: 0,
            out_stride: stride,
            initial,
            epilogue: &[],
        };
        let is_empty = |fused: &FusedGemm<'_>| fused.depth == 0 || fused.cols.is_empty();
        let mut epilogue = Vec::with_capacity(fused.len());
        for other in fused.iter().filter(|fused| !is_empty(fused)) {
            let FusedGemm { lhs, rhs, depth, cols } = other.clone();
            assert!(
                cols.start % PANEL == 0 && cols.end <= size.cols,
                "fused columns {cols:?} outside {size:?}"
            );
            let size = GemmShape { rows, depth, cols: cols.len() };
            check_bounds(size, lhs, rhs, out_len - cols.start, stride);
            let first_col = cols.start;
            let initial = InitialSum::Output;
            epilogue.push(CheckedGemm { size, lhs, rhs, first_col, initial, ..product });
        }
        // Multiply-adds per row.
        let work: usize =
            epilogue.iter().chain([&product]).map(|one| one.size.depth * one.size.cols).sum();
        let product = CheckedGemm { epilogue: &epilogue, ..product };
        let blocks = BlockGrid::new(size, rhs, self.pool.threads());
        self.pool.for_each_if_large(rows * work, blocks.count(), |index| {
            let (rows, panels) = blocks.block(index);
            product.compute_block(rows, panels);
        });
    }
}

/// Panics unless every address that a product reads or writes lies inside its slices. The
/// micro-kernels rely on this and check nothing. `out_len` is the length of the output slice.
fn check_bounds(size: GemmShape, lhs: Lhs<'_>, rhs: Rhs<'_>, out_len: usize, stride: usize) {
    let GemmShape { rows, depth, cols } = size;
    assert!(
        stride >= cols && fits(out_len, (rows, stride), (cols, 1)),
        "the output is too short for {size:?}"
    );
    if depth == 0 {
        return;
    }
    assert!(
        fits(lhs.data.len(), (rows, lhs.row_stride), (depth, lhs.step_stride)),
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
mod quantized_tests;
#[cfg(test)]
mod tests;
