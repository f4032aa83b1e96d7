//! Matrix products: who computes which tile, and what is copied together first.

#![expect(
    unsafe_code,
    reason = "tasks write disjoint blocks of one matrix; tiles take raw addresses"
)]

use std::cell::RefCell;

use super::panels::Data;
use super::pool::SharedMut;
use super::tile::{ROWS, Tile};
use super::{Isa, Kernel, PANEL, Panels, rows};

/// Rows whose part of the left side stays in the second-level cache while panels pass by.
const BLOCK_ROWS: usize = 192;
/// The same where panels have to be turned first, which pays only over more rows.
const BLOCK_ROWS_TURNED: usize = 768;
/// Length of the chains in one go; a slice of a panel of that length stays in the first-level cache.
const BLOCK_DEPTH: usize = 256;
/// Up to so many rows bf16 weights are widened in registers, above it once for all rows.
const FEW_ROWS: usize = 12;

thread_local! {
    static SLICES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The left side of a product.
#[derive(Clone, Copy)]
pub(crate) struct Lhs<'a> {
    data: &'a [f32],
    row: usize,
    step: usize,
}

impl<'a> Lhs<'a> {
    /// Rows that begin `stride` apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, row: stride, step: 1 }
    }

    /// The columns of a matrix whose rows begin `stride` apart.
    pub(crate) fn columns(data: &'a [f32], stride: usize) -> Self {
        Self { data, row: 1, step: stride }
    }
}

/// The right side of a product.
#[derive(Clone, Copy)]
pub(crate) enum Rhs<'a> {
    /// Packed weights: outputs `from` and on (a multiple of 16), summed over the inputs.
    Packed { weights: &'a Panels, from: usize },
    /// The same matrix turned: inputs, summed over the outputs `from` and on (a multiple of 16).
    Turned { weights: &'a Panels, from: usize },
    /// Rows of outputs, `stride` apart, summed over the rows.
    Rows { data: &'a [f32], stride: usize },
}

impl<'a> Rhs<'a> {
    pub(crate) fn packed(weights: &'a Panels) -> Self {
        Self::Packed { weights, from: 0 }
    }

    pub(crate) fn turned(weights: &'a Panels) -> Self {
        Self::Turned { weights, from: 0 }
    }
}

/// Sizes of a product: `rows × depth` times `depth × cols`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) cols: usize,
}

impl Kernel {
    /// `out = lhs · rhs`, rows of `out` being `stride` apart.
    pub(crate) fn product(
        &self,
        (rows, depth, cols): (usize, usize, usize),
        lhs: Lhs<'_>,
        rhs: Rhs<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        self.multiply(Size { rows, depth, cols }, lhs, rhs, out, stride, true);
    }

    /// `out += lhs · rhs`: the chains go on from what is there.
    pub(crate) fn add_product(
        &self,
        (rows, depth, cols): (usize, usize, usize),
        lhs: Lhs<'_>,
        rhs: Rhs<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        self.multiply(Size { rows, depth, cols }, lhs, rhs, out, stride, false);
    }

    fn multiply(
        &self,
        size: Size,
        lhs: Lhs<'_>,
        rhs: Rhs<'_>,
        out: &mut [f32],
        stride: usize,
        fresh: bool,
    ) {
        let Size { rows, depth, cols } = size;
        if rows == 0 || cols == 0 {
            return;
        }
        check(size, lhs, rhs, out.len(), stride);
        if depth == 0 {
            if fresh {
                out.chunks_mut(stride).take(rows).for_each(|row| row[..cols].fill(0.0));
            }
            return;
        }
        let most = match rhs {
            Rhs::Turned { .. } => BLOCK_ROWS_TURNED,
            _ => BLOCK_ROWS,
        };
        let blocks = rows.div_ceil(most);
        let panels = cols.div_ceil(PANEL);
        // Enough tasks for every thread to have several, of four panels at least.
        let wanted = (self.pool.threads() * 4).div_ceil(blocks);
        let per_task = panels.div_ceil(wanted).next_multiple_of(4);
        let tasks = panels.div_ceil(per_task);
        let job = Job { isa: self.isa, size, lhs, rhs, out: SharedMut::new(out), stride, fresh };
        self.pool.each_if_worth(rows * depth * cols, blocks * tasks, |task| {
            let (block, task) = (task / tasks, task % tasks);
            let rows = part(rows, blocks, block);
            let panels = task * per_task..panels.min((task + 1) * per_task);
            job.block(rows, panels);
        });
    }
}

/// Where the rows of one of `parts` nearly equal parts are.
fn part(rows: usize, parts: usize, index: usize) -> std::ops::Range<usize> {
    rows * index / parts..rows * (index + 1) / parts
}

/// Every address that a product touches lies inside its slices.
fn check(size: Size, lhs: Lhs<'_>, rhs: Rhs<'_>, out: usize, stride: usize) {
    let Size { rows, depth, cols } = size;
    assert!(stride >= cols && out >= (rows - 1) * stride + cols, "out is too short: {size:?}");
    if depth == 0 {
        return;
    }
    let last = (rows - 1) * lhs.row + (depth - 1) * lhs.step;
    assert!(last < lhs.data.len(), "the left side is too short: {size:?}");
    match rhs {
        Rhs::Packed { weights, from } => {
            assert!(from % PANEL == 0 && from + cols <= weights.rows(), "outputs: {size:?}");
            assert_eq!(depth, weights.cols(), "inputs");
        }
        Rhs::Turned { weights, from } => {
            assert!(from % PANEL == 0 && from + depth <= weights.rows(), "outputs: {size:?}");
            assert_eq!(cols, weights.cols(), "inputs");
        }
        Rhs::Rows { data, stride } => {
            assert!(stride >= cols && data.len() >= (depth - 1) * stride + cols, "right: {size:?}");
        }
    }
}

struct Job<'a> {
    isa: Isa,
    size: Size,
    lhs: Lhs<'a>,
    rhs: Rhs<'a>,
    out: SharedMut<'a, f32>,
    stride: usize,
    fresh: bool,
}

/// Panels ready to be read by tiles.
#[derive(Clone, Copy)]
enum Ready {
    F32 { start: *const f32, panel: usize },
    Bf16 { start: *const u16, panel: usize },
}

impl Job<'_> {
    /// Computes one block of rows of some panels.
    fn block(&self, rows: std::ops::Range<usize>, panels: std::ops::Range<usize>) {
        let count = rows.len();
        let tiles = count.div_ceil(ROWS);
        let group = Tile::<f32>::panels(self.isa, count.div_ceil(tiles));
        // With one tile of rows nothing is read twice, so nothing is cut.
        let depth =
            if tiles == 1 && !self.needs_copy(count) { self.size.depth } else { BLOCK_DEPTH };
        for from in (0..self.size.depth).step_by(depth) {
            let depth = depth.min(self.size.depth - from);
            let mut first = panels.start;
            while first < panels.end {
                let group = if panels.end - first >= group { group } else { 1 };
                self.with_ready(count, first, group, from, depth, |ready| {
                    for tile in 0..tiles {
                        let tile = part(count, tiles, tile);
                        let rows = rows.start + tile.start..rows.start + tile.end;
                        self.tile(rows, first, group, from, depth, ready);
                    }
                });
                first += group;
            }
        }
    }

    fn needs_copy(&self, rows: usize) -> bool {
        match self.rhs {
            Rhs::Packed { weights, .. } => {
                matches!(weights.data(), Data::Bf16(_)) && rows > FEW_ROWS
            }
            Rhs::Turned { .. } | Rhs::Rows { .. } => true,
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
        then: impl FnOnce(Ready),
    ) {
        if !self.needs_copy(rows)
            && let Rhs::Packed { weights, from: output } = self.rhs
        {
            let panel = weights.cols() * PANEL;
            let start = (output / PANEL + first) * panel + from * PANEL;
            return match weights.data() {
                Data::F32(data) => then(Ready::F32 { start: data[start..].as_ptr(), panel }),
                Data::Bf16(data) => then(Ready::Bf16 { start: data[start..].as_ptr(), panel }),
            };
        }
        SLICES.with_borrow_mut(|slices| {
            let panel = depth * PANEL;
            slices.resize(slices.len().max(group * panel), 0.0);
            for (p, slice) in slices.chunks_exact_mut(panel).take(group).enumerate() {
                self.copy(first + p, from, depth, slice);
            }
            then(Ready::F32 { start: slices.as_ptr(), panel });
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
                    Data::F32(data) => slice.copy_from_slice(&data[start..start + depth * PANEL]),
                    Data::Bf16(data) => {
                        rows::widen(self.isa, &data[start..start + depth * PANEL], slice);
                    }
                }
            }
            Rhs::Turned { weights, from: output } => {
                // `from` is a multiple of the block's depth, which is one of 16.
                let output = output + from;
                let sixteen = weights.cols() * PANEL;
                for (block, slice) in slice.chunks_mut(PANEL * PANEL).enumerate() {
                    let start = (output / PANEL + block) * sixteen + col * PANEL;
                    match weights.data() {
                        Data::F32(data) => {
                            rows::turn(self.isa, &data[start..start + cols * PANEL], slice);
                        }
                        Data::Bf16(data) => {
                            rows::turn_bf16(self.isa, &data[start..start + cols * PANEL], slice);
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
        rows: std::ops::Range<usize>,
        first: usize,
        group: usize,
        from: usize,
        depth: usize,
        ready: Ready,
    ) {
        let col = first * PANEL;
        let fresh = self.fresh && from == 0;
        let cols = self.size.cols - col;
        if cols < group * PANEL {
            return self.edge(rows, col, cols, (from, depth, fresh), ready);
        }
        let c = self.out.address(rows.start * self.stride + col);
        // SAFETY: `check` proved that `out` holds these columns of these rows, and no other task has
        // them.
        unsafe { self.sums(rows, group, (from, depth, fresh), ready, c, self.stride) }
    }

    /// The last panel where its columns do not fill it: computed aside.
    fn edge(
        &self,
        rows: std::ops::Range<usize>,
        col: usize,
        cols: usize,
        (from, depth, fresh): (usize, usize, bool),
        ready: Ready,
    ) {
        let group = cols.div_ceil(PANEL);
        let width = group * PANEL;
        let mut edge = [0.0_f32; ROWS * 4 * PANEL];
        let place = |row: usize| row * self.stride + col;
        if !fresh {
            for (i, row) in rows.clone().enumerate() {
                // SAFETY: this row and these columns belong to this task alone.
                let out = unsafe { self.out.part(place(row), cols) };
                edge[i * width..i * width + cols].copy_from_slice(out);
            }
        }
        // SAFETY: `edge` has room for six rows of four panels, and is our own.
        unsafe {
            let c = edge.as_mut_ptr();
            self.sums(rows.clone(), group, (from, depth, fresh), ready, c, width);
        }
        for (i, row) in rows.enumerate() {
            // SAFETY: as above.
            let out = unsafe { self.out.part(place(row), cols) };
            out.copy_from_slice(&edge[i * width..i * width + cols]);
        }
    }

    /// Runs the tile of these rows and `group` panels into `c`.
    ///
    /// # Safety
    /// `c` must have room for the rows, `c_row` apart, and be nobody else's.
    unsafe fn sums(
        &self,
        rows: std::ops::Range<usize>,
        group: usize,
        (from, depth, fresh): (usize, usize, bool),
        ready: Ready,
        c: *mut f32,
        c_row: usize,
    ) {
        let start = rows.start * self.lhs.row + from * self.lhs.step;
        let a = self.lhs.data[start..].as_ptr();
        let (a_row, a_step) = (self.lhs.row, self.lhs.step);
        let (rows, b_step) = (rows.len(), PANEL);
        // SAFETY: `check` proved that the left side holds every element of these rows and steps;
        // `with_ready` gave `group` panels of at least `depth` steps; `c` is the caller's promise.
        // The machine has `isa`.
        unsafe {
            match ready {
                Ready::F32 { start: b, panel: b_panel } => {
                    Tile { depth, a, a_row, a_step, b, b_panel, b_step, c, c_row, fresh }
                        .run(self.isa, rows, group);
                }
                Ready::Bf16 { start: b, panel: b_panel } => {
                    Tile { depth, a, a_row, a_step, b, b_panel, b_step, c, c_row, fresh }
                        .run(self.isa, rows, group);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Precision;
    use super::*;

    /// The rule itself: one chain per element.
    fn plain(
        (rows, depth, cols): (usize, usize, usize),
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
        start: &[f32],
    ) -> Vec<f32> {
        let mut out = start.to_vec();
        for i in 0..rows {
            for j in 0..cols {
                for k in 0..depth {
                    let sum = &mut out[i * cols + j];
                    *sum = a(i, k).mul_add(b(k, j), *sum);
                }
            }
        }
        out
    }

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_769) | 1;
        (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                f32::from_bits((state >> 9) | 0x3f80_0000) - 1.5
            })
            .collect()
    }

    const SIZES: &[(usize, usize, usize)] = &[
        (1, 1, 1),
        (1, 300, 67),
        (1, 64, 128),
        (2, 33, 50),
        (3, 257, 31),
        (4, 16, 16),
        (5, 7, 130),
        (6, 513, 17),
        (7, 40, 33),
        (8, 100, 80),
        (13, 31, 95),
        (29, 260, 49),
        (200, 19, 70),
        (390, 17, 18),
    ];

    #[test]
    fn every_path_gives_the_bits_of_one_chain_per_element() {
        for isa in Isa::available() {
            for threads in [1, 3] {
                let kernel = Kernel::with_isa(isa, threads);
                for &size in SIZES {
                    let (rows, depth, cols) = size;
                    let a = noise(rows * depth, 1);
                    let w = noise(cols * depth, 2);
                    let start = noise(rows * cols, 3);
                    for precision in [Precision::F32, Precision::Bf16] {
                        let weights = Panels::from_rows(&w, cols, depth, precision);
                        let mut w = vec![0.0; cols * depth];
                        for (i, row) in w.chunks_exact_mut(depth).enumerate() {
                            weights.row(i, row);
                        }
                        let expected =
                            plain(size, |i, k| a[i * depth + k], |k, j| w[j * depth + k], &start);
                        let mut out = start.clone();
                        let rhs = Rhs::packed(&weights);
                        kernel.add_product(size, Lhs::rows(&a, depth), rhs, &mut out, cols);
                        assert_eq!(out, expected, "{isa:?} {threads} {size:?} {precision:?}");

                        // The same weights turned: sums run over the outputs.
                        let turned = (rows, cols, depth);
                        let a = noise(rows * cols, 4);
                        let zeros = vec![0.0; rows * depth];
                        let expected =
                            plain(turned, |i, k| a[i * cols + k], |k, j| w[k * depth + j], &zeros);
                        let mut out = vec![9.0; rows * depth];
                        let rhs = Rhs::turned(&weights);
                        kernel.product(turned, Lhs::rows(&a, cols), rhs, &mut out, depth);
                        assert_eq!(out, expected, "{isa:?} {threads} {turned:?} {precision:?}");
                    }
                    // Columns on the left, plain rows on the right.
                    let a = noise(rows * depth, 5);
                    let b = noise(depth * cols, 6);
                    let expected =
                        plain(size, |i, k| a[k * rows + i], |k, j| b[k * cols + j], &start);
                    let mut out = start.clone();
                    let rhs = Rhs::Rows { data: &b, stride: cols };
                    kernel.add_product(size, Lhs::columns(&a, rows), rhs, &mut out, cols);
                    assert_eq!(out, expected, "{isa:?} {threads} {size:?} columns");
                }
            }
        }
    }

    #[test]
    fn a_slice_of_the_outputs_is_what_the_whole_would_give() {
        let kernel = Kernel::new(2).unwrap();
        let (rows, depth, cols) = (5, 37, 100);
        let a = noise(rows * depth, 1);
        let weights = Panels::from_rows(&noise(cols * depth, 2), cols, depth, Precision::F32);
        let mut whole = vec![0.0; rows * cols];
        let lhs = Lhs::rows(&a, depth);
        kernel.product((rows, depth, cols), lhs, Rhs::packed(&weights), &mut whole, cols);
        let mut part = vec![0.0; rows * 52];
        let rhs = Rhs::Packed { weights: &weights, from: 48 };
        kernel.product((rows, depth, 52), lhs, rhs, &mut part, 52);
        for i in 0..rows {
            assert_eq!(part[i * 52..(i + 1) * 52], whole[i * cols + 48..(i + 1) * cols]);
        }
        // Sums over the outputs, in two parts that go on from each other.
        let b = noise(rows * cols, 3);
        let mut once = vec![0.0; rows * depth];
        let lhs = Lhs::rows(&b, cols);
        kernel.product((rows, cols, depth), lhs, Rhs::turned(&weights), &mut once, depth);
        let mut twice = vec![0.0; rows * depth];
        kernel.product((rows, 48, depth), lhs, Rhs::turned(&weights), &mut twice, depth);
        let rhs = Rhs::Turned { weights: &weights, from: 48 };
        let lhs = Lhs::rows(&b[48..], cols);
        kernel.add_product((rows, 52, depth), lhs, rhs, &mut twice, depth);
        assert_eq!(once, twice);
    }

    #[test]
    fn nothing_times_nothing_is_nothing() {
        let kernel = Kernel::new(1).unwrap();
        let mut out = vec![7.0; 6];
        let rhs = Rhs::Rows { data: &[], stride: 3 };
        kernel.product((2, 0, 3), Lhs::rows(&[], 0), rhs, &mut out, 3);
        assert_eq!(out, [0.0; 6]);
        kernel.product((0, 4, 3), Lhs::rows(&[], 4), rhs, &mut [], 3);
    }
}
