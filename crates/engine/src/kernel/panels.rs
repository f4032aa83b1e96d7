//! [`Panels`]: a weight matrix in the order in which products read it.

use half::bf16;

use super::PANEL;
use super::pool::Pool;

/// In what form weights are kept. Sums are always f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    F32,
    /// The upper half of a 32-bit float: half the memory, eight bits of mantissa.
    Bf16,
}

impl Precision {
    /// Bytes of one weight.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A matrix of `rows` outputs and `cols` inputs, packed: sixteen outputs form a panel, and a panel
/// holds its sixteen weights of input 0, then of input 1, and so on. The last panel is filled up
/// with zeros.
#[derive(Clone, Debug)]
pub(crate) struct Panels {
    rows: usize,
    cols: usize,
    data: Data,
}

#[derive(Clone, Debug)]
pub(super) enum Data {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Panels {
    /// Packs a row-major matrix, reading row `i` into the buffer by `row(i, buffer)`.
    pub(crate) fn pack(
        pool: &Pool,
        rows: usize,
        cols: usize,
        precision: Precision,
        row: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Self {
        let len = rows.div_ceil(PANEL) * PANEL * cols;
        let data = match precision {
            Precision::F32 => {
                let mut out = vec![0.0; len];
                Self::fill(pool, rows, cols, &row, &mut out, |x| x);
                Data::F32(out)
            }
            Precision::Bf16 => {
                let mut out = vec![0; len];
                Self::fill(pool, rows, cols, &row, &mut out, |x| bf16::from_f32(x).to_bits());
                Data::Bf16(out)
            }
        };
        Self { rows, cols, data }
    }

    /// Packs a row-major matrix in memory, on the caller's thread.
    pub(crate) fn from_rows(
        matrix: &[f32],
        rows: usize,
        cols: usize,
        precision: Precision,
    ) -> Self {
        assert_eq!(matrix.len(), rows * cols, "a matrix of {rows} × {cols}");
        Self::pack(&Pool::alone(), rows, cols, precision, |i, out| {
            out.copy_from_slice(&matrix[i * cols..(i + 1) * cols]);
        })
    }

    fn fill<T: Copy + Send>(
        pool: &Pool,
        rows: usize,
        cols: usize,
        row: &(impl Fn(usize, &mut [f32]) + Sync),
        out: &mut [T],
        convert: impl Fn(f32) -> T + Sync,
    ) {
        if cols == 0 {
            return;
        }
        pool.each_row(out, PANEL * cols, PANEL * cols, |panel, out| {
            let first = panel * PANEL;
            let mut buffer = vec![0.0; cols];
            for lane in 0..PANEL.min(rows - first) {
                row(first + lane, &mut buffer);
                for (out, value) in out[lane..].iter_mut().step_by(PANEL).zip(&buffer) {
                    *out = convert(*value);
                }
            }
        });
    }

    /// How many outputs.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// How many inputs.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(data) => data.len() * 4,
            Data::Bf16(data) => data.len() * 2,
        }
    }

    /// Writes row `i` to `out`.
    pub(crate) fn row(&self, i: usize, out: &mut [f32]) {
        assert!(
            i < self.rows && out.len() == self.cols,
            "row {i} of {} × {}",
            self.rows,
            self.cols
        );
        let start = (i / PANEL) * PANEL * self.cols + i % PANEL;
        match &self.data {
            Data::F32(data) => {
                for (out, value) in out.iter_mut().zip(data[start..].iter().step_by(PANEL)) {
                    *out = *value;
                }
            }
            Data::Bf16(data) => {
                for (out, value) in out.iter_mut().zip(data[start..].iter().step_by(PANEL)) {
                    *out = f32::from_bits(u32::from(*value) << 16);
                }
            }
        }
    }

    pub(super) fn data(&self) -> &Data {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_as_they_were() {
        let matrix: Vec<f32> = (0_u8..35).map(f32::from).collect();
        for precision in [Precision::F32, Precision::Bf16] {
            let panels = Panels::from_rows(&matrix, 7, 5, precision);
            let mut row = [0.0; 5];
            for i in 0..7 {
                panels.row(i, &mut row);
                assert_eq!(row, matrix[i * 5..(i + 1) * 5]);
            }
        }
    }
}
