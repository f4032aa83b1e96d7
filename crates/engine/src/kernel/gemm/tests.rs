//! Matrix products compared with the definition: one chain of multiply-adds per element.

use super::super::{Isa, Precision};
use super::*;

/// Computes `start + a · b` with one chain of multiply-adds per element, in ascending `k`.
pub(super) fn reference(
    (rows, depth, cols): (usize, usize, usize),
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
    start: &[f32],
) -> Vec<f32> {
    let mut out = start.to_vec();
    for i in 0..rows {
        for j in 0..cols {
            for k in 0..depth {
                let sum = &mut out[i * cols + j];
                *sum = a(i, k).mul_add(b(k, j), *sum);
            }
        }
    }
    out
}

/// Returns pseudo-random values between -0.5 and 0.5.
pub(super) fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_769) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            f32::from_bits((state >> 9) | 0x3f80_0000) - 1.5
        })
        .collect()
}

const SIZES: &[(usize, usize, usize)] = &[
    (1, 1, 1),
    (1, 300, 67),
    (1, 64, 128),
    (2, 33, 50),
    (3, 257, 31),
    (4, 16, 16),
    (5, 7, 130),
    (6, 513, 17),
    (7, 40, 33),
    (8, 100, 80),
    (13, 31, 95),
    (29, 260, 49),
    (200, 19, 70),
    (390, 17, 18),
];

#[test]
fn every_instruction_set_gives_the_bits_of_one_chain_per_element() {
    for isa in Isa::available() {
        for threads in [1, 3] {
            let kernel = Kernel::with_isa(isa, threads);
            for &size in SIZES {
                let (rows, depth, cols) = size;
                let a = noise(rows * depth, 1);
                let w = noise(cols * depth, 2);
                let start = noise(rows * cols, 3);
                for precision in [Precision::F32, Precision::Bf16] {
                    let weights = Panels::from_rows(&w, cols, depth, precision);
                    let mut w = vec![0.0; cols * depth];
                    for (i, row) in w.chunks_exact_mut(depth).enumerate() {
                        weights.row(i, row);
                    }
                    let expected =
                        reference(size, |i, k| a[i * depth + k], |k, j| w[j * depth + k], &start);
                    let mut out = start.clone();
                    let rhs = Rhs::packed(&weights);
                    kernel.gemm_accumulate(size, Lhs::rows(&a, depth), rhs, &mut out, cols);
                    assert_eq!(out, expected, "{isa:?} {threads} {size:?} {precision:?}");

                    // The transposed weights: the reduction runs over the outputs.
                    let backward_size = (rows, cols, depth);
                    let a = noise(rows * cols, 4);
                    let zeros = vec![0.0; rows * depth];
                    let expected = reference(
                        backward_size,
                        |i, k| a[i * cols + k],
                        |k, j| w[k * depth + j],
                        &zeros,
                    );
                    let mut out = vec![9.0; rows * depth];
                    let rhs = Rhs::transposed(&weights);
                    kernel.gemm(backward_size, Lhs::rows(&a, cols), rhs, &mut out, depth);
                    assert_eq!(out, expected, "{isa:?} {threads} {backward_size:?} {precision:?}");
                }
                // A transposed left operand and a row-major right operand.
                let a = noise(rows * depth, 5);
                let b = noise(depth * cols, 6);
                let expected =
                    reference(size, |i, k| a[k * rows + i], |k, j| b[k * cols + j], &start);
                let mut out = start.clone();
                let rhs = Rhs::Rows { data: &b, stride: cols };
                kernel.gemm_accumulate(size, Lhs::columns(&a, rows), rhs, &mut out, cols);
                assert_eq!(out, expected, "{isa:?} {threads} {size:?} columns");
            }
        }
    }
}

#[test]
fn a_range_of_outputs_has_the_bits_of_the_whole_product() {
    let kernel = Kernel::new(2).unwrap();
    let rows = 5;
    let depth = 37;
    let cols = 100;
    let a = noise(rows * depth, 1);
    let weights = Panels::from_rows(&noise(cols * depth, 2), cols, depth, Precision::F32);
    let mut whole = vec![0.0; rows * cols];
    let lhs = Lhs::rows(&a, depth);
    kernel.gemm((rows, depth, cols), lhs, Rhs::packed(&weights), &mut whole, cols);
    let mut part = vec![0.0; rows * 52];
    let rhs = Rhs::Packed { weights: &weights, from: 48 };
    kernel.gemm((rows, depth, 52), lhs, rhs, &mut part, 52);
    for i in 0..rows {
        assert_eq!(part[i * 52..(i + 1) * 52], whole[i * cols + 48..(i + 1) * cols]);
    }
    // A reduction over the outputs in two parts, the second continuing the first.
    let b = noise(rows * cols, 3);
    let mut once = vec![0.0; rows * depth];
    let lhs = Lhs::rows(&b, cols);
    kernel.gemm((rows, cols, depth), lhs, Rhs::transposed(&weights), &mut once, depth);
    let mut twice = vec![0.0; rows * depth];
    kernel.gemm((rows, 48, depth), lhs, Rhs::transposed(&weights), &mut twice, depth);
    let rhs = Rhs::Transposed { weights: &weights, from: 48 };
    let lhs = Lhs::rows(&b[48..], cols);
    kernel.gemm_accumulate((rows, 52, depth), lhs, rhs, &mut twice, depth);
    assert_eq!(once, twice);
}

#[test]
fn an_empty_reduction_gives_zeros() {
    let kernel = Kernel::new(1).unwrap();
    let mut out = vec![7.0; 6];
    let rhs = Rhs::Rows { data: &[], stride: 3 };
    kernel.gemm((2, 0, 3), Lhs::rows(&[], 0), rhs, &mut out, 3);
    assert_eq!(out, [0.0; 6]);
    kernel.gemm((0, 4, 3), Lhs::rows(&[], 4), rhs, &mut [], 3);
}

#[test]
fn fused_products_have_the_bits_of_separate_accumulation() {
    for isa in Isa::available() {
        for threads in [1, 3] {
            let kernel = Kernel::with_isa(isa, threads);
            for (rows, depth, cols, split) in [
                (1, 40, 70, 16),
                (7, 300, 95, 64),
                (200, 65, 160, 48),
                (30, 70, 99, 37),
                (5, 0, 40, 16),
            ] {
                let x = noise(rows * depth, 1);
                let w = noise(cols * depth, 2);
                let weights = Panels::from_rows(&w, cols, depth, Precision::F32);
                let down = noise(rows * 10, 3);
                let parts = [0..split, split..cols];
                let b = parts.clone().map(|part| {
                    Panels::from_rows(&noise(part.len() * 5, 4), part.len(), 5, Precision::F32)
                });
                let fused: Vec<FusedGemm<'_>> = (0..2)
                    .map(|i| FusedGemm {
                        lhs: Lhs::rows(&down[i * 5..], 10),
                        rhs: Rhs::packed(&b[i]),
                        depth: 5,
                        cols: parts[i].clone(),
                    })
                    .collect();
                let size = (rows, depth, cols);
                let lhs = Lhs::rows(&x, depth);
                let rhs = Rhs::packed(&weights);
                let mut separate = vec![7.0; rows * cols];
                kernel.gemm(size, lhs, rhs, &mut separate, cols);
                for other in &fused {
                    let size = (rows, 5, other.cols.len());
                    let out = &mut separate[other.cols.start..];
                    kernel.gemm_accumulate(size, other.lhs, other.rhs, out, cols);
                }
                let mut together = vec![8.0; rows * cols];
                kernel.gemm_fused(size, (lhs, rhs), &fused, &mut together, cols);
                assert_eq!(together, separate, "{isa:?} {threads} {size:?} {split}");
            }
        }
    }
}

/// Calls `gemm` with a 3 × 20 left operand, 20 × 33 right operand and 3 × 33 output, shortened by
/// the given numbers of elements.
fn gemm_shortened(lhs: usize, rhs: usize, out: usize) {
    let a = vec![1.0; 3 * 20 - lhs];
    let b = vec![1.0; 20 * 33 - rhs];
    let mut c = vec![0.0; 3 * 33 - out];
    let rhs = Rhs::Rows { data: &b, stride: 33 };
    Kernel::portable().gemm((3, 20, 33), Lhs::rows(&a, 20), rhs, &mut c, 33);
}

#[test]
fn operands_of_the_exact_length_are_accepted() {
    gemm_shortened(0, 0, 0);
}

#[test]
#[should_panic(expected = "the left operand is too short")]
fn a_short_left_operand_is_refused() {
    gemm_shortened(1, 0, 0);
}

#[test]
#[should_panic(expected = "the right operand is too short")]
fn a_short_right_operand_is_refused() {
    gemm_shortened(0, 1, 0);
}

#[test]
#[should_panic(expected = "the output is too short")]
fn a_short_output_is_refused() {
    gemm_shortened(0, 0, 1);
}

#[test]
#[should_panic(expected = "the left operand is too short")]
fn an_overflowing_stride_is_refused() {
    let lhs = Lhs::rows(&[1.0; 4], usize::MAX / 2 + 2);
    let rhs = Rhs::Rows { data: &[1.0; 2], stride: 1 };
    Kernel::portable().gemm((3, 2, 1), lhs, rhs, &mut [0.0; 3], 1);
}

#[test]
#[should_panic(expected = "too few outputs")]
fn outputs_beyond_the_packed_weights_are_refused() {
    let weights = Panels::from_rows(&[1.0; 40], 20, 2, Precision::F32);
    let rhs = Rhs::Packed { weights: &weights, from: 16 };
    Kernel::portable().gemm((1, 2, 5), Lhs::rows(&[1.0; 2], 2), rhs, &mut [0.0; 5], 5);
}
