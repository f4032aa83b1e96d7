//! [`BlockGrid`]: divides a matrix product into blocks, one per task.

use std::ops::Range;

use super::super::PANEL;
use super::super::tile::MAX_ROWS;
use super::block::MAX_TILE_PANELS;
use super::{GemmShape, Rhs};

/// Maximum number of left-hand rows per task. The part of the left operand with these rows stays in
/// the second-level cache while the task reads one panel after the other.
const BLOCK_ROWS: usize = 192;
/// Maximum number of left-hand rows per task if the panels must be transposed first. More rows
/// amortize the cost of transposing.
const BLOCK_ROWS_TRANSPOSED: usize = 768;
/// Number of tasks per thread, which balances the load.
const TASKS_PER_THREAD: usize = 4;
/// Number of tasks per thread if there are few rows. The products of a decode step are short, so
/// that the last task of each is noticeable.
const SMALL_TASKS_PER_THREAD: usize = 16;

/// Division of a product into blocks, one per task.
pub(super) struct BlockGrid {
    rows: usize,
    /// Number of blocks that divide the rows.
    row_blocks: usize,
    panels: usize,
    panels_per_block: usize,
}

impl BlockGrid {
    /// Divides a product for a pool of `threads` threads.
    pub(super) fn new(size: GemmShape, rhs: Rhs<'_>, threads: usize) -> Self {
        let max_rows = match rhs {
            Rhs::Transposed { .. } => BLOCK_ROWS_TRANSPOSED,
            Rhs::Packed { .. } | Rhs::Rows { .. } => BLOCK_ROWS,
        };
        let row_blocks = size.rows.div_ceil(max_rows);
        let panels = size.cols.div_ceil(PANEL);
        let few_rows = size.rows <= MAX_ROWS;
        let tasks_per_thread = if few_rows { SMALL_TASKS_PER_THREAD } else { TASKS_PER_THREAD };
        let wanted_panel_blocks = (threads * tasks_per_thread).div_ceil(row_blocks);
        let panels_per_block = if few_rows && panels <= threads * MAX_TILE_PANELS {
            // Every thread reads a part of a small matrix, even if its tiles have fewer panels.
            panels.div_ceil(threads)
        } else {
            // Only the last block of each row of blocks may have tiles with fewer panels.
            panels.div_ceil(wanted_panel_blocks).next_multiple_of(MAX_TILE_PANELS)
        };
        Self { rows: size.rows, row_blocks, panels, panels_per_block }
    }

    /// Returns the number of blocks that divide the panels.
    fn panel_blocks(&self) -> usize {
        self.panels.div_ceil(self.panels_per_block)
    }

    /// Returns the number of blocks.
    pub(super) fn count(&self) -> usize {
        self.row_blocks * self.panel_blocks()
    }

    /// Returns the rows and panels of block `index`.
    pub(super) fn block(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let row_block = index / self.panel_blocks();
        let panel_block = index % self.panel_blocks();
        let first_panel = panel_block * self.panels_per_block;
        (
            chunk_of(&(0..self.rows), self.row_blocks, row_block),
            first_panel..self.panels.min(first_panel + self.panels_per_block),
        )
    }
}

/// Returns chunk `index` of `parts` nearly equal chunks of `range`.
pub(super) fn chunk_of(range: &Range<usize>, parts: usize, index: usize) -> Range<usize> {
    let boundary = |index: usize| range.start + range.len() * index / parts;
    boundary(index)..boundary(index + 1)
}
