//! [`CheckedGemm`]: computes one block of a matrix product, tile by tile.
//!
//! A block is a range of rows times a range of panels, and is computed by one task. A tile is a few
//! rows times a few panels, and is computed by one call of the micro-kernel for each range of
//! reduction steps. The file `operands` provides the operands of the tiles.

#![expect(
    unsafe_code,
    reason = "tasks write disjoint blocks of one matrix; the micro-kernel takes raw addresses"
)]

use std::ops::Range;

use super::super::panel_format::PanelFormat;
use super::super::panels::GROUP_PANELS;
use super::super::task_pool::SharedMut;
use super::super::tile::{MAX_ROWS, Prefetch, ROWS, Tile, tile_panels};
use super::super::weight_format::with_panel_format;
use super::super::{Isa, PANEL};
use super::grid::chunk_of;
use super::operands::{LhsBlock, RhsFormat, RhsPanels, RhsSegment};
use super::{GemmShape, InitialSum, Lhs, Rhs};

/// Reduction steps per pass over the rows. A panel slice of this depth stays in the first-level
/// cache.
const BLOCK_DEPTH: usize = 256;
/// Reduction steps per pass if there are few rows. Such products are limited by memory bandwidth,
/// not by the size of the cache.
const FEW_ROWS_DEPTH: usize = 512;
/// Maximum number of panels in a tile: as many as a group of packed weights has, so that a tile reads
/// one group.
pub(super) const MAX_TILE_PANELS: usize = GROUP_PANELS;

/// Maximum number of elements in a tile.
const MAX_EDGE: usize = MAX_ROWS * MAX_TILE_PANELS * PANEL;

/// A product whose operands passed [`check_bounds`](super::check_bounds).
#[derive(Clone, Copy)]
pub(super) struct CheckedGemm<'a> {
    pub(super) isa: Isa,
    pub(super) size: GemmShape,
    pub(super) lhs: Lhs<'a>,
    pub(super) rhs: Rhs<'a>,
    pub(super) out: SharedMut<'a, f32>,
    /// First column of `out` that belongs to the product, a multiple of 16.
    pub(super) first_col: usize,
    /// Distance between the rows of `out` in elements.
    pub(super) out_stride: usize,
    pub(super) initial: InitialSum,
    /// Products that are accumulated into the same output, block by block.
    pub(super) epilogue: &'a [Self],
}

/// Order of the loops over a block.
struct BlockPlan {
    /// Rows of the block.
    rows: Range<usize>,
    /// Number of tiles that the rows are divided into.
    tiles: usize,
    /// Number of panels in a tile.
    tile_panels: usize,
    /// Whether the right operand is decoded or copied before the micro-kernel reads it.
    copy: bool,
    /// Whether the weights are read from memory only once, panel after panel.
    streaming: bool,
    /// Reduction steps per iteration of the loop around the panels.
    outer_steps: usize,
    /// Reduction steps per iteration of the loop inside a group of panels.
    inner_steps: usize,
}

/// Adjacent panels, which one tile covers: the index of the first one, and their number.
#[derive(Clone, Copy)]
pub(super) struct PanelGroup {
    pub(super) first: usize,
    pub(super) count: usize,
}

/// Part of the product that one tile computes: rows, panels and reduction steps.
struct TileArea {
    rows: Range<usize>,
    group: PanelGroup,
    steps: Range<usize>,
}

/// Inputs of a tile: both operands, and the memory to prefetch while the tile is computed.
#[derive(Clone, Copy)]
struct TileOperands<'a> {
    lhs: LhsBlock<'a>,
    rhs: RhsPanels,
    prefetch: Prefetch,
}

/// Output of a tile: the address of its first element, and the distance between rows in elements.
#[derive(Clone, Copy)]
struct TileOutput {
    start: *mut f32,
    row_stride: usize,
}

/// Divides a range into consecutive ranges of length `len`; the last one may be shorter.
fn ranges_of(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..end.min(start + len))
}

/// Divides panels into tiles of `count` panels, and of single panels where fewer are left in the
/// panels or in their group of packed weights: 11 panels in tiles of 4 give tiles of 4, 4, 1, 1 and
/// 1 panels. The micro-kernel has tiles of these sizes only.
fn tiles_of(segment: &RhsSegment, count: usize) -> impl Iterator<Item = PanelGroup> {
    let mut next = segment.panels.start;
    let end = segment.panels.end;
    let mut position = segment.position_in_group;
    std::iter::from_fn(move || {
        let first = next;
        let left = end - next;
        let count = if left.min(GROUP_PANELS - position) >= count { count } else { 1 };
        next += count;
        position = (position + count) % GROUP_PANELS;
        (left > 0).then_some(PanelGroup { first, count })
    })
}

impl CheckedGemm<'_> {
    /// Computes the block of these rows and panels, including its epilogue.
    pub(super) fn compute_block(&self, rows: Range<usize>, panels: Range<usize>) {
        for segment in self.segments(panels.clone()) {
            let plan = self.plan(rows.clone(), segment.format);
            for outer_steps in ranges_of(0..self.size.depth, plan.outer_steps) {
                self.with_lhs(&plan.rows, &outer_steps, segment.panels.len(), |lhs| {
                    for group in tiles_of(&segment, plan.tile_panels) {
                        for steps in ranges_of(outer_steps.clone(), plan.inner_steps) {
                            self.compute_tiles(&plan, group, &steps, lhs);
                        }
                    }
                });
            }
        }
        self.compute_epilogue(&rows, &panels);
    }

    /// Chooses the order of the loops for a block of these rows and panels of this format.
    ///
    /// Few rows stream the weights from memory, panel after panel. For many rows the outer loop
    /// runs over slices of the depth, so that a panel slice stays in the cache until all rows have
    /// used it.
    fn plan(&self, rows: Range<usize>, format: RhsFormat) -> BlockPlan {
        let (copy, quantized) = match format {
            RhsFormat::Packed(format) => {
                (rows.len() > self.isa.max_rows_decoded_in_registers(format), format.is_quantized())
            }
            RhsFormat::Copied => (true, false),
        };
        let panels = |rows: usize| tile_panels(self.isa, rows, quantized && !copy);
        let tiles = match rows.len() {
            // A single tile decodes the weights once.
            few if few <= MAX_ROWS && panels(few) > 0 => 1,
            many => many.div_ceil(ROWS),
        };
        let streaming = tiles <= 2 && !copy;
        let (outer_steps, inner_steps) = match (streaming, tiles) {
            // A single tile reads nothing twice, so the depth is not split.
            (true, 1) => (self.size.depth, self.size.depth),
            (true, _) => (self.size.depth, FEW_ROWS_DEPTH),
            (false, _) => (BLOCK_DEPTH, BLOCK_DEPTH),
        };
        let tile_panels = panels(rows.len().div_ceil(tiles));
        BlockPlan { rows, tiles, tile_panels, copy, streaming, outer_steps, inner_steps }
    }

    /// Computes these steps of one group of panels for all rows of the block.
    fn compute_tiles(
        &self,
        plan: &BlockPlan,
        group: PanelGroup,
        steps: &Range<usize>,
        lhs: LhsBlock<'_>,
    ) {
        self.with_panels(plan.copy, group, steps, |rhs| {
            let prefetch = self.prefetch(rhs, plan.streaming, group, steps);
            let chunks = with_panel_format!(rhs.format, F => steps.len() / F::CHUNK_INPUTS);
            for tile in 0..plan.tiles {
                let prefetch = prefetch.share(tile, plan.tiles, chunks);
                let rows = chunk_of(&plan.rows, plan.tiles, tile);
                let area = TileArea { rows, group, steps: steps.clone() };
                self.compute_tile(&area, TileOperands { lhs, rhs, prefetch });
            }
        });
    }

    /// Computes the part of the epilogue that falls on these rows and panels of the output.
    fn compute_epilogue(&self, rows: &Range<usize>, panels: &Range<usize>) {
        for product in self.epilogue {
            let first = product.first_col / PANEL;
            let end = first + product.size.cols.div_ceil(PANEL);
            let common = panels.start.max(first)..panels.end.min(end);
            if !common.is_empty() {
                // The product numbers its panels from its own first column.
                product.compute_block(rows.clone(), common.start - first..common.end - first);
            }
        }
    }

    /// Computes one tile, whose last panel may be partial. `operands` must be the operands of `area`.
    fn compute_tile(&self, area: &TileArea, operands: TileOperands<'_>) {
        let TileArea { rows, group, .. } = area;
        if self.cols_from(*group) < group.count * PANEL {
            return self.compute_edge_tile(area, operands);
        }
        let start = self.out.element_ptr(self.out_offset(rows.start, *group));
        let out = TileOutput { start, row_stride: self.out_stride };
        // SAFETY: `check_bounds` proved that `out` holds these columns of these rows, and no other
        // task computes them. `compute_tiles` created the operands for this area.
        unsafe { self.run_tile(area, operands, out) }
    }

    /// Computes a tile whose last panel is partial, in a local buffer of whole panels.
    fn compute_edge_tile(&self, area: &TileArea, operands: TileOperands<'_>) {
        let TileArea { rows, group, steps } = area;
        let cols = self.cols_from(*group);
        let width = group.count * PANEL;
        let mut edge = [0.0_f32; MAX_EDGE];
        if self.initial_sum(steps) == InitialSum::Output {
            for (row, edge) in rows.clone().zip(edge.chunks_exact_mut(width)) {
                // SAFETY: no other task computes these columns of this row.
                let out = unsafe { self.out.part(self.out_offset(row, *group), cols) };
                edge[..cols].copy_from_slice(out);
            }
        }
        let local = TileOutput { start: edge.as_mut_ptr(), row_stride: width };
        // SAFETY: `edge` holds the rows and panels of every tile and is local. `compute_tiles`
        // created the operands for this area.
        unsafe { self.run_tile(area, operands, local) };
        for (row, edge) in rows.clone().zip(edge.chunks_exact(width)) {
            // SAFETY: no other task computes these columns of this row.
            let out = unsafe { self.out.part(self.out_offset(row, *group), cols) };
            out.copy_from_slice(&edge[..cols]);
        }
    }

    /// Returns the number of columns of the product from the first panel of `group`.
    fn cols_from(&self, group: PanelGroup) -> usize {
        self.size.cols - group.first * PANEL
    }

    /// Returns the offset in `out` of the first column of `group` in row `row`.
    fn out_offset(&self, row: usize, group: PanelGroup) -> usize {
        row * self.out_stride + self.first_col + group.first * PANEL
    }

    /// Returns the initial value of the accumulators for these steps. Later steps of a product
    /// continue from the sums of the earlier ones, which are in the output.
    fn initial_sum(&self, steps: &Range<usize>) -> InitialSum {
        if steps.start == 0 { self.initial } else { InitialSum::Output }
    }

    /// Runs the micro-kernel for this area.
    ///
    /// # Safety
    /// `out` must be valid for the rows and panels of `area`, and no other thread may access them.
    /// `operands` must come from `with_lhs` and `with_panels` with the rows, panels and steps of
    /// `area`.
    unsafe fn run_tile(&self, area: &TileArea, operands: TileOperands<'_>, out: TileOutput) {
        let TileArea { rows, group, steps } = area;
        let TileOperands { lhs, rhs, prefetch } = operands;
        let tile = Tile {
            depth: steps.len(),
            a: lhs.element_ptr(rows.start, steps.start),
            a_row: lhs.row_stride,
            a_step: lhs.step_stride,
            b: rhs.start,
            b_panel: rhs.panel_stride,
            b_block: rhs.block_stride,
            prefetch,
            c: out.start,
            c_row: out.row_stride,
            zero_init: self.initial_sum(steps) == InitialSum::Zero,
        };
        // SAFETY: `check_bounds` proved that the left operand holds every element of these rows and
        // steps; a copy holds the same elements. `with_panels` provides these panels, with the
        // distances between panels and blocks, for at least these steps. Steps start with a block,
        // and end with a block or with the last input. The number of inputs of quantized weights is a
        // multiple of their block, which `Panels::stack` checked. The caller promises that `out` is
        // valid.
        unsafe {
            with_panel_format!(rhs.format, F => tile.run::<F>(self.isa, rows.len(), group.count));
        }
    }
}
