//! Operands of a block in the form that the micro-kernel reads: [`LhsBlock`] and [`RhsPanels`].
//!
//! Operands that the micro-kernel cannot read efficiently in place are copied into buffers of the
//! thread. The methods here take a closure, because the buffer is borrowed while the closure runs.

use std::cell::RefCell;
use std::ops::Range;

use super::super::panels::{PanelData, Panels};
use super::super::tile::{Prefetch, ROWS};
use super::super::{PANEL, row_ops};
use super::block::{CheckedGemm, PanelGroup};
use super::{Lhs, Rhs};

/// Distance in reduction steps between the weights that a single tile reads and those that it
/// prefetches.
const PREFETCH_STEPS: usize = 128;
/// Minimum number of panels that a block of a row-major left operand must be multiplied by, so that
/// copying the block saves more time than it costs.
const MIN_PANELS_FOR_LHS_COPY: usize = 8;
/// Minimum number of reduction steps in such a block.
const MIN_STEPS_FOR_LHS_COPY: usize = 64;

thread_local! {
    /// Copied or converted panels of the right operand.
    static PANEL_BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Copied block of the left operand.
    static LHS_BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
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

/// Panels that the micro-kernel can read: the address of the first one, and the distance between
/// panels in elements.
#[derive(Clone, Copy)]
pub(super) struct PanelPointer<E> {
    pub(super) start: *const E,
    pub(super) panel_stride: usize,
}

/// Panels of the right operand in either storage format.
#[derive(Clone, Copy)]
pub(super) enum RhsPanels {
    F32(PanelPointer<f32>),
    /// The bits of bf16 weights.
    Bf16(PanelPointer<u16>),
}

impl RhsPanels {
    /// Returns a prefetch without effect.
    fn no_prefetch(self) -> Prefetch {
        match self {
            Self::F32(panels) => Prefetch::none(panels.start),
            Self::Bf16(panels) => Prefetch::none(panels.start),
        }
    }
}

/// Returns the offset of the sixteen weights of input `input` in panel `panel` of `weights`.
fn packed_offset(weights: &Panels, panel: usize, input: usize) -> usize {
    (panel * weights.cols() + input) * PANEL
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

    /// Returns whether the right operand must be copied or converted before the micro-kernel can
    /// read it, if it is multiplied by `rows` rows.
    pub(super) fn needs_panel_copy(&self, rows: usize) -> bool {
        match self.rhs {
            Rhs::Packed { weights, .. } => match weights.data() {
                PanelData::F32(_) => false,
                PanelData::Bf16(_) => rows > self.isa.max_rows_widened_in_registers(),
            },
            Rhs::Transposed { .. } | Rhs::Rows { .. } => true,
        }
    }

    /// Calls `then` with these steps of `group`, which will be multiplied by `rows` rows. Copies
    /// the panels first if necessary.
    pub(super) fn with_panels(
        &self,
        rows: usize,
        group: PanelGroup,
        steps: &Range<usize>,
        then: impl FnOnce(RhsPanels),
    ) {
        if !self.needs_panel_copy(rows)
            && let Rhs::Packed { weights, from } = self.rhs
        {
            let offset = packed_offset(weights, from / PANEL + group.first, steps.start);
            let panel_stride = weights.cols() * PANEL;
            return then(match weights.data() {
                PanelData::F32(data) => {
                    RhsPanels::F32(PanelPointer { start: data[offset..].as_ptr(), panel_stride })
                }
                PanelData::Bf16(data) => {
                    RhsPanels::Bf16(PanelPointer { start: data[offset..].as_ptr(), panel_stride })
                }
            });
        }
        PANEL_BUFFER.with_borrow_mut(|buffer| {
            let panel_stride = steps.len() * PANEL;
            buffer.resize(buffer.len().max(group.count * panel_stride), 0.0);
            let copies = buffer.chunks_exact_mut(panel_stride).take(group.count);
            for (i, copy) in copies.enumerate() {
                self.copy_panel(group.first + i, steps, copy);
            }
            then(RhsPanels::F32(PanelPointer { start: buffer.as_ptr(), panel_stride }));
        });
    }

    /// Copies these steps of one panel into `copy` as f32.
    fn copy_panel(&self, panel: usize, steps: &Range<usize>, copy: &mut [f32]) {
        let col = panel * PANEL;
        let cols = PANEL.min(self.size.cols - col);
        match self.rhs {
            Rhs::Packed { weights, from } => {
                let start = packed_offset(weights, from / PANEL + panel, steps.start);
                let range = start..start + steps.len() * PANEL;
                match weights.data() {
                    PanelData::F32(data) => copy.copy_from_slice(&data[range]),
                    PanelData::Bf16(data) => row_ops::widen(self.isa, &data[range], copy),
                }
            }
            Rhs::Transposed { weights, from } => {
                // The first step is a multiple of `BLOCK_DEPTH`, and `from` is a multiple of 16:
                // the steps start with the first output of a panel.
                let first_panel = (from + steps.start) / PANEL;
                for (i, copy) in copy.chunks_mut(PANEL * PANEL).enumerate() {
                    let start = packed_offset(weights, first_panel + i, col);
                    let range = start..start + cols * PANEL;
                    match weights.data() {
                        PanelData::F32(data) => row_ops::transpose(self.isa, &data[range], copy),
                        PanelData::Bf16(data) => {
                            row_ops::transpose_bf16(self.isa, &data[range], copy);
                        }
                    }
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

    /// Returns the weights to prefetch while these steps of `group` are computed: the following
    /// steps of the same panels if the block is `streaming`, else the same steps of the next
    /// panels. Only packed weights are prefetched.
    pub(super) fn prefetch(
        &self,
        rhs: RhsPanels,
        streaming: bool,
        group: PanelGroup,
        steps: &Range<usize>,
    ) -> Prefetch {
        let Rhs::Packed { weights, from } = self.rhs else { return rhs.no_prefetch() };
        let covers_the_depth = steps.len() == self.size.depth;
        let (panel, step) = if !streaming {
            (group.first + group.count, steps.start)
        } else if !covers_the_depth {
            (group.first, steps.end)
        } else if group.count == 1 {
            (group.first, PREFETCH_STEPS)
        } else {
            // The hardware prefetcher recognizes several parallel streams by itself.
            return rhs.no_prefetch();
        };
        // The address may lie past the end of the weights: a prefetch needs no valid address.
        let offset = packed_offset(weights, from / PANEL + panel, step);
        match weights.data() {
            PanelData::F32(data) => Prefetch::from(data.as_ptr().wrapping_add(offset)),
            PanelData::Bf16(data) => Prefetch::from(data.as_ptr().wrapping_add(offset)),
        }
    }
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
