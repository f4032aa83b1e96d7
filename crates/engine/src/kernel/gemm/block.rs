//! [`CheckedGemm`]: computes one block of a matrix product, tile by tile.
//!
//! A block is a range of rows times a range of panels. Operands that the micro-kernel cannot read
//! efficiently in place are first copied into thread-local buffers.

#![expect(
    unsafe_code,
    reason = "tasks write disjoint blocks of one matrix; the micro-kernel takes raw addresses"
)]

use std::cell::RefCell;
use std::ops::Range;

use super::super::panels::PanelData;
use super::super::task_pool::SharedMut;
use super::super::tile::{Prefetch, ROWS, Tile};
use super::super::{Isa, PANEL, row_ops};
use super::{GemmShape, Lhs, Rhs};

/// Reduction steps per pass over the rows. A panel slice of this depth stays in the first-level
/// cache.
const BLOCK_DEPTH: usize = 256;
/// Reduction steps per pass if there are few rows. Such products are limited by memory bandwidth,
/// not by the size of the cache.
const FEW_ROWS_DEPTH: usize = 512;
/// Distance in reduction steps between the weights that a single tile reads and those that it
/// prefetches.
const PREFETCH_STEPS: usize = 128;

thread_local! {
    /// Copied or converted panels of the right operand.
    static PANEL_BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Copied block of the left operand.
    static LHS_BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Returns the row range of chunk `index` of `parts` nearly equal chunks.
pub(super) fn chunk_range(rows: usize, parts: usize, index: usize) -> Range<usize> {
    rows * index / parts..rows * (index + 1) / parts
}

/// A product whose operands passed [`check`](super::check).
pub(super) struct CheckedGemm<'a> {
    pub(super) isa: Isa,
    pub(super) size: GemmShape,
    pub(super) lhs: Lhs<'a>,
    pub(super) rhs: Rhs<'a>,
    pub(super) out: SharedMut<'a, f32>,
    /// First column of `out` that belongs to the product.
    pub(super) col: usize,
    pub(super) stride: usize,
    pub(super) zero_init: bool,
    /// Products that are accumulated into the same output, block by block.
    pub(super) epilogue: &'a [Self],
}

/// Rows from `first` and reduction steps from `from` of the left operand: element `(i, k)` is at
/// offset `(i - first) · row + (k - from) · step`.
#[derive(Clone, Copy)]
struct LhsBlock<'a> {
    data: &'a [f32],
    first: usize,
    from: usize,
    row: usize,
    step: usize,
}

/// Inputs of a tile: both operands, and the memory to prefetch meanwhile.
#[derive(Clone, Copy)]
struct TileOperands<'a> {
    lhs: LhsBlock<'a>,
    rhs: RhsPanels,
    prefetch: Prefetch,
}

/// Panels that the micro-kernel can read: the address of the first one, and the distance between
/// panels in elements.
#[derive(Clone, Copy)]
enum RhsPanels {
    F32 { start: *const f32, panel: usize },
    Bf16 { start: *const u16, panel: usize },
}

impl RhsPanels {
    /// Returns a prefetch without effect.
    fn no_prefetch(self) -> Prefetch {
        match self {
            Self::F32 { start, .. } => Prefetch::none(start),
            Self::Bf16 { start, .. } => Prefetch::none(start),
        }
    }
}

impl CheckedGemm<'_> {
    /// Computes the block of these rows and panels, including its epilogue.
    pub(super) fn compute_block(&self, rows: Range<usize>, panels: Range<usize>) {
        let count = rows.len();
        let tiles = count.div_ceil(ROWS);
        let group = Tile::<f32>::panels(self.isa, count.div_ceil(tiles));
        // Few rows stream the weights from memory, panel after panel. For many rows the outer loop
        // runs over slices of the depth, so that a panel slice stays in the cache until all rows
        // have used it. With a single tile nothing is read twice, so the depth is not split.
        let few = tiles <= 2 && !self.needs_copy(count);
        let (outer_steps, inner_steps) = match (few, tiles) {
            (true, 1) => (self.size.depth, self.size.depth),
            (true, _) => (self.size.depth, FEW_ROWS_DEPTH),
            (false, _) => (BLOCK_DEPTH, BLOCK_DEPTH),
        };
        for from in (0..self.size.depth).step_by(outer_steps) {
            let end = self.size.depth.min(from + outer_steps);
            self.with_lhs(&rows, from..end, panels.len(), |lhs| {
                let mut first = panels.start;
                while first < panels.end {
                    let group = if panels.end - first >= group { group } else { 1 };
                    for from in (from..end).step_by(inner_steps) {
                        let steps = from..end.min(from + inner_steps);
                        self.with_panels(count, first, group, from, steps.len(), |rhs| {
                            let prefetch = self.prefetch(rhs, few, (first, group), &steps);
                            for tile in 0..tiles {
                                let prefetch = prefetch.part(tile, tiles, steps.len());
                                let tile = chunk_range(count, tiles, tile);
                                let rows = rows.start + tile.start..rows.start + tile.end;
                                self.compute_tile(
                                    rows,
                                    (first, group),
                                    &steps,
                                    TileOperands { lhs, rhs, prefetch },
                                );
                            }
                        });
                    }
                    first += group;
                }
            });
        }
        for product in self.epilogue {
            let first = product.col / PANEL;
            let end = first + product.size.cols.div_ceil(PANEL);
            let here = panels.start.max(first)..panels.end.min(end);
            if !here.is_empty() {
                product.compute_block(rows.clone(), here.start - first..here.end - first);
            }
        }
    }

    /// Calls `then` with these rows and steps of the left operand.
    ///
    /// If many tiles read these elements, they are copied to a contiguous buffer first: elements
    /// whose addresses are a power of two apart map to the same cache set and evict each other.
    fn with_lhs(
        &self,
        rows: &Range<usize>,
        steps: Range<usize>,
        panels: usize,
        then: impl FnOnce(LhsBlock<'_>),
    ) {
        let Lhs { data, row, step } = self.lhs;
        let (count, depth, first, from) = (rows.len(), steps.len(), rows.start, steps.start);
        let data = &data[first * row + from * step..];
        let reused = if step == 1 { depth >= 64 && panels >= 8 } else { row == 1 && count > ROWS };
        if count == 1 || !reused {
            return then(LhsBlock { data, first, from, row, step });
        }
        LHS_BUFFER.with_borrow_mut(|copy| {
            // Rows are copied as rows, and columns as columns: `runs` contiguous runs of `len`
            // elements, which start `distance` elements apart in `data`.
            let (row, step, runs, len, distance) = match step {
                1 => (depth + PANEL, 1, count, depth, row),
                _ => (1, count, depth, count, step),
            };
            let stride = row.max(step);
            copy.resize(copy.len().max(runs * stride), 0.0);
            for (run, to) in copy.chunks_exact_mut(stride).take(runs).enumerate() {
                to[..len].copy_from_slice(&data[run * distance..][..len]);
            }
            then(LhsBlock { data: copy, first, from, row, step });
        });
    }

    /// Returns the weights to prefetch while these steps are computed: the following steps of the
    /// same panels if `streaming`, else the same steps of the next panels. Other right operands
    /// than packed weights are not prefetched.
    fn prefetch(
        &self,
        rhs: RhsPanels,
        streaming: bool,
        (first, group): (usize, usize),
        steps: &Range<usize>,
    ) -> Prefetch {
        let Rhs::Packed { weights, from } = self.rhs else { return rhs.no_prefetch() };
        let (panel, step) = match (streaming, steps.len() == self.size.depth) {
            // The hardware prefetcher recognizes several parallel streams by itself.
            (true, true) if group > 1 => return rhs.no_prefetch(),
            (true, true) => (first, PREFETCH_STEPS),
            (true, false) => (first, steps.end),
            (false, _) => (first + group, steps.start),
        };
        let offset = ((from / PANEL + panel) * weights.cols() + step) * PANEL;
        match weights.data() {
            PanelData::F32(data) => Prefetch::from(data.as_ptr().wrapping_add(offset)),
            PanelData::Bf16(data) => Prefetch::from(data.as_ptr().wrapping_add(offset)),
        }
    }

    /// Returns whether the right operand must be copied or converted before the micro-kernel can
    /// read it.
    fn needs_copy(&self, rows: usize) -> bool {
        match self.rhs {
            Rhs::Packed { weights, .. } => match weights.data() {
                PanelData::F32(_) => false,
                PanelData::Bf16(_) => rows > self.isa.max_rows_widened_in_registers(),
            },
            Rhs::Transposed { .. } | Rhs::Rows { .. } => true,
        }
    }

    /// Calls `then` with `depth` steps, from step `from`, of the `group` panels from panel `first`,
    /// copying them first if necessary.
    fn with_panels(
        &self,
        rows: usize,
        first: usize,
        group: usize,
        from: usize,
        depth: usize,
        then: impl FnOnce(RhsPanels),
    ) {
        if !self.needs_copy(rows)
            && let Rhs::Packed { weights, from: output } = self.rhs
        {
            let panel = weights.cols() * PANEL;
            let start = (output / PANEL + first) * panel + from * PANEL;
            return match weights.data() {
                PanelData::F32(data) => {
                    then(RhsPanels::F32 { start: data[start..].as_ptr(), panel });
                }
                PanelData::Bf16(data) => {
                    then(RhsPanels::Bf16 { start: data[start..].as_ptr(), panel });
                }
            };
        }
        PANEL_BUFFER.with_borrow_mut(|slices| {
            let panel = depth * PANEL;
            slices.resize(slices.len().max(group * panel), 0.0);
            for (p, slice) in slices.chunks_exact_mut(panel).take(group).enumerate() {
                self.copy_panel(first + p, from, depth, slice);
            }
            then(RhsPanels::F32 { start: slices.as_ptr(), panel });
        });
    }

    /// Copies `depth` steps, from step `from`, of one panel into `slice` as f32.
    fn copy_panel(&self, panel: usize, from: usize, depth: usize, slice: &mut [f32]) {
        let col = panel * PANEL;
        let cols = PANEL.min(self.size.cols - col);
        match self.rhs {
            Rhs::Packed { weights, from: output } => {
                let start = (output / PANEL + panel) * weights.cols() * PANEL + from * PANEL;
                match weights.data() {
                    PanelData::F32(data) => {
                        slice.copy_from_slice(&data[start..start + depth * PANEL]);
                    }
                    PanelData::Bf16(data) => {
                        row_ops::widen(self.isa, &data[start..start + depth * PANEL], slice);
                    }
                }
            }
            Rhs::Transposed { weights, from: output } => {
                // `from` is a multiple of `BLOCK_DEPTH`, hence of 16.
                let output = output + from;
                let panel_len = weights.cols() * PANEL;
                for (block, slice) in slice.chunks_mut(PANEL * PANEL).enumerate() {
                    let start = (output / PANEL + block) * panel_len + col * PANEL;
                    match weights.data() {
                        PanelData::F32(data) => {
                            row_ops::transpose(self.isa, &data[start..start + cols * PANEL], slice);
                        }
                        PanelData::Bf16(data) => {
                            row_ops::transpose_bf16(
                                self.isa,
                                &data[start..start + cols * PANEL],
                                slice,
                            );
                        }
                    }
                }
            }
            Rhs::Rows { data, stride } => {
                for (step, slice) in slice.chunks_exact_mut(PANEL).enumerate() {
                    let start = (from + step) * stride + col;
                    slice[..cols].copy_from_slice(&data[start..start + cols]);
                    slice[cols..].fill(0.0);
                }
            }
        }
    }

    /// Computes one tile: a few rows of `group` panels, the last of which may be partial.
    fn compute_tile(
        &self,
        rows: Range<usize>,
        (first, group): (usize, usize),
        steps: &Range<usize>,
        operands: TileOperands<'_>,
    ) {
        let col = first * PANEL;
        let cols = self.size.cols - col;
        if cols < group * PANEL {
            return self.compute_edge_tile(rows, col, cols, steps, operands);
        }
        let c = self.out.element_ptr(rows.start * self.stride + self.col + col);
        // SAFETY: `check` proved that `out` holds these columns of these rows, and no other task
        // computes them.
        unsafe { self.run_tile(rows, group, steps, operands, (c, self.stride)) }
    }

    /// Computes a tile whose last panel is partial, in a local buffer of whole panels.
    fn compute_edge_tile(
        &self,
        rows: Range<usize>,
        col: usize,
        cols: usize,
        steps: &Range<usize>,
        operands: TileOperands<'_>,
    ) {
        let group = cols.div_ceil(PANEL);
        let width = group * PANEL;
        let mut edge = [0.0_f32; ROWS * 4 * PANEL];
        let offset = |row: usize| row * self.stride + self.col + col;
        if !self.starts_at_zero(steps) {
            for (i, row) in rows.clone().enumerate() {
                // SAFETY: no other task computes these columns of this row.
                let out = unsafe { self.out.part(offset(row), cols) };
                edge[i * width..i * width + cols].copy_from_slice(out);
            }
        }
        // SAFETY: `edge` holds six rows of four panels, which no tile exceeds, and is local.
        unsafe {
            let c = edge.as_mut_ptr();
            self.run_tile(rows.clone(), group, steps, operands, (c, width));
        }
        for (i, row) in rows.enumerate() {
            // SAFETY: no other task computes these columns of this row.
            let out = unsafe { self.out.part(offset(row), cols) };
            out.copy_from_slice(&edge[i * width..i * width + cols]);
        }
    }

    /// Returns whether the accumulators start at zero (and not at the current output) for these
    /// steps.
    fn starts_at_zero(&self, steps: &Range<usize>) -> bool {
        self.zero_init && steps.start == 0
    }

    /// Runs the micro-kernel for these rows and `group` panels. The output rows start `c_row`
    /// elements apart from `c`.
    ///
    /// # Safety
    /// `c` must be valid for the rows and panels, and no other thread may access them. `operands`
    /// must come from `with_lhs` and `with_panels` with these rows, panels and steps.
    unsafe fn run_tile(
        &self,
        rows: Range<usize>,
        group: usize,
        steps: &Range<usize>,
        operands: TileOperands<'_>,
        (c, c_row): (*mut f32, usize),
    ) {
        let TileOperands { lhs, rhs, prefetch } = operands;
        let start = (rows.start - lhs.first) * lhs.row + (steps.start - lhs.from) * lhs.step;
        let a = lhs.data[start..].as_ptr();
        let (a_row, a_step) = (lhs.row, lhs.step);
        let (depth, zero_init) = (steps.len(), self.starts_at_zero(steps));
        let (rows, b_step) = (rows.len(), PANEL);
        // SAFETY: `check` proved that the left operand holds every element of these rows and steps;
        // a copy holds the same elements. `with_panels` provides `group` panels of at least `depth`
        // steps. The caller promises that `c` is valid.
        unsafe {
            match rhs {
                RhsPanels::F32 { start: b, panel: b_panel } => {
                    Tile {
                        depth,
                        a,
                        a_row,
                        a_step,
                        b,
                        b_panel,
                        b_step,
                        prefetch,
                        c,
                        c_row,
                        zero_init,
                    }
                    .run(self.isa, rows, group);
                }
                RhsPanels::Bf16 { start: b, panel: b_panel } => {
                    Tile {
                        depth,
                        a,
                        a_row,
                        a_step,
                        b,
                        b_panel,
                        b_step,
                        prefetch,
                        c,
                        c_row,
                        zero_init,
                    }
                    .run(self.isa, rows, group);
                }
            }
        }
    }
}
