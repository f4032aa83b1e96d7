//! [`Panels`]: a weight matrix packed in the order in which matrix products read it.

use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::Range;

use parking_lot::Mutex;

use super::panel_memory::PanelMemory;
use super::{Isa, Kernel, PANEL, WeightFormat};

thread_local! {
    /// Buffer for the rows of one panel, as f32.
    static PANEL_VALUES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Buffer for the stored rows of one panel.
    static STORED_ROWS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
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

/// A matrix to pack, alone or stacked with others.
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
    /// As f32, for storage formats that are not quantized.
    Values(ReadInto<'a, f32, E>),
    /// As bytes of the storage format: GGUF blocks of a quantized format, or bf16 numbers.
    Stored(ReadInto<'a, u8, E>),
}

/// Number of panels whose blocks are interleaved in memory.
pub(super) const GROUP_PANELS: usize = 4;

/// A packed matrix of `rows` outputs × `cols` inputs.
///
/// Sixteen outputs form a panel, whose weights are divided into blocks of inputs in the layout of
/// its format (`panel_format`). The last panel is padded with zeros.
///
/// Four panels of the same format form a group, which stores the first block of each of them, then
/// the second block of each, and so on. A tile of four panels therefore reads contiguous memory,
/// and the weights of the next tile follow. The last group may have fewer panels.
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
    /// Returns the blocks of panel `panel` of the matrix.
    ///
    /// # Panics
    /// If the panel is not in this segment.
    pub(super) fn panel(&self, panel: usize) -> PanelBlocks<'_> {
        self.adjacent_panels(panel, 1)
    }

    /// Returns the blocks of `count` panels of one group, from panel `first` of the matrix on.
    ///
    /// # Panics
    /// If a panel is not in this segment, or if the panels belong to several groups.
    pub(super) fn adjacent_panels(&self, first: usize, count: usize) -> PanelBlocks<'_> {
        let index = first - self.panels.start;
        let group = index / GROUP_PANELS;
        let position = index % GROUP_PANELS;
        let len = group_len(self.panels.len(), group);
        assert!(
            position + count <= len,
            "{count} panels from panel {position} of {len} in a group"
        );
        let block_bytes = self.format.block_bytes();
        let start = group * GROUP_PANELS * self.panel_bytes;
        let bytes = &self.memory.bytes()[start..start + len * self.panel_bytes];
        // A matrix without inputs has no bytes.
        let bytes = bytes.get(position * block_bytes..).unwrap_or_default();
        PanelBlocks { bytes, block_bytes, stride: len * block_bytes }
    }

    /// Returns the position of panel `panel` of the matrix in its group.
    pub(super) fn position_in_group(&self, panel: usize) -> usize {
        (panel - self.panels.start) % GROUP_PANELS
    }
}

/// Returns the number of panels in group `group` of a segment of `panels` panels.
fn group_len(panels: usize, group: usize) -> usize {
    GROUP_PANELS.min(panels - group * GROUP_PANELS)
}

/// Blocks of one panel, or of adjacent panels of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct PanelBlocks<'a> {
    /// Memory of the group, from the first block of the first panel on.
    bytes: &'a [u8],
    block_bytes: usize,
    /// Distance in bytes between the blocks of a panel.
    pub(super) stride: usize,
}

impl<'a> PanelBlocks<'a> {
    /// Returns the memory from block `index` of the first panel on.
    ///
    /// # Panics
    /// If there is no such block.
    pub(super) fn starting_at(&self, index: usize) -> &'a [u8] {
        &self.bytes[index * self.stride..]
    }

    /// Returns the size of a block in bytes.
    pub(super) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns the number of blocks of a panel.
    pub(super) fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.stride)
    }

    /// Returns the blocks of the first panel.
    pub(super) fn iter(&self) -> impl Iterator<Item = &'a [u8]> {
        let block_bytes = self.block_bytes;
        self.bytes.chunks(self.stride).map(move |blocks| &blocks[..block_bytes])
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
    /// If a source of a quantized format reads values, or a source of f32 or f16 reads stored rows; if
    /// `cols` is not a multiple of the block of a quantized format; or if the size of the matrix
    /// exceeds the address space.
    pub(crate) fn stack<E: Send>(
        kernel: &Kernel,
        cols: usize,
        sources: &[MatrixSource<'_, E>],
    ) -> Result<Self, E> {
        for MatrixSource { format, read, .. } in sources {
            let possible = match read {
                ReadRows::Values(_) => !format.is_quantized(),
                ReadRows::Stored(_) => format.packs_stored_rows(),
            };
            assert!(possible, "{format:?} is not read in this way");
        }
        let rows = sources.iter().map(|source| source.rows).sum();
        let stack = SourceStack { sources, rows, cols };
        let error = Mutex::new(None);
        let mut segments = Vec::new();
        for (panels, format) in stack.segments() {
            let panel_bytes = format.panel_bytes(cols);
            // A size that wrapped around would be too small for the panels.
            let len = panels.len().checked_mul(panel_bytes).expect("size of the matrix");
            let mut memory = PanelMemory::new(kernel.arena(), len);
            if cols > 0 {
                let bytes = memory.bytes_mut();
                kernel.pool().for_each_chunk(bytes, GROUP_PANELS * panel_bytes, |group, out| {
                    let first = group * GROUP_PANELS;
                    let len = group_len(panels.len(), group);
                    for position in 0..len {
                        let panel = panels.start + first + position;
                        let block_bytes = format.block_bytes();
                        let blocks = out
                            .chunks_exact_mut(len * block_bytes)
                            .map(|blocks| &mut blocks[position * block_bytes..][..block_bytes]);
                        if let Err(e) = stack.pack(kernel.isa(), panel, format, blocks) {
                            error.lock().get_or_insert(e);
                        }
                    }
                });
            }
            segments.push(Segment { panels, format, memory, panel_bytes });
        }
        match error.into_inner() {
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
        segment.format.unpack_lane(segment.panel(i / PANEL).iter(), i % PANEL, out);
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
    /// Returns the sources that have some of these rows of the stack. For each source: the range of
    /// its rows, counted from `rows.start`, and the index of the first of them in the source.
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

    /// Packs one panel into its blocks `out`, which must be zeroed.
    fn pack<'a>(
        &self,
        isa: Isa,
        panel: usize,
        format: WeightFormat,
        out: impl Iterator<Item = &'a mut [u8]>,
    ) -> Result<(), E> {
        let rows = self.panel_rows(panel);
        let cols = self.cols;
        let mut sources = self.parts(rows.clone()).map(|(source, ..)| source);
        // Quantized rows are always stored. Copying stored numbers saves their conversion.
        if sources.all(|source| source.format == format && source.is_stored()) {
            let row_bytes = format.row_bytes(cols);
            return with_buffer(&STORED_ROWS, rows.len() * row_bytes, |buffer| {
                for (source, part, first) in self.parts(rows) {
                    let rows = &mut buffer[part.start * row_bytes..part.end * row_bytes];
                    source.read_stored(first, rows)?;
                }
                format.pack_stored(isa, buffer, row_bytes, out);
                Ok(())
            });
        }
        with_buffer(&PANEL_VALUES, rows.len() * cols, |buffer| {
            for (source, part, first) in self.parts(rows) {
                source.read_values(first, cols, &mut buffer[part.start * cols..part.end * cols])?;
            }
            format.pack_values(isa, buffer, cols, out);
            Ok(())
        })
    }
}

impl<E> MatrixSource<'_, E> {
    /// Returns whether rows are read as bytes of the storage format.
    fn is_stored(&self) -> bool {
        matches!(self.read, ReadRows::Stored(_))
    }

    /// Reads rows of `cols` weights as f32. Decodes them if the source reads stored rows.
    fn read_values(&self, first: usize, cols: usize, out: &mut [f32]) -> Result<(), E> {
        match self.read {
            ReadRows::Values(read) => read(first, out),
            ReadRows::Stored(read) => {
                let mut rows = vec![0; out.len() / cols * self.format.row_bytes(cols)];
                read(first, &mut rows)?;
                self.format.decode_rows(&rows, out);
                Ok(())
            }
        }
    }

    /// Reads rows as bytes of the storage format.
    fn read_stored(&self, first: usize, out: &mut [u8]) -> Result<(), E> {
        match self.read {
            ReadRows::Stored(read) => read(first, out),
            ReadRows::Values(_) => unreachable!("values of {:?}", self.format),
        }
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
