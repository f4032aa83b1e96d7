//! [`Panels`]: a weight matrix packed in the order in which matrix products read it.

use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::panel_memory::PanelMemory;
use super::{Isa, Kernel, PANEL, WeightFormat};

thread_local! {
    /// Buffer for the rows of one panel, as f32.
    static PANEL_VALUES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Buffer for source rows that are to be quantized, as f32.
    static VALUES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Buffer for the source rows of one panel, as GGUF blocks.
    static BLOCKS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Storage format of frozen model weights that are not quantized. Accumulation is always in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, the upper half of a 32-bit float: half the memory, 8 significant bits.
    Bf16,
}

impl From<Precision> for WeightFormat {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

/// A matrix to pack: one of several that are stacked, or the only one.
pub(crate) struct MatrixSource<'a, E> {
    pub(crate) rows: usize,
    pub(crate) format: WeightFormat,
    pub(crate) read: ReadRows<'a, E>,
}

/// A function `read(first, buffer)` that reads rows, from row `first` on, until the buffer is full.
type ReadInto<'a, T, E> = &'a (dyn Fn(usize, &mut [T]) -> Result<(), E> + Sync);

/// How whole rows of a matrix are read.
#[derive(Clone, Copy)]
pub(crate) enum ReadRows<'a, E> {
    /// As f32, converted to the storage format.
    Values(ReadInto<'a, f32, E>),
    /// As GGUF blocks of the storage format, which must be a quantized one.
    Blocks(ReadInto<'a, u8, E>),
}

/// A packed matrix of `rows` outputs × `cols` inputs.
///
/// Sixteen outputs form a panel. A panel stores one block of inputs after the other, in the layout
/// of its format (`panel_format`). The last panel is padded with zeros.
#[derive(Debug)]
pub(crate) struct Panels {
    rows: usize,
    cols: usize,
    segments: Vec<Segment>,
}

/// Consecutive panels with the same format.
#[derive(Debug)]
pub(super) struct Segment {
    /// Indices of the panels in the matrix.
    pub(super) panels: Range<usize>,
    pub(super) format: WeightFormat,
    memory: PanelMemory,
    /// Size of a panel in bytes.
    pub(super) panel_bytes: usize,
}

impl Segment {
    /// Returns the bytes of panel `panel` of the matrix.
    ///
    /// # Panics
    /// If the panel is not in this segment.
    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        self.panel_group(panel, 1)
    }

    /// Returns the bytes of `count` panels of the matrix, from panel `first` on.
    ///
    /// # Panics
    /// If a panel is not in this segment.
    pub(super) fn panel_group(&self, first: usize, count: usize) -> &[u8] {
        let start = (first - self.panels.start) * self.panel_bytes;
        &self.memory.bytes()[start..start + count * self.panel_bytes]
    }
}

impl Panels {
    /// Packs a matrix. `read(first, buffer)` fills a buffer of whole rows with the rows of the
    /// matrix from row `first` on.
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
        let read = ReadRows::Values(&read);
        Self::stack(kernel, cols, &[MatrixSource { rows, format: precision.into(), read }])
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

    /// Packs several matrices with `cols` inputs, whose outputs follow one another.
    ///
    /// Every panel has the format of its rows. A panel with rows of several formats is decoded and
    /// stored as f32.
    ///
    /// # Errors
    /// An error of a source.
    ///
    /// # Panics
    /// If a source reads blocks of a format that has none, if `cols` is not a multiple of the block
    /// of a quantized format, or if the size of the matrix exceeds the address space.
    pub(crate) fn stack<E: Send>(
        kernel: &Kernel,
        cols: usize,
        sources: &[MatrixSource<'_, E>],
    ) -> Result<Self, E> {
        for MatrixSource { format, read, .. } in sources {
            let blocks = matches!(read, ReadRows::Blocks(_));
            assert!(!blocks || format.is_quantized(), "blocks of {format:?}");
        }
        let rows = sources.iter().map(|source| source.rows).sum();
        let stack = SourceStack { sources, rows, cols };
        let error = Mutex::new(None);
        let mut segments = Vec::new();
        for (panels, format) in stack.segments() {
            let panel_bytes = format.panel_bytes(cols);
            // A size that wrapped around would be too small for the panels.
            let len = panels.len().checked_mul(panel_bytes).expect("a matrix in memory");
            let mut memory = PanelMemory::new(kernel.arena(), len);
            if cols > 0 {
                let bytes = memory.bytes_mut();
                kernel.pool().for_each_row(bytes, panel_bytes, PANEL * cols, |index, out| {
                    let packed = stack.pack(kernel.isa(), panels.start + index, format, out);
                    if let Err(e) = packed {
                        error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                    }
                });
            }
            segments.push(Segment { panels, format, memory, panel_bytes });
        }
        match error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Self { rows, cols, segments }),
        }
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
        self.segments.iter().map(|segment| segment.panels.len() * segment.panel_bytes).sum()
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
        let segment = self.segment(i / PANEL);
        segment.format.unpack_lane(segment.panel(i / PANEL), i % PANEL, out);
    }

    /// Returns the segments, in the order of their panels.
    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the segment of panel `panel`.
    ///
    /// # Panics
    /// If there is no such panel.
    pub(super) fn segment(&self, panel: usize) -> &Segment {
        let after = self.segments.partition_point(|segment| segment.panels.end <= panel);
        &self.segments[after]
    }
}

/// Matrices to pack, one below the other.
struct SourceStack<'a, E> {
    sources: &'a [MatrixSource<'a, E>],
    /// Total number of rows.
    rows: usize,
    cols: usize,
}

impl<E> SourceStack<'_, E> {
    /// Returns the sources of the given rows, each with its part of the rows, counted from the
    /// first of these rows, and the index of the part's first row in the source.
    fn parts(
        &self,
        rows: Range<usize>,
    ) -> impl Iterator<Item = (&MatrixSource<'_, E>, Range<usize>, usize)> {
        let mut start = 0;
        self.sources.iter().filter_map(move |source| {
            let own = start..start + source.rows;
            start = own.end;
            let common = rows.start.max(own.start)..rows.end.min(own.end);
            let first = common.start.checked_sub(own.start)?;
            let part = common.start - rows.start..common.end.checked_sub(rows.start)?;
            (!part.is_empty()).then_some((source, part, first))
        })
    }

    /// Returns the rows of a panel; the last panel may have fewer than sixteen.
    fn panel_rows(&self, panel: usize) -> Range<usize> {
        panel * PANEL..self.rows.min((panel + 1) * PANEL)
    }

    /// Divides the panels into ranges with the same format.
    fn segments(&self) -> Vec<(Range<usize>, WeightFormat)> {
        let mut segments: Vec<(Range<usize>, WeightFormat)> = Vec::new();
        for panel in 0..self.rows.div_ceil(PANEL) {
            let mut formats = self.parts(self.panel_rows(panel)).map(|(source, ..)| source.format);
            let first = formats.next().unwrap_or(WeightFormat::F32);
            let format =
                if formats.all(|format| format == first) { first } else { WeightFormat::F32 };
            match segments.last_mut() {
                Some((panels, last)) if *last == format => panels.end += 1,
                _ => segments.push((panel..panel + 1, format)),
            }
        }
        segments
    }

    /// Packs one panel into `out`.
    fn pack(&self, isa: Isa, panel: usize, format: WeightFormat, out: &mut [u8]) -> Result<(), E> {
        let rows = self.panel_rows(panel);
        if format.is_quantized() {
            return with_buffer(&BLOCKS, rows.len() * format.row_bytes(self.cols), |buffer| {
                let row_bytes = format.row_bytes(self.cols);
                for (source, part, first) in self.parts(rows) {
                    let out = &mut buffer[part.start * row_bytes..part.end * row_bytes];
                    source.read_blocks(first, self.cols, out)?;
                }
                format.pack_blocks(buffer, row_bytes, out);
                Ok(())
            });
        }
        with_buffer(&PANEL_VALUES, rows.len() * self.cols, |buffer| {
            for (source, part, first) in self.parts(rows) {
                let out = &mut buffer[part.start * self.cols..part.end * self.cols];
                match source.format.block_format() {
                    None => source.read_values(first, out)?,
                    Some(format) => {
                        let rows = part.len() * source.format.row_bytes(self.cols);
                        let mut blocks = vec![0; rows];
                        source.read_blocks(first, self.cols, &mut blocks)?;
                        format.decode(&blocks, out);
                    }
                }
            }
            format.pack_values(isa, buffer, self.cols, out);
            Ok(())
        })
    }
}

impl<E> MatrixSource<'_, E> {
    /// Reads rows as f32.
    ///
    /// # Panics
    /// If the source reads blocks.
    fn read_values(&self, first: usize, out: &mut [f32]) -> Result<(), E> {
        match self.read {
            ReadRows::Values(read) => read(first, out),
            ReadRows::Blocks(_) => unreachable!("blocks of {:?}", self.format),
        }
    }

    /// Reads rows of `cols` weights as GGUF blocks of the format, which must be a quantized one.
    /// Quantizes them if the source reads values.
    fn read_blocks(&self, first: usize, cols: usize, out: &mut [u8]) -> Result<(), E> {
        if let ReadRows::Blocks(read) = self.read {
            return read(first, out);
        }
        let rows = out.len() / self.format.row_bytes(cols);
        with_buffer(&VALUES, rows * cols, |values| {
            self.read_values(first, values)?;
            if let Some(format) = self.format.block_format() {
                format.encode(values, out);
            }
            Ok(())
        })
    }
}

/// Calls `then` with the first `len` elements of the thread's buffer.
fn with_buffer<T: Clone + Default, R>(
    buffer: &'static std::thread::LocalKey<RefCell<Vec<T>>>,
    len: usize,
    then: impl FnOnce(&mut [T]) -> R,
) -> R {
    buffer.with_borrow_mut(|buffer| {
        buffer.resize(buffer.len().max(len), T::default());
        then(&mut buffer[..len])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quantized_as_blocks() {
        let cols = 512;
        let matrix: Vec<f32> = (0_u16..40 * 512).map(|i| f32::from(i % 977) - 488.0).collect();
        let rows = matrix.len() / cols;
        let read = |first: usize, out: &mut [f32]| {
            out.copy_from_slice(&matrix[first * cols..][..out.len()]);
            Ok::<_, Infallible>(())
        };
        for format in WeightFormat::QUANTIZED {
            let source = MatrixSource { rows, format, read: ReadRows::Values(&read) };
            let Ok(panels) = Panels::stack(&Kernel::portable(), cols, &[source]);
            let block_format = format.block_format().unwrap();
            let mut blocks = vec![0; block_format.byte_len(matrix.len()).unwrap()];
            let mut want = vec![0.0; matrix.len()];
            block_format.encode(&matrix, &mut blocks);
            block_format.decode(&blocks, &mut want);
            assert!(panels.bytes() < blocks.len() * 5 / 4);
            let mut row = vec![0.0; cols];
            for (i, want) in want.chunks_exact(cols).enumerate() {
                panels.row(i, &mut row);
                assert_eq!(row, want, "{format:?} {i}");
            }
        }
    }

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
