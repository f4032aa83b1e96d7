//! [`CheckedGemm`]: one block of a product, tile by tile, and what is copied together first.

#![expect(
    unsafe_code,
    reason = "tasks write disjoint blocks of one matrix; tiles take raw addresses"
)]

use std::cell::RefCell;
use std::ops::Range;

use super::super::panels::PanelData;
use super::super::task_pool::SharedMut;
use super::super::tile::{Prefetch, ROWS, Tile};
use super::super::{Isa, PANEL, row_ops};
use super::{GemmShape, Lhs, Rhs};

/// Length of the chains in one go; a slice of a panel of that length stays in the first-level cache.
const BLOCK_DEPTH: usize = 256;
/// The same for few rows, which wait for memory more than for the caches.
const FEW_DEPTH: usize = 512;
/// How many steps ahead of a single tile memory is asked.
const AHEAD: usize = 128;

thread_local! {
    static SLICES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static LEFT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Where the rows of one of `parts` nearly equal parts are.
pub(super) fn chunk_range(rows: usize, parts: usize, index: usize) -> Range<usize> {
    rows * index / parts..rows * (index + 1) / parts
}

/// A product, checked.
pub(super) struct CheckedGemm<'a> {
    pub(super) isa: Isa,
    pub(super) size: GemmShape,
    pub(super) lhs: Lhs<'a>,
    pub(super) rhs: Rhs<'a>,
    pub(super) out: SharedMut<'a, f32>,
    /// The column of `out` where its own begin.
    pub(super) col: usize,
    pub(super) stride: usize,
    pub(super) zero_init: bool,
    /// What goes on its chains.
    pub(super) after: &'a [Self],
}

/// Some rows and steps of the left side: element `(i, k)` stands at
/// `(i - first) · row + (k - from) · step`.
#[derive(Clone, Copy)]
struct LhsBlock<'a> {
    data: &'a [f32],
    first: usize,
    from: usize,
    row: usize,
    step: usize,
}

/// What a tile reads: its left and its right side, and what comes after that.
#[derive(Clone, Copy)]
struct TileOperands<'a> {
    left: LhsBlock<'a>,
    ready: RhsPanels,
    next: Prefetch,
}

/// Panels ready to be read by tiles.
#[derive(Clone, Copy)]
enum RhsPanels {
    F32 { start: *const f32, panel: usize },
    Bf16 { start: *const u16, panel: usize },
}

impl RhsPanels {
    fn nothing_next(self) -> Prefetch {
        match self {
            Self::F32 { start, .. } => Prefetch::none(start),
            Self::Bf16 { start, .. } => Prefetch::none(start),
        }
    }
}

impl CheckedGemm<'_> {
    /// Computes one block of rows of some panels.
    pub(super) fn block(&self, rows: Range<usize>, panels: Range<usize>) {
        let count = rows.len();
        let tiles = count.div_ceil(ROWS);
        let group = Tile::<f32>::panels(self.isa, count.div_ceil(tiles));
        // Few rows take the weights as memory brings them, panel after panel. For many rows a slice
        // of a panel stays at hand until all have seen it. With one tile nothing is read twice, so
        // nothing is cut.
        let few = tiles <= 2 && !self.needs_copy(count);
        let (long, short) = match (few, tiles) {
            (true, 1) => (self.size.depth, self.size.depth),
            (true, _) => (self.size.depth, FEW_DEPTH),
            (false, _) => (BLOCK_DEPTH, BLOCK_DEPTH),
        };
        for from in (0..self.size.depth).step_by(long) {
            let end = self.size.depth.min(from + long);
            self.with_left(&rows, from..end, panels.len(), |left| {
                let mut first = panels.start;
                while first < panels.end {
                    let group = if panels.end - first >= group { group } else { 1 };
                    for from in (from..end).step_by(short) {
                        let steps = from..end.min(from + short);
                        self.with_ready(count, first, group, from, steps.len(), |ready| {
                            let next = self.next(ready, few, (first, group), &steps);
                            for tile in 0..tiles {
                                let next = next.part(tile, tiles, steps.len());
                                let tile = chunk_range(count, tiles, tile);
                                let rows = rows.start + tile.start..rows.start + tile.end;
                                self.tile(
                                    rows,
                                    (first, group),
                                    &steps,
                                    TileOperands { left, ready, next },
                                );
                            }
                        });
                    }
                    first += group;
                }
            });
        }
        for more in self.after {
            let first = more.col / PANEL;
            let end = first + more.size.cols.div_ceil(PANEL);
            let here = panels.start.max(first)..panels.end.min(end);
            if !here.is_empty() {
                more.block(rows.clone(), here.start - first..here.end - first);
            }
        }
    }

    /// The left side of some rows and steps. Where tiles read it often it is copied together: rows a
    /// power of two apart and columns compete for the same places of the caches.
    fn with_left(
        &self,
        rows: &Range<usize>,
        steps: Range<usize>,
        panels: usize,
        then: impl FnOnce(LhsBlock<'_>),
    ) {
        let Lhs { data, row, step } = self.lhs;
        let (count, depth, first, from) = (rows.len(), steps.len(), rows.start, steps.start);
        let data = &data[first * row + from * step..];
        let often = if step == 1 { depth >= 64 && panels >= 8 } else { row == 1 && count > ROWS };
        if count == 1 || !often {
            return then(LhsBlock { data, first, from, row, step });
        }
        LEFT.with_borrow_mut(|copy| {
            let (row, step, lines, len, apart) = match step {
                1 => (depth + PANEL, 1, count, depth, row),
                _ => (1, count, depth, count, step),
            };
            let wide = row.max(step);
            copy.resize(copy.len().max(lines * wide), 0.0);
            for (line, to) in copy.chunks_exact_mut(wide).take(lines).enumerate() {
                to[..len].copy_from_slice(&data[line * apart..][..len]);
            }
            then(LhsBlock { data: copy, first, from, row, step });
        });
    }

    /// What will be read from memory after these steps, if weights are read as they stand: those
    /// behind them if rows take them `along` the panels, else the same steps of the next panel.
    fn next(
        &self,
        ready: RhsPanels,
        along: bool,
        (first, group): (usize, usize),
        steps: &Range<usize>,
    ) -> Prefetch {
        let Rhs::Packed { weights, from } = self.rhs else { return ready.nothing_next() };
        let (panel, step) = match (along, steps.len() == self.size.depth) {
            // Of several panels at once memory sees by itself where they go.
            (true, true) if group > 1 => return ready.nothing_next(),
            (true, true) => (first, AHEAD),
            (true, false) => (first, steps.end),
            (false, _) => (first + group, steps.start),
        };
        let place = ((from / PANEL + panel) * weights.cols() + step) * PANEL;
        match weights.data() {
            PanelData::F32(data) => Prefetch::from(data.as_ptr().wrapping_add(place)),
            PanelData::Bf16(data) => Prefetch::from(data.as_ptr().wrapping_add(place)),
        }
    }

    fn needs_copy(&self, rows: usize) -> bool {
        match self.rhs {
            Rhs::Packed { weights, .. } => match weights.data() {
                PanelData::F32(_) => false,
                PanelData::Bf16(_) => rows > self.isa.widened_in_registers(),
            },
            Rhs::Transposed { .. } | Rhs::Rows { .. } => true,
        }
    }

    /// Makes slices of `group` panels readable, by copying them if they are not.
    fn with_ready(
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
                    then(RhsPanels::F32 { start: data[start..].as_ptr(), panel })
                }
                PanelData::Bf16(data) => {
                    then(RhsPanels::Bf16 { start: data[start..].as_ptr(), panel })
                }
            };
        }
        SLICES.with_borrow_mut(|slices| {
            let panel = depth * PANEL;
            slices.resize(slices.len().max(group * panel), 0.0);
            for (p, slice) in slices.chunks_exact_mut(panel).take(group).enumerate() {
                self.copy(first + p, from, depth, slice);
            }
            then(RhsPanels::F32 { start: slices.as_ptr(), panel });
        });
    }

    /// Copies `depth` steps of one panel into `slice`.
    fn copy(&self, panel: usize, from: usize, depth: usize, slice: &mut [f32]) {
        let col = panel * PANEL;
        let cols = PANEL.min(self.size.cols - col);
        match self.rhs {
            Rhs::Packed { weights, from: output } => {
                let start = (output / PANEL + panel) * weights.cols() * PANEL + from * PANEL;
                match weights.data() {
                    PanelData::F32(data) => {
                        slice.copy_from_slice(&data[start..start + depth * PANEL])
                    }
                    PanelData::Bf16(data) => {
                        row_ops::widen(self.isa, &data[start..start + depth * PANEL], slice);
                    }
                }
            }
            Rhs::Transposed { weights, from: output } => {
                // `from` is a multiple of the block's depth, which is one of 16.
                let output = output + from;
                let sixteen = weights.cols() * PANEL;
                for (block, slice) in slice.chunks_mut(PANEL * PANEL).enumerate() {
                    let start = (output / PANEL + block) * sixteen + col * PANEL;
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

    /// Computes one tile: a few rows of a few panels, the last of which may be cut off.
    fn tile(
        &self,
        rows: Range<usize>,
        (first, group): (usize, usize),
        steps: &Range<usize>,
        sides: TileOperands<'_>,
    ) {
        let col = first * PANEL;
        let cols = self.size.cols - col;
        if cols < group * PANEL {
            return self.edge(rows, col, cols, steps, sides);
        }
        let c = self.out.address(rows.start * self.stride + self.col + col);
        // SAFETY: `check` proved that `out` holds these columns of these rows, and no other task has
        // them.
        unsafe { self.sums(rows, group, steps, sides, (c, self.stride)) }
    }

    /// The last panel where its columns do not fill it: computed aside.
    fn edge(
        &self,
        rows: Range<usize>,
        col: usize,
        cols: usize,
        steps: &Range<usize>,
        sides: TileOperands<'_>,
    ) {
        let group = cols.div_ceil(PANEL);
        let width = group * PANEL;
        let mut edge = [0.0_f32; ROWS * 4 * PANEL];
        let place = |row: usize| row * self.stride + self.col + col;
        if !self.begins(steps) {
            for (i, row) in rows.clone().enumerate() {
                // SAFETY: this row and these columns belong to this task alone.
                let out = unsafe { self.out.part(place(row), cols) };
                edge[i * width..i * width + cols].copy_from_slice(out);
            }
        }
        // SAFETY: `edge` has room for six rows of four panels, and is our own.
        unsafe {
            let c = edge.as_mut_ptr();
            self.sums(rows.clone(), group, steps, sides, (c, width));
        }
        for (i, row) in rows.enumerate() {
            // SAFETY: as above.
            let out = unsafe { self.out.part(place(row), cols) };
            out.copy_from_slice(&edge[i * width..i * width + cols]);
        }
    }

    /// Whether the chains begin with these steps.
    fn begins(&self, steps: &Range<usize>) -> bool {
        self.zero_init && steps.start == 0
    }

    /// Runs the tile of these rows and `group` panels into `c`, whose rows are `c_row` apart.
    ///
    /// # Safety
    /// `c` must have room for the rows and be nobody else's. `sides` come from
    /// `with_left` and `with_ready` with these rows, panels and steps.
    unsafe fn sums(
        &self,
        rows: Range<usize>,
        group: usize,
        steps: &Range<usize>,
        sides: TileOperands<'_>,
        (c, c_row): (*mut f32, usize),
    ) {
        let TileOperands { left, ready, next } = sides;
        let start = (rows.start - left.first) * left.row + (steps.start - left.from) * left.step;
        let a = left.data[start..].as_ptr();
        let (a_row, a_step) = (left.row, left.step);
        let (depth, zero_init) = (steps.len(), self.begins(steps));
        let (rows, b_step) = (rows.len(), PANEL);
        // SAFETY: `check` proved that the left side holds every element of these rows and steps, and
        // so does a copy of it, which has all of them; `with_ready` gave `group` panels of at least `depth` steps; `c` is the caller's promise.
        // The machine has `isa`.
        unsafe {
            match ready {
                RhsPanels::F32 { start: b, panel: b_panel } => {
                    Tile { depth, a, a_row, a_step, b, b_panel, b_step, next, c, c_row, zero_init }
                        .run(self.isa, rows, group);
                }
                RhsPanels::Bf16 { start: b, panel: b_panel } => {
                    Tile { depth, a, a_row, a_step, b, b_panel, b_step, next, c, c_row, zero_init }
                        .run(self.isa, rows, group);
                }
            }
        }
    }
}
