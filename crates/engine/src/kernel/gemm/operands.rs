//! Operands of a block in the form that the micro-kernel reads: [`LhsBlock`] and [`RhsPanels`].
//!
//! Operands that the micro-kernel cannot read efficiently in place are copied into buffers of the
//! thread. The methods here take a closure, because the buffer is borrowed while the closure runs.

use std::cell::RefCell;
use std::ops::Range;

use super::super::panel_format::PanelFormat;
use super::super::panels::{Panels, Segment};
use super::super::tile::{Prefetch, ROWS, decode_panel};
use super::super::weight_format::with_panel_format;
use super::super::{Isa, PANEL, WeightFormat, row_ops};
use super::block::{CheckedGemm, MAX_TILE_PANELS, PanelGroup};
use super::{Lhs, Rhs};

/// Distance in reduction steps between the weights that a single tile reads and the weights that it
/// prefetches.
const PREFETCH_STEPS: usize = 128;
/// Minimum number of panels that a block of a row-major left operand must be multiplied by, so that
/// copying the block saves more time than it costs.
const MIN_PANELS_FOR_LHS_COPY: usize = 8;
/// Minimum number of reduction steps in such a block.
const MIN_STEPS_FOR_LHS_COPY: usize = 64;

thread_local! {
    /// Copied or decoded panels of the right operand.
    static PANEL_BUFFER: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    /// Copied block of the left operand.
    static LHS_BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Sixteen f32 values in one cache line.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([f32; PANEL]);

impl Line {
    fn values_mut(lines: &mut [Self]) -> &mut [f32] {
        bytemuck::cast_slice_mut(lines)
    }
}

/// Rows and reduction steps of the left operand, in place or copied.
///
/// `data` starts with element (`first_row`, `first_step`) of the operand. The strides are distances
/// in elements.
#[derive(Clone, Copy)]
pub(super) struct LhsBlock<'a> {
    data: &'a [f32],
    first_row: usize,
    first_step: usize,
    pub(super) row_stride: usize,
    pub(super) step_stride: usize,
}

impl LhsBlock<'_> {
    /// Returns the address of element (`row`, `step`) of the left operand.
    ///
    /// # Panics
    /// If the element is not in the block.
    pub(super) fn element_ptr(&self, row: usize, step: usize) -> *const f32 {
        let offset =
            (row - self.first_row) * self.row_stride + (step - self.first_step) * self.step_stride;
        self.data[offset..].as_ptr()
    }
}

/// Panels that the micro-kernel can read.
#[derive(Clone, Copy)]
pub(super) struct RhsPanels {
    pub(super) format: WeightFormat,
    /// Address of the first block of the first panel.
    pub(super) start: *const u8,
    /// Distance between panels in bytes.
    pub(super) panel_stride: usize,
    /// Distance between the blocks of a panel in bytes.
    pub(super) block_stride: usize,
}

/// Consecutive panels of the right operand with the same format.
pub(super) struct RhsSegment {
    /// Indices of the panels, counted from the first column of the product.
    pub(super) panels: Range<usize>,
    pub(super) format: RhsFormat,
    /// Position of the first panel in its group of packed weights.
    pub(super) position_in_group: usize,
}

/// Format of the right operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RhsFormat {
    /// Packed weights, which the micro-kernel reads in place or decoded.
    Packed(WeightFormat),
    /// Row-major or transposed: copied into f32 panels.
    Copied,
}

impl CheckedGemm<'_> {
    /// Calls `then` with these rows and steps of the left operand, which will be multiplied by
    /// `panels` panels.
    ///
    /// If many tiles read these elements, they are copied to a contiguous buffer first: elements
    /// whose addresses are a power of two apart map to the same cache set and evict each other.
    pub(super) fn with_lhs(
        &self,
        rows: &Range<usize>,
        steps: &Range<usize>,
        panels: usize,
        then: impl FnOnce(LhsBlock<'_>),
    ) {
        let Lhs { data, row_stride, step_stride } = self.lhs;
        let in_place = LhsBlock {
            data: &data[rows.start * row_stride + steps.start * step_stride..],
            first_row: rows.start,
            first_step: steps.start,
            row_stride,
            step_stride,
        };
        let rows_are_contiguous = step_stride == 1;
        let is_reused = if rows_are_contiguous {
            steps.len() >= MIN_STEPS_FOR_LHS_COPY && panels >= MIN_PANELS_FOR_LHS_COPY
        } else {
            row_stride == 1 && rows.len() > ROWS
        };
        if rows.len() == 1 || !is_reused {
            return then(in_place);
        }
        LHS_BUFFER.with_borrow_mut(|buffer| {
            if rows_are_contiguous {
                // The padding makes a stride that is a power of two unlikely.
                let stride = steps.len() + PANEL;
                copy_runs(in_place.data, row_stride, steps.len(), buffer, stride, rows.len());
                then(LhsBlock { data: buffer, row_stride: stride, ..in_place });
            } else {
                let stride = rows.len();
                copy_runs(in_place.data, step_stride, rows.len(), buffer, stride, steps.len());
                then(LhsBlock { data: buffer, step_stride: stride, ..in_place });
            }
        });
    }

    /// Divides panels into ranges in which the right operand has one format.
    pub(super) fn segments(&self, panels: Range<usize>) -> impl Iterator<Item = RhsSegment> {
        let (weights, first) = match self.rhs {
            Rhs::Packed { weights, from } => (weights.segments(), from / PANEL),
            Rhs::Transposed { .. } | Rhs::Rows { .. } => (&[][..], 0),
        };
        let packed = weights.iter().filter_map({
            let panels = panels.clone();
            move |segment: &Segment| {
                let start = segment.panels.start.max(panels.start + first);
                let end = segment.panels.end.min(panels.end + first);
                (start < end).then(|| RhsSegment {
                    panels: start - first..end - first,
                    format: RhsFormat::Packed(segment.format),
                    position_in_group: segment.position_in_group(start),
                })
            }
        });
        let copied = RhsSegment { panels, format: RhsFormat::Copied, position_in_group: 0 };
        packed.chain(weights.is_empty().then_some(copied))
    }

    /// Calls `then` with these steps of `group`, whose panels must have the same format. Decodes or
    /// copies them first if `copy` is set.
    pub(super) fn with_panels(
        &self,
        copy: bool,
        group: PanelGroup,
        steps: &Range<usize>,
        then: impl FnOnce(RhsPanels),
    ) {
        if !copy && let Rhs::Packed { weights, from } = self.rhs {
            let panel = from / PANEL + group.first;
            let segment = weights.segment(panel);
            let format = segment.format;
            let blocks = segment.adjacent_panels(panel, group.count);
            // The first step is a multiple of `BLOCK_DEPTH`, and so of the number of inputs in a
            // block of any format.
            let start = blocks.starting_at(steps.start / format.block_inputs()).as_ptr();
            let panel_stride = format.block_bytes();
            let block_stride = blocks.stride;
            return then(RhsPanels { format, start, panel_stride, block_stride });
        }
        PANEL_BUFFER.with_borrow_mut(|buffer| {
            let panel_len = steps.len() * PANEL;
            let lines = (group.count * panel_len).div_ceil(PANEL);
            buffer.resize(buffer.len().max(lines), Line([0.0; PANEL]));
            let values = Line::values_mut(buffer);
            let copies = values.chunks_exact_mut(panel_len).take(group.count);
            for (i, copy) in copies.enumerate() {
                self.copy_panel(group.first + i, steps, copy);
            }
            then(RhsPanels {
                format: WeightFormat::F32,
                start: buffer.as_ptr().cast(),
                panel_stride: panel_len * size_of::<f32>(),
                block_stride: WeightFormat::F32.block_bytes(),
            });
        });
    }

    /// Copies these steps of one panel into `copy` as f32.
    fn copy_panel(&self, panel: usize, steps: &Range<usize>, copy: &mut [f32]) {
        let col = panel * PANEL;
        let cols = PANEL.min(self.size.cols - col);
        match self.rhs {
            Rhs::Packed { weights, from } => {
                let panel = from / PANEL + panel;
                decode(self.isa, weights, panel, steps.start, copy);
            }
            Rhs::Transposed { weights, from } => {
                // The first step is a multiple of `BLOCK_DEPTH`, and `from` is a multiple of 16:
                // the steps start with the first output of a panel.
                let first_panel = (from + steps.start) / PANEL;
                for (i, copy) in copy.chunks_mut(PANEL * PANEL).enumerate() {
                    let mut rows = [0.0; PANEL * PANEL];
                    let rows = &mut rows[..cols * PANEL];
                    decode(self.isa, weights, first_panel + i, col, rows);
                    row_ops::transpose(self.isa, rows, copy);
                }
            }
            Rhs::Rows { data, stride } => {
                for (step, copy) in steps.clone().zip(copy.chunks_exact_mut(PANEL)) {
                    let start = step * stride + col;
                    copy[..cols].copy_from_slice(&data[start..start + cols]);
                    copy[cols..].fill(0.0);
                }
            }
        }
    }

    /// Returns the weights to prefetch while these steps of `group` are computed. Only packed
    /// weights are prefetched.
    pub(super) fn prefetch(
        &self,
        rhs: RhsPanels,
        streaming: bool,
        group: PanelGroup,
        steps: &Range<usize>,
    ) -> Prefetch {
        let Rhs::Packed { weights, from } = self.rhs else { return Prefetch::None };
        let segment = weights.segment(from / PANEL + group.first);
        let format = segment.format;
        // A tile of more than `ROWS` rows reads two panels of four, hence not every line in memory.
        let is_half_group = self.size.rows > ROWS && group.count == MAX_TILE_PANELS / 2;
        if streaming && (format.is_quantized() || is_half_group) {
            return Prefetch::LaterBlocks;
        }
        let is_whole_depth = steps.len() == self.size.depth;
        let start = if !streaming {
            // The same steps of the next group of panels. The tiles that read this group divide the
            // lines among themselves (`Prefetch::share`).
            let in_place = segment.adjacent_panels(from / PANEL + group.first, group.count);
            let blocks = in_place.starting_at(steps.start / format.block_inputs());
            blocks.as_ptr().wrapping_add(MAX_TILE_PANELS * segment.panel_bytes)
        } else if !is_whole_depth {
            // The next steps of the same panels.
            rhs.start.wrapping_add(steps.len() / format.block_inputs() * rhs.block_stride)
        } else if group.count == 1 {
            // Later steps of the same panel.
            rhs.start.wrapping_add(PREFETCH_STEPS / format.block_inputs() * rhs.block_stride)
        } else {
            // The hardware prefetcher recognizes that the panels are read sequentially.
            return Prefetch::None;
        };
        Prefetch::Lines { start, step: with_panel_format!(format, F => F::CHUNK_BYTES) }
    }
}

/// Decodes `out.len() / 16` inputs of one panel, from input `first` on.
fn decode(isa: Isa, weights: &Panels, panel: usize, first: usize, out: &mut [f32]) {
    let segment = weights.segment(panel);
    let blocks = segment.panel(panel);
    with_panel_format!(segment.format, F => decode_panel::<F>(isa, blocks, first, out));
}

/// Copies `runs` runs of `len` elements, which start `from_stride` elements apart in `from`, into
/// `buffer`, where they start `stride` elements apart. Grows the buffer if necessary.
fn copy_runs(
    from: &[f32],
    from_stride: usize,
    len: usize,
    buffer: &mut Vec<f32>,
    stride: usize,
    runs: usize,
) {
    buffer.resize(buffer.len().max(runs * stride), 0.0);
    for (run, to) in buffer.chunks_exact_mut(stride).take(runs).enumerate() {
        to[..len].copy_from_slice(&from[run * from_stride..][..len]);
    }
}
