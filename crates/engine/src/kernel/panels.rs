//! [`Panels`]: a weight matrix packed in the order in which matrix products read it.

use std::cell::RefCell;
use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};

use super::row_ops::{narrow, transpose};
use super::{Kernel, PANEL};

thread_local! {
    /// Buffer for the source rows of one panel.
    static ROW_BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Storage format of frozen model weights. Accumulation is always in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, the upper half of a 32-bit float: half the memory, 8 significant bits.
    Bf16,
}

impl Precision {
    /// Returns the size of one weight in bytes.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A packed matrix of `rows` outputs × `cols` inputs.
///
/// Sixteen outputs form a panel. A panel stores its sixteen weights for input 0, then for input 1,
/// and so on. The last panel is padded with zeros.
///
/// In bf16, the sixteen weights are interleaved: weights 0 to 7 have the even indices, weights 8 to
/// 15 the odd ones. Read as eight 32-bit words, a shift by 16 bits converts weights 0 to 7 to f32,
/// and a mask of the upper half converts weights 8 to 15.
#[derive(Clone, Debug)]
pub(crate) struct Panels {
    rows: usize,
    cols: usize,
    data: PanelData,
}

#[derive(Clone, Debug)]
pub(super) enum PanelData {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Panels {
    /// Packs a matrix whose rows `first..` are written into a buffer of whole rows by
    /// `read(first, buffer)`.
    ///
    /// # Errors
    /// An error of `read`.
    pub(crate) fn pack<E: Send>(
        kernel: &Kernel,
        rows: usize,
        cols: usize,
        precision: Precision,
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let len = rows.div_ceil(PANEL) * PANEL * cols;
        let data = match precision {
            Precision::F32 => {
                let mut out = vec![0.0; len];
                let convert = |from: &[f32], to: &mut [f32]| to.copy_from_slice(from);
                Self::fill(kernel, rows, cols, &read, &mut out, convert)?;
                PanelData::F32(out)
            }
            Precision::Bf16 => {
                let mut out = vec![0; len];
                let isa = kernel.isa();
                let convert = |from: &[f32], to: &mut [u16]| narrow(isa, from, to);
                Self::fill(kernel, rows, cols, &read, &mut out, convert)?;
                PanelData::Bf16(out)
            }
        };
        Ok(Self { rows, cols, data })
    }

    /// Packs a row-major `rows × cols` matrix on the caller's thread.
    ///
    /// # Panics
    /// If `matrix` does not have `rows · cols` elements.
    pub(crate) fn from_rows(
        matrix: &[f32],
        rows: usize,
        cols: usize,
        precision: Precision,
    ) -> Self {
        assert_eq!(matrix.len(), rows * cols, "a matrix of {rows} × {cols}");
        let read = |first: usize, out: &mut [f32]| {
            out.copy_from_slice(&matrix[first * cols..][..out.len()]);
            Ok::<_, Infallible>(())
        };
        let Ok(panels) = Self::pack(&Kernel::portable(), rows, cols, precision, read);
        panels
    }

    /// Writes all panels to `out`, converting groups of sixteen weights with `convert`.
    fn fill<T: Copy + Send, E: Send>(
        kernel: &Kernel,
        rows: usize,
        cols: usize,
        read: &(impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync),
        out: &mut [T],
        convert: impl Fn(&[f32], &mut [T]) + Sync,
    ) -> Result<(), E> {
        if cols == 0 {
            return Ok(());
        }
        let isa = kernel.isa();
        let error = Mutex::new(None);
        kernel.pool().for_each_row(out, PANEL * cols, PANEL * cols, |panel, out| {
            let first = panel * PANEL;
            let count = PANEL.min(rows - first);
            ROW_BUFFER.with_borrow_mut(|buffer| {
                buffer.resize(buffer.len().max(count * cols), 0.0);
                if let Err(e) = read(first, &mut buffer[..count * cols]) {
                    error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                    return;
                }
                // Transpose blocks of sixteen rows and sixteen inputs.
                for (block, out) in out.chunks_mut(PANEL * PANEL).enumerate() {
                    let (col, width) = (block * PANEL, out.len() / PANEL);
                    let (mut lanes, mut transposed) = ([0.0; PANEL * PANEL], [0.0; PANEL * PANEL]);
                    for (lane, to) in lanes.chunks_exact_mut(PANEL).take(count).enumerate() {
                        to[..width].copy_from_slice(&buffer[lane * cols + col..][..width]);
                    }
                    transpose(isa, &lanes, &mut transposed);
                    convert(&transposed[..out.len()], out);
                }
            });
        });
        error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Returns the number of outputs.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of inputs.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the size of the packed weights in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.data {
            PanelData::F32(data) => data.len() * 4,
            PanelData::Bf16(data) => data.len() * 2,
        }
    }

    /// Copies row `i` to `out` as f32.
    ///
    /// # Panics
    /// If `i` is out of range or `out` does not have `cols` elements.
    pub(crate) fn row(&self, i: usize, out: &mut [f32]) {
        assert!(
            i < self.rows && out.len() == self.cols,
            "row {i} of {} × {}",
            self.rows,
            self.cols
        );
        let panel = (i / PANEL) * PANEL * self.cols;
        match &self.data {
            PanelData::F32(data) => {
                let start = panel + i % PANEL;
                for (out, value) in out.iter_mut().zip(data[start..].iter().step_by(PANEL)) {
                    *out = *value;
                }
            }
            PanelData::Bf16(data) => {
                let start = panel + bf16_index(i % PANEL);
                for (out, value) in out.iter_mut().zip(data[start..].iter().step_by(PANEL)) {
                    *out = f32::from_bits(u32::from(*value) << 16);
                }
            }
        }
    }

    pub(super) fn data(&self) -> &PanelData {
        &self.data
    }
}

/// Returns the index of weight `lane` in an interleaved group of sixteen bf16 weights.
pub(super) const fn bf16_index(lane: usize) -> usize {
    if lane < PANEL / 2 { 2 * lane } else { 2 * lane - PANEL + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_restores_the_packed_rows() {
        let matrix: Vec<f32> = (0_u8..185).map(f32::from).collect();
        for precision in [Precision::F32, Precision::Bf16] {
            let panels = Panels::from_rows(&matrix, 37, 5, precision);
            let mut row = [0.0; 5];
            for i in 0..37 {
                panels.row(i, &mut row);
                assert_eq!(row, matrix[i * 5..(i + 1) * 5]);
            }
        }
    }
}
