//! Rows of a merged tensor: `W + alpha / rank · B · A`, computed in f32.

use std::ops::Range;

use crate::{Error, Result, StoredLoraPair, StoredTensor};

/// Minimum number of multiply-adds per thread. Starting a thread for fewer costs more time than it
/// saves.
const MIN_WORK_PER_THREAD: usize = 1 << 22;

/// A tensor of the merged model, whose rows are read from the base model and computed on demand.
#[derive(Debug)]
pub(crate) struct MergedTensor<'a> {
    base: StoredTensor<'a>,
    delta: Option<Delta<'a>>,
    columns: usize,
    threads: usize,
}

/// The delta `scale · B · A` of a linear layer.
#[derive(Debug)]
struct Delta<'a> {
    rank: usize,
    scale: f32,
    /// Row-major A, `rank × columns`. Every row of the tensor needs the whole matrix.
    a: Vec<f32>,
    b: StoredTensor<'a>,
}

impl<'a> MergedTensor<'a> {
    /// Opens a tensor. `pair` and the factor `alpha / rank` describe its delta, if it has one.
    ///
    /// # Errors
    /// [`Error::Io`] if the adapter cannot be read.
    pub(crate) fn open(
        base: StoredTensor<'a>,
        pair: Option<(StoredLoraPair<'a>, f64)>,
    ) -> Result<Self> {
        // Vectors, such as the weights of norms, are one row.
        let columns = base.shape().last().copied().unwrap_or(1);
        let delta = match pair {
            None => None,
            Some((pair, scale)) => Some(Delta {
                rank: pair.a.shape()[0],
                #[expect(clippy::cast_possible_truncation, reason = "merging computes in f32")]
                scale: scale as f32,
                a: pair.a.to_f32()?,
                b: pair.b,
            }),
        };
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(Self { base, delta, columns, threads })
    }

    /// Returns the number of rows; 1 for a vector.
    pub(crate) fn rows(&self) -> usize {
        self.base.count().checked_div(self.columns).unwrap_or(0)
    }

    /// Returns the number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Computes rows into `out`, which is resized. `name` is used in errors.
    ///
    /// Every element is computed with the same operations in the same order, so the result does not
    /// depend on the range of rows or on the number of threads.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read; [`Error::InvalidTensor`] if a value is not finite.
    pub(crate) fn read_rows(
        &self,
        name: &str,
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let elements = rows.start * self.columns..rows.end * self.columns;
        out.resize(elements.len(), 0.0);
        self.base.read_f32(elements.clone(), out)?;
        if let Some(delta) = &self.delta {
            let mut b = vec![0.0; rows.len() * delta.rank];
            delta.b.read_f32(rows.start * delta.rank..rows.end * delta.rank, &mut b)?;
            delta.add(&b, self.columns, self.threads, out);
        }
        match out.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(at) => {
                let value = out[at];
                let index = elements.start + at;
                let reason = match &self.delta {
                    Some(_) => "the sum of base model and adapter is",
                    None => "the weight of the base model is",
                };
                Err(Error::invalid_tensor(name, format!("{reason} {value} at index {index}")))
            }
        }
    }
}

impl Delta<'_> {
    /// Adds the delta to `out`, rows of the tensor. `b` has the same rows of B.
    fn add(&self, b: &[f32], columns: usize, threads: usize, out: &mut [f32]) {
        let rows = out.len() / columns;
        let work = out.len() * self.rank;
        let threads = threads.min(work / MIN_WORK_PER_THREAD).clamp(1, rows.max(1));
        let rows_per_thread = rows.div_ceil(threads);
        let parts =
            out.chunks_mut(rows_per_thread * columns).zip(b.chunks(rows_per_thread * self.rank));
        if threads == 1 {
            parts.for_each(|(out, b)| self.add_rows(b, columns, out));
            return;
        }
        std::thread::scope(|scope| {
            for (out, b) in parts {
                scope.spawn(move || self.add_rows(b, columns, out));
            }
        });
    }

    fn add_rows(&self, b: &[f32], columns: usize, out: &mut [f32]) {
        /// Columns that are computed at a time, so that the sums stay in the L1 cache.
        const BLOCK: usize = 1024;
        let mut sums = [0.0; BLOCK];
        for (out, b) in out.chunks_exact_mut(columns).zip(b.chunks_exact(self.rank)) {
            for (block, out) in out.chunks_mut(BLOCK).enumerate() {
                let sums = &mut sums[..out.len()];
                sums.fill(0.0);
                for (k, &b) in b.iter().enumerate() {
                    let a = &self.a[k * columns + block * BLOCK..][..sums.len()];
                    // Not fused: a fused operation would round differently on other processors.
                    for (sum, a) in sums.iter_mut().zip(a) {
                        *sum += b * a;
                    }
                }
                for (out, sum) in out.iter_mut().zip(&*sums) {
                    *out += self.scale * sum;
                }
            }
        }
    }
}
