//! The micro-kernel: multiplies a few rows by a few panels with all accumulators in registers.

#![expect(
    unsafe_code,
    reason = "reads and writes through raw pointers; every function documents its requirements"
)]

use super::PANEL;
use super::isa::{Isa, Level};
use super::panel_format::PanelFormat;
use super::panels::PanelBlocks;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Simd16};

/// Maximum number of rows of a tile if the rows of a block are divided into several tiles.
pub(super) const ROWS: usize = 6;
/// Maximum number of rows of a block that is a single tile, on CPUs with enough registers.
pub(super) const MAX_ROWS: usize = 8;
/// Size of a cache line in bytes.
const LINE: usize = 64;

/// Memory to prefetch while a tile is computed. The addresses need not be valid.
#[derive(Clone, Copy)]
pub(super) enum Prefetch {
    /// Nothing.
    None,
    /// One cache line for each chunk of the reduction, at addresses `step` bytes apart.
    Lines { start: *const u8, step: usize },
    /// The blocks that follow the blocks of the tile in memory, a few KiB ahead. The tile's own
    /// later blocks come first, then the blocks of the next group of panels.
    LaterBlocks,
}

impl Prefetch {
    /// Returns the share of tile `tile` of `tiles` tiles, which read the same weights one after the
    /// other. `chunks` is the number of chunks that a tile reads.
    pub(super) fn share(self, tile: usize, tiles: usize, chunks: usize) -> Self {
        match self {
            Self::Lines { start, step } => {
                let start = start.wrapping_add(chunks * step * tile / tiles);
                Self::Lines { start, step: step / tiles }
            }
            // The first tile reads the weights from memory, the others from the cache.
            Self::LaterBlocks if tile > 0 => Self::None,
            other => other,
        }
    }
}

/// Prefetches the cache line at `address`, which need not be valid, into the first-level cache.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch never faults, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches the cache line at `address`, which need not be valid, into the second-level cache.
///
/// For lines that are needed later than in a few hundred cycles: prefetches into the first-level
/// cache would occupy its few miss buffers until the lines arrive from memory.
#[inline(always)]
fn prefetch_far(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch never faults, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Evaluates `$body` for the constant `$I` from 0 to 15, as long as it is less than `$count`. The
/// condition is a constant block, so that the compiler does not instantiate the other bodies.
macro_rules! unroll {
    ($I:ident < $count:expr => $body:block) => {
        unroll!(@ $I, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    };
    (@ $I:ident, $count:expr, $body:block, $($number:literal)*) => {
        $({
            const $I: usize = $number;
            if const { $I < $count } $body
        })*
    };
}

/// Operands of one micro-kernel call, which computes `c[i, p] = Σ_k a[i, k] · b[k, p]` or adds this
/// sum to `c[i, p]`.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Length of the reduction.
    pub(super) depth: usize,
    /// Left operand: element `(i, k)` is at offset `i · a_row + k · a_step`.
    pub(super) a: *const f32,
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    /// Right operand: block `k` of panel `p` is at offset `p · b_panel + k · b_block`, in bytes.
    pub(super) b: *const u8,
    pub(super) b_panel: usize,
    pub(super) b_block: usize,
    pub(super) prefetch: Prefetch,
    /// Output: row `i` of panel `p` is sixteen elements at offset `i · c_row + p · 16`.
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Whether the accumulators start at zero (`true`) or at the current output (`false`).
    /// Continuing from the output keeps the reduction order when the depth is split over several
    /// calls.
    pub(super) zero_init: bool,
}

/// Returns the number of panels that a tile of `rows` rows covers so that its accumulators fill the
/// registers, or 0 if the instruction set has no tile with this number of rows.
pub(super) fn tile_panels(isa: Isa, rows: usize, quantized: bool) -> usize {
    match isa.level() {
        Level::Portable => panels::<Portable>(rows, quantized),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => panels::<Avx2>(rows, quantized),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => panels::<Avx512>(rows, quantized),
    }
}

/// Implements [`tile_panels`] for one instruction set.
#[inline(always)]
const fn panels<W: Simd16>(rows: usize, quantized: bool) -> usize {
    match (rows, quantized) {
        (1, true) => W::QUANTIZED_PANELS,
        (rows, true) if rows > W::MAX_QUANTIZED_ROWS => 0,
        (rows, _) => W::PANELS[rows],
    }
}

/// Returns whether an instruction set uses tiles of `rows` rows and `count` panels.
const fn has_tile<W: Simd16>(rows: usize, count: usize, quantized: bool) -> bool {
    let most = panels::<W>(rows, quantized);
    count == most || (count == 1 && most != 0)
}

#[cold]
fn no_tile(rows: usize, count: usize) -> ! {
    unreachable!("a tile of {rows} rows and {count} panels")
}

impl Tile {
    /// Computes the tile for weights in the format `F`. `rows` is 1 to [`MAX_ROWS`]; `panels` is 1
    /// or the result of [`tile_panels`], which must not be 0.
    ///
    /// # Safety
    /// Every address that the fields `a`, `b` and `c` describe for `rows` rows, `panels` panels and
    /// `depth` steps must be valid: readable for `a` and `b`, readable and writable for `c`. `a`
    /// must be aligned for f32; `b` and `c` may have any alignment. Until the call returns, no
    /// other thread may write the operands or access the output. `depth` must be a multiple of the
    /// format's block if the format is quantized.
    pub(super) unsafe fn run<F: PanelFormat>(self, isa: Isa, rows: usize, panels: usize) {
        // SAFETY: the caller promises valid addresses, and an `Isa` proves that the CPU has the
        // instructions.
        unsafe {
            match isa.level() {
                Level::Portable => self.dispatch::<Portable, F>(rows, panels),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => self.avx2::<F>(rows, panels),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => self.avx512::<F>(rows, panels),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2<F: PanelFormat>(self, rows: usize, panels: usize) {
        // SAFETY: the caller promises valid addresses, and the function enables AVX2, FMA and F16C.
        unsafe { self.dispatch::<Avx2, F>(rows, panels) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn avx512<F: PanelFormat>(self, rows: usize, panels: usize) {
        // SAFETY: the caller promises valid addresses, and the function enables AVX-512F and what
        // it includes.
        unsafe { self.dispatch::<Avx512, F>(rows, panels) }
    }

    #[inline(always)]
    unsafe fn dispatch<W: Simd16, F: PanelFormat>(self, rows: usize, count: usize) {
        // The conditions are constant blocks, so that the compiler instantiates only the tiles that
        // an instruction set uses with a format: about a third of them, which are most of the code
        // of this crate.
        // SAFETY: the caller promises valid addresses and the instructions of `W`.
        unsafe {
            macro_rules! tiles {
                ($($rows:literal: $($panels:literal)*;)*) => {
                    match (rows, count) {
                        $($(
                            ($rows, $panels) => {
                                if const { has_tile::<W>($rows, $panels, F::QUANTIZED) } {
                                    self.compute::<W, F, $rows, $panels>();
                                } else {
                                    no_tile(rows, count);
                                }
                            }
                        )*)*
                        _ => no_tile(rows, count),
                    }
                };
            }
            tiles!(
                1: 1 2 4;
                2: 1 2 4;
                3: 1 4;
                4: 1 4;
                5: 1 4;
                6: 1 4;
                7: 1 2;
                8: 1 2;
            );
        }
    }

    /// Computes a tile of `ROWS` rows and `PANELS` panels, whose accumulators stay in registers.
    #[inline(always)]
    unsafe fn compute<W: Simd16, F: PanelFormat, const ROWS: usize, const PANELS: usize>(self) {
        // SAFETY: the caller promises that every address below is valid, and the instructions of
        // `W`.
        unsafe {
            let mut sums = self.initial_sums::<W, ROWS, PANELS>();
            let mut a = self.a;
            let mut block = self.b;
            let later_blocks = matches!(self.prefetch, Prefetch::LaterBlocks);
            let (mut line, line_step) = match self.prefetch {
                Prefetch::Lines { start, step } => (start, step),
                // Prefetching a line that is in the cache already is cheaper than a branch.
                Prefetch::None | Prefetch::LaterBlocks => (self.b, 0),
            };
            for _ in 0..self.depth / F::BLOCK_INPUTS {
                let later = block.wrapping_add(F::BLOCKS_AHEAD * self.b_block);
                for part in 0..F::PARTS {
                    // The scales of a block are at its start.
                    if later_blocks && part * LINE < F::chunk_offset(0, 0) {
                        self.prefetch_lines::<PANELS>(later.wrapping_add(part * LINE), LINE);
                    }
                    let scales = self.scales::<W, F, PANELS>(block, part);
                    for chunk in 0..F::PART_CHUNKS {
                        let offset = F::chunk_offset(part, chunk);
                        let chunks = self.chunks::<W, F, PANELS>(block.add(offset));
                        if later_blocks {
                            let later = later.wrapping_add(offset);
                            self.prefetch_lines::<PANELS>(later, F::CHUNK_BYTES);
                        } else if !F::QUANTIZED {
                            prefetch(line);
                            line = line.wrapping_add(line_step);
                        }
                        unroll!(I < F::CHUNK_INPUTS => {
                            self.step::<W, F, I, ROWS, PANELS>(a, &chunks, &scales, &mut sums);
                            // After the last step the pointer is past the end and not used.
                            a = a.wrapping_add(self.a_step);
                        });
                    }
                }
                block = block.wrapping_add(self.b_block);
            }
            // The last input has no second one to form a pair with.
            if F::BLOCK_INPUTS == 2 && self.depth % 2 == 1 {
                let scales = self.scales::<W, F, PANELS>(block, 0);
                let chunks = self.chunks::<W, F, PANELS>(block);
                self.step::<W, F, 0, ROWS, PANELS>(a, &chunks, &scales, &mut sums);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (p, sum) in sums.iter().enumerate() {
                    sum.store(self.c.add(i * self.c_row + p * PANEL));
                }
            }
        }
    }

    /// Returns the initial values of the accumulators.
    #[inline(always)]
    unsafe fn initial_sums<W: Simd16, const ROWS: usize, const PANELS: usize>(
        &self,
    ) -> [[W; PANELS]; ROWS] {
        // SAFETY: the caller promises a valid output and the instructions of `W`.
        unsafe {
            let mut sums = [[W::zero(); PANELS]; ROWS];
            if !self.zero_init {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = W::load(self.c.add(i * self.c_row + p * PANEL));
                    }
                }
            }
            sums
        }
    }

    /// Loads the scales of part `part` of a block of each panel. `block` is the block of the first
    /// panel.
    #[inline(always)]
    unsafe fn scales<W: Simd16, F: PanelFormat, const PANELS: usize>(
        &self,
        block: *const u8,
        part: usize,
    ) -> [F::Scale<W>; PANELS] {
        // SAFETY: the caller promises valid blocks and the instructions of `W`.
        unsafe {
            let mut scales = [F::scale::<W>(block, part); PANELS];
            for (p, scale) in scales.iter_mut().enumerate().skip(1) {
                *scale = F::scale::<W>(block.add(p * self.b_panel), part);
            }
            scales
        }
    }

    /// Loads a chunk of each panel. `chunk` is the address of the chunk of the first panel.
    #[inline(always)]
    unsafe fn chunks<W: Simd16, F: PanelFormat, const PANELS: usize>(
        &self,
        chunk: *const u8,
    ) -> [F::Chunk<W>; PANELS] {
        // SAFETY: the caller promises valid chunks and the instructions of `W`.
        unsafe {
            let mut chunks = [F::chunk::<W>(chunk); PANELS];
            for (p, words) in chunks.iter_mut().enumerate().skip(1) {
                *words = F::chunk::<W>(chunk.add(p * self.b_panel));
            }
            chunks
        }
    }

    /// Prefetches `bytes` bytes of each panel. `first` is the address in the first panel.
    #[inline(always)]
    fn prefetch_lines<const PANELS: usize>(&self, first: *const u8, bytes: usize) {
        for p in 0..PANELS {
            for line in 0..bytes.div_ceil(LINE) {
                prefetch_far(first.wrapping_add(p * self.b_panel + line * LINE));
            }
        }
    }

    /// Adds the products of input `I` of a chunk, whose left operand is at `a`.
    #[inline(always)]
    unsafe fn step<
        W: Simd16,
        F: PanelFormat,
        const I: usize,
        const ROWS: usize,
        const PANELS: usize,
    >(
        &self,
        a: *const f32,
        chunks: &[F::Chunk<W>; PANELS],
        scales: &[F::Scale<W>; PANELS],
        sums: &mut [[W; PANELS]; ROWS],
    ) {
        // SAFETY: the caller promises that the chunks and the left operand are valid, and the
        // instructions of `W`.
        unsafe {
            let mut right = [W::zero(); PANELS];
            for (right, (chunk, scale)) in right.iter_mut().zip(chunks.iter().zip(scales)) {
                *right = F::weights::<W, I>(*chunk, *scale);
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let left = *a.add(i * self.a_row);
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = sum.add_scaled(left, right);
                }
            }
        }
    }
}

/// Decodes the weights of one panel for `out.len() / 16` inputs from input `first` on.
///
/// # Panics
/// If `out` does not have sixteen elements for each input, if the panel has fewer inputs or another
/// format, or if `first` or the number of inputs is not a multiple of the format's chunk. The last
/// chunk may have one input if the chunks of the format have two.
pub(super) fn decode_panel<F: PanelFormat>(
    isa: Isa,
    panel: PanelBlocks<'_>,
    first: usize,
    out: &mut [f32],
) {
    let inputs = out.len() / PANEL;
    assert!(out.len().is_multiple_of(PANEL), "sixteen elements for each input");
    assert!(first.is_multiple_of(F::CHUNK_INPUTS), "the first input of a chunk");
    assert!(F::CHUNK_INPUTS <= 2 || inputs.is_multiple_of(F::CHUNK_INPUTS), "whole chunks");
    assert_eq!(panel.block_bytes(), F::BLOCK_BYTES, "size of a block");
    assert!(
        (first + inputs).div_ceil(F::BLOCK_INPUTS) <= panel.count(),
        "inputs {first} to {} of a panel of {} blocks",
        first + inputs,
        panel.count()
    );
    // SAFETY: an `Isa` proves that the CPU has the instructions, and the panel has the inputs.
    unsafe {
        match isa.level() {
            Level::Portable => decode::<Portable, F>(panel, first, out),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => decode_avx2::<F>(panel, first, out),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => decode_avx512::<F>(panel, first, out),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn decode_avx2<F: PanelFormat>(panel: PanelBlocks<'_>, first: usize, out: &mut [f32]) {
    // SAFETY: the caller promises that the panel has the inputs; the function enables AVX2, FMA and
    // F16C.
    unsafe { decode::<Avx2, F>(panel, first, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn decode_avx512<F: PanelFormat>(panel: PanelBlocks<'_>, first: usize, out: &mut [f32]) {
    // SAFETY: the caller promises that the panel has the inputs; the function enables AVX-512F.
    unsafe { decode::<Avx512, F>(panel, first, out) }
}

/// Implements [`decode_panel`].
///
/// # Safety
/// The CPU must have the instructions of `W`. The blocks of all inputs must be inside the panel,
/// and `out` must have sixteen elements for each input.
#[inline(always)]
unsafe fn decode<W: Simd16, F: PanelFormat>(panel: PanelBlocks<'_>, first: usize, out: &mut [f32]) {
    let chunks_per_block = F::BLOCK_INPUTS / F::CHUNK_INPUTS;
    for (chunk, out) in (first / F::CHUNK_INPUTS..).zip(out.chunks_mut(PANEL * F::CHUNK_INPUTS)) {
        let block = chunk / chunks_per_block;
        let chunk = chunk % chunks_per_block;
        let part = chunk / F::PART_CHUNKS;
        let chunk = chunk % F::PART_CHUNKS;
        let inputs = out.len() / PANEL;
        // SAFETY: the caller promises that the block is inside the panel, and the instructions of
        // `W`. Every store is inside `out`, which has `inputs` groups of sixteen.
        unsafe {
            let block = panel.starting_at(block).as_ptr();
            let scale = F::scale::<W>(block, part);
            let words = F::chunk::<W>(block.add(F::chunk_offset(part, chunk)));
            unroll!(I < F::CHUNK_INPUTS => {
                if I < inputs {
                    F::weights::<W, I>(words, scale).store(out.as_mut_ptr().add(I * PANEL));
                }
            });
        }
    }
}
