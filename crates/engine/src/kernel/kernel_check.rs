//! Self-check of the vector instructions at start-up.
//!
//! Runs a few matrix products and row operations of odd sizes and compares their bits with the bits
//! of the portable code. If a CPU, an emulator or the compiler gets an operation wrong, the engine
//! falls back to slower instructions instead of computing wrong results.

use std::convert::Infallible;

use half::f16;

use super::{
    Isa, Kernel, Lhs, MatrixSource, Panels, Precision, ReadRows, Rhs, TaskPool, WeightFormat,
    row_ops,
};

/// Returns whether `isa` produces the same bits as the portable code.
pub(super) fn matches_portable(isa: Isa) -> bool {
    isa == Isa::PORTABLE || results(isa) == results(Isa::PORTABLE)
}

/// Returns the bits of matrix products of every kind of operand and of the row operations.
fn results(isa: Isa) -> Vec<u32> {
    let kernel = Kernel { isa, pool: TaskPool::single_threaded(), arena: None };
    let mut out = Vec::new();
    for (count, depth, cols) in [(1, 67, 83), (3, 19, 50), (13, 37, 70)] {
        let x = numbers(count * depth.max(cols), 1);
        let w = numbers(cols * depth, 2);
        for precision in [Precision::F32, Precision::Bf16] {
            let weights = Panels::from_rows(&w, cols, depth, precision);
            let mut y = vec![0.0; count * cols];
            let lhs = Lhs::rows(&x, depth);
            kernel.gemm((count, depth, cols), lhs, Rhs::packed(&weights), &mut y, cols);
            out.extend(y.iter().map(|y| y.to_bits()));
            let mut back = vec![0.0; count * depth];
            let lhs = Lhs::rows(&y, cols);
            kernel.gemm((count, cols, depth), lhs, Rhs::transposed(&weights), &mut back, depth);
            out.extend(back.iter().map(|y| y.to_bits()));
        }
        let mut y = vec![0.5; depth * cols];
        let rhs = Rhs::Rows { data: &x, stride: cols };
        kernel.gemm_accumulate((depth, count, cols), Lhs::columns(&x, depth), rhs, &mut y, cols);
        out.extend(y.iter().map(|y| y.to_bits()));
    }
    for format in [&[WeightFormat::F16], &WeightFormat::QUANTIZED[..]].concat() {
        out.extend(decoded_products(&kernel, format));
    }
    let x = numbers(103, 3);
    let gain = numbers(103, 4);
    let mut y = vec![0.0; 103];
    let inverse = row_ops::norm(isa, &x, &gain, 1e-6, &mut y);
    row_ops::norm_backward(isa, &x, &gain, inverse, &gain, &mut y);
    row_ops::swiglu(isa, &x, &gain, &mut y[..99]);
    let sum = row_ops::exp_and_sum(isa, &mut y, row_ops::max(isa, &x));
    out.extend([inverse, sum, row_ops::dot(isa, &x, &y)].map(f32::to_bits));
    out.extend(y.iter().map(|y| y.to_bits()));
    out
}

/// Returns the bits of products with weights that are decoded in registers or into a buffer.
fn decoded_products(kernel: &Kernel, format: WeightFormat) -> Vec<u32> {
    const DEPTH: usize = 256;
    let mut out = Vec::new();
    // One and several panels per tile, and a partial panel.
    for (count, cols) in [(1, 67), (3, 18), (8, 18), (13, 5)] {
        let weights = if format.is_quantized() {
            quantized(kernel, format, &block_rows(format, cols, DEPTH, 7), cols, DEPTH)
        } else {
            let w = numbers(cols * DEPTH, 8);
            let read = |first: usize, out: &mut [f32]| {
                out.copy_from_slice(&w[first * DEPTH..][..out.len()]);
                Ok::<_, Infallible>(())
            };
            let source = MatrixSource { rows: cols, format, read: ReadRows::Values(&read) };
            let Ok(weights) = Panels::stack(&Kernel::portable(), DEPTH, &[source]);
            weights
        };
        let x = numbers(count * DEPTH, 6);
        let mut y = vec![0.0; count * cols];
        let rhs = Rhs::packed(&weights);
        kernel.gemm((count, DEPTH, cols), Lhs::rows(&x, DEPTH), rhs, &mut y, cols);
        out.extend(y.iter().map(|y| y.to_bits()));
        if count == 3 {
            let mut back = vec![0.0; count * DEPTH];
            let rhs = Rhs::transposed(&weights);
            kernel.gemm((count, cols, DEPTH), Lhs::rows(&y, cols), rhs, &mut back, DEPTH);
            out.extend(back.iter().map(|y| y.to_bits()));
        }
    }
    out
}

/// Packs GGUF rows, stored one after the other.
pub(super) fn quantized(
    kernel: &Kernel,
    format: WeightFormat,
    blocks: &[u8],
    rows: usize,
    cols: usize,
) -> Panels {
    let row_bytes = format.row_bytes(cols);
    let read = |first: usize, out: &mut [u8]| {
        out.copy_from_slice(&blocks[first * row_bytes..][..out.len()]);
        Ok::<_, Infallible>(())
    };
    let source = MatrixSource { rows, format, read: ReadRows::Stored(&read) };
    let Ok(weights) = Panels::stack(kernel, cols, &[source]);
    weights
}

/// Returns pseudo-random GGUF rows whose scales are between -0.02 and 0.02.
pub(super) fn block_rows(format: WeightFormat, rows: usize, cols: usize, seed: u32) -> Vec<u8> {
    let bytes = rows * format.row_bytes(cols);
    let random = numbers(bytes, seed);
    let mut out: Vec<u8> = random.iter().map(|number| number.to_bits().to_le_bytes()[1]).collect();
    for (block, number) in out.chunks_exact_mut(format.row_bytes(format.block_inputs())).zip(random)
    {
        for scale in format.row_scales() {
            block[*scale..*scale + 2].copy_from_slice(&f16::from_f32(number * 0.02).to_le_bytes());
        }
    }
    out
}

/// Returns pseudo-random numbers between -1 and 1 that use all mantissa bits.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let number = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits((state >> 9) | 0x4000_0000) - 3.0
    };
    (0..len).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_level_passes_and_a_wrong_bit_fails() {
        for isa in Isa::available() {
            assert!(matches_portable(isa), "{isa:?}");
        }
        let mut all = results(Isa::PORTABLE);
        assert!(all.len() > 3000 && all.iter().any(|bits| *bits != 0));
        all[17] ^= 1;
        assert_ne!(all, results(Isa::PORTABLE));
    }
}
