//! Products with quantized weights compared with the definition on their decoded values.

use half::f16;

use super::super::kernel_check::{block_rows, quantized};
use super::super::{Isa, MatrixSource, PANEL, ReadRows, WeightFormat};
use super::tests::{noise, reference};
use super::*;
use crate::Error;

/// Decodes all rows.
fn decode(format: WeightFormat, blocks: &[u8], cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; blocks.len() / format.row_bytes(cols) * cols];
    format.block_format().unwrap().decode(blocks, &mut out);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Checks rows, products and transposed products of `weights` against the row-major matrix `w`.
fn check(kernel: &Kernel, weights: &Panels, w: &[f32], counts: &[usize], label: &str) {
    let cols = weights.rows();
    let depth = weights.cols();
    let mut row = vec![0.0; depth];
    for (i, want) in w.chunks_exact(depth).enumerate() {
        weights.row(i, &mut row);
        assert_eq!(bits(&row), bits(want), "{label}, row {i}");
    }
    for &count in counts {
        let size = (count, depth, cols);
        let a = noise(count * depth, 1);
        let start = noise(count * cols, 3);
        let expected = reference(size, |i, k| a[i * depth + k], |k, j| w[j * depth + k], &start);
        let mut out = start;
        let lhs = Lhs::rows(&a, depth);
        kernel.gemm_accumulate(size, lhs, Rhs::packed(weights), &mut out, cols);
        assert_eq!(bits(&out), bits(&expected), "{label} {size:?}");

        let size = (count, cols, depth);
        let a = noise(count * cols, 4);
        let zeros = vec![0.0; count * depth];
        let expected = reference(size, |i, k| a[i * cols + k], |k, j| w[k * depth + j], &zeros);
        let mut out = vec![9.0; count * depth];
        kernel.gemm(size, Lhs::rows(&a, cols), Rhs::transposed(weights), &mut out, depth);
        assert_eq!(bits(&out), bits(&expected), "{label} transposed {size:?}");
    }
}

#[test]
fn quantized_weights_give_the_bits_of_their_decoded_values() {
    for format in WeightFormat::QUANTIZED {
        for (rows, cols) in [(1, 256), (40, 512), (83, 768), (150, 256)] {
            let blocks = block_rows(format, rows, cols, 5);
            let decoded = decode(format, &blocks, cols);
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let counts: &[usize] = match (rows, isa == Isa::PORTABLE) {
                        (40, true) => &[1, 13],
                        (40, false) => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 200],
                        _ => &[1, 7],
                    };
                    let kernel = Kernel::with_isa(isa, threads);
                    let weights = quantized(&kernel, format, &blocks, rows, cols);
                    let label = format!("{format:?} {isa:?} {threads}");
                    check(&kernel, &weights, &decoded, counts, &label);
                }
            }
        }
    }
}

#[test]
fn blocks_of_32_weights_need_no_multiple_of_256() {
    for format in [WeightFormat::Q8_0, WeightFormat::Q4_0] {
        let rows = 50;
        let cols = 96;
        let blocks = block_rows(format, rows, cols, 9);
        for isa in Isa::available() {
            let kernel = Kernel::with_isa(isa, 1);
            let weights = quantized(&kernel, format, &blocks, rows, cols);
            let decoded = decode(format, &blocks, cols);
            check(&kernel, &weights, &decoded, &[1, 5, 17], &format!("{format:?} {isa:?}"));
        }
    }
}

#[test]
fn stacked_matrices_keep_their_formats() {
    let cols = 256;
    // Boundaries with and without a shared panel, and a matrix inside a single panel.
    for rows in [[48, 32, 16, 64], [40, 3, 50, 35]] {
        let q4 = block_rows(WeightFormat::Q4K, rows[0], cols, 1);
        let q6 = block_rows(WeightFormat::Q6K, rows[1], cols, 2);
        let f16: Vec<f32> =
            noise(rows[2] * cols, 3).into_iter().map(|x| f16::from_f32(x).to_f32()).collect();
        let q8 = block_rows(WeightFormat::Q8_0, rows[3], cols, 4);
        let read = |format: WeightFormat, blocks: &[u8]| {
            let blocks = blocks.to_vec();
            let row_bytes = format.row_bytes(cols);
            move |first: usize, out: &mut [u8]| {
                out.copy_from_slice(&blocks[first * row_bytes..][..out.len()]);
                Ok::<_, Error>(())
            }
        };
        let read_q4 = read(WeightFormat::Q4K, &q4);
        let read_q6 = read(WeightFormat::Q6K, &q6);
        let read_q8 = read(WeightFormat::Q8_0, &q8);
        let read_f16 = |first: usize, out: &mut [f32]| {
            out.copy_from_slice(&f16[first * cols..][..out.len()]);
            Ok::<_, Error>(())
        };
        let source = |i: usize, format, read| MatrixSource { rows: rows[i], format, read };
        let sources = [
            source(0, WeightFormat::Q4K, ReadRows::Stored(&read_q4)),
            source(1, WeightFormat::Q6K, ReadRows::Stored(&read_q6)),
            source(2, WeightFormat::F16, ReadRows::Values(&read_f16)),
            source(3, WeightFormat::Q8_0, ReadRows::Stored(&read_q8)),
        ];
        let decoded = [
            decode(WeightFormat::Q4K, &q4, cols),
            decode(WeightFormat::Q6K, &q6, cols),
            f16.clone(),
            decode(WeightFormat::Q8_0, &q8, cols),
        ]
        .concat();
        for isa in Isa::available() {
            let kernel = Kernel::with_isa(isa, 3);
            let weights = Panels::stack(&kernel, cols, &sources).unwrap();
            if rows[0] % PANEL == 0 {
                let bytes = q4.len() * 148 / 144 + q6.len() * 212 / 210 + q8.len() + f16.len() * 2;
                assert_eq!(weights.bytes(), bytes, "each matrix in its own format");
            }
            check(&kernel, &weights, &decoded, &[1, 3, 13, 30], &format!("{rows:?} {isa:?}"));
        }
    }
}

#[test]
fn stored_bf16_rows_and_bf16_values_are_stacked() {
    let rows = [20, 21, 32];
    let cols = 67;
    let values: Vec<Vec<f32>> = rows
        .iter()
        .zip(1..)
        .map(|(rows, seed)| {
            let values = noise(rows * cols, seed);
            values.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect()
        })
        .collect();
    let stored = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect()
    };
    let first_rows = stored(&values[0]);
    let last_rows = stored(&values[2]);
    let read_first = |first: usize, out: &mut [u8]| {
        out.copy_from_slice(&first_rows[first * 2 * cols..][..out.len()]);
        Ok::<_, Error>(())
    };
    let read_values = |first: usize, out: &mut [f32]| {
        out.copy_from_slice(&values[1][first * cols..][..out.len()]);
        Ok::<_, Error>(())
    };
    let read_last = |first: usize, out: &mut [u8]| {
        out.copy_from_slice(&last_rows[first * 2 * cols..][..out.len()]);
        Ok::<_, Error>(())
    };
    let format = WeightFormat::Bf16;
    let sources = [
        MatrixSource { rows: rows[0], format, read: ReadRows::Stored(&read_first) },
        MatrixSource { rows: rows[1], format, read: ReadRows::Values(&read_values) },
        MatrixSource { rows: rows[2], format, read: ReadRows::Stored(&read_last) },
    ];
    for isa in Isa::available() {
        let kernel = Kernel::with_isa(isa, 3);
        let weights = Panels::stack(&kernel, cols, &sources).unwrap();
        check(&kernel, &weights, &values.concat(), &[1, 5], &format!("{isa:?}"));
    }
}

#[test]
fn an_error_of_a_source_is_returned() {
    let read = |_: usize, _: &mut [u8]| Err(Error::invalid("weights", "no disk"));
    let source =
        MatrixSource { rows: 20, format: WeightFormat::Q8_0, read: ReadRows::Stored(&read) };
    let error = Panels::stack(&Kernel::portable(), 32, &[source]).unwrap_err();
    assert!(error.to_string().contains("no disk"), "{error}");
}

#[test]
#[should_panic(expected = "rows of whole blocks")]
fn rows_that_are_not_whole_blocks_are_refused() {
    quantized(&Kernel::portable(), WeightFormat::Q4K, &[], 1, 100);
}
