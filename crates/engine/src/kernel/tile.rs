//! The micro-kernel: multiplies a few rows by a few panels with all accumulators in registers.

#![expect(
    unsafe_code,
    reason = "reads and writes through raw pointers; every function documents its requirements"
)]

use super::PANEL;
use super::isa::{Isa, Level};
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Simd16};

/// Maximum number of rows in a tile.
pub(super) const ROWS: usize = 6;

/// Memory to prefetch while a tile is computed: one cache line per step of the reduction, at
/// addresses `step` bytes apart from `start`. The addresses need not be valid.
#[derive(Clone, Copy)]
pub(super) struct Prefetch {
    start: *const u8,
    step: usize,
}

impl Prefetch {
    /// Returns a prefetch of one panel row of sixteen elements per step, from `start`.
    pub(super) fn from<E>(start: *const E) -> Self {
        Self { start: start.cast(), step: PANEL * size_of::<E>() }
    }

    /// Returns part `part` of `parts` equal parts of the range that `steps` steps would prefetch.
    pub(super) fn part(self, part: usize, parts: usize, steps: usize) -> Self {
        let start = self.start.wrapping_add(steps * self.step * part / parts);
        Self { start, step: self.step / parts }
    }

    /// Returns a prefetch without effect: every step prefetches `cached`, which is already in the
    /// cache.
    pub(super) fn none<E>(cached: *const E) -> Self {
        Self { start: cached.cast(), step: 0 }
    }
}

/// Prefetches the cache line at `address`, which need not be valid.
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

/// Operands of one micro-kernel call: `c[i, p] (+)= Σ_k a[i, k] · b[k, p]`.
#[derive(Clone, Copy)]
pub(super) struct Tile<E> {
    /// Length of the reduction.
    pub(super) depth: usize,
    /// Left operand: element `(i, k)` is at offset `i · a_row + k · a_step`.
    pub(super) a: *const f32,
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    /// Right operand: row `k` of panel `p` is sixteen elements at offset
    /// `p · b_panel + k · b_step`.
    pub(super) b: *const E,
    pub(super) b_panel: usize,
    pub(super) b_step: usize,
    pub(super) prefetch: Prefetch,
    /// Output: row `i` of panel `p` is sixteen elements at offset `i · c_row + p · 16`.
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Whether the accumulators start at zero (`true`) or at the current output (`false`).
    /// Continuing from the output keeps the reduction order when the depth is split over several
    /// calls.
    pub(super) zero_init: bool,
}

/// Storage type of the right operand.
pub(super) trait PanelElement: Copy {
    /// Loads sixteen elements and converts them to f32.
    ///
    /// # Safety
    /// Same as [`Simd16::load`].
    unsafe fn load<W: Simd16>(from: *const Self) -> W;
}

impl PanelElement for f32 {
    #[inline(always)]
    unsafe fn load<W: Simd16>(from: *const Self) -> W {
        // SAFETY: the caller upholds the requirements of `Simd16::load`.
        unsafe { W::load(from) }
    }
}

// The bits of a bf16.
impl PanelElement for u16 {
    #[inline(always)]
    unsafe fn load<W: Simd16>(from: *const Self) -> W {
        // SAFETY: the caller upholds the requirements of `Simd16::load_bf16`.
        unsafe { W::load_bf16(from) }
    }
}

impl<E: PanelElement> Tile<E> {
    /// Returns the number of panels that a tile of `rows` rows covers, so that its accumulators
    /// fill the registers.
    pub(super) fn panels(isa: Isa, rows: usize) -> usize {
        match isa.level() {
            Level::Portable => Portable::PANELS[rows],
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Avx2::PANELS[rows],
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Avx512::PANELS[rows],
        }
    }

    /// Computes the tile. `rows` is 1 to [`ROWS`]; `panels` is 1 or the result of [`Tile::panels`].
    ///
    /// # Safety
    /// Every address that the fields describe for `rows` rows, `panels` panels and `depth` steps
    /// must be valid: readable for `a` and `b`, readable and writable for `c`. Meanwhile no other
    /// thread may write the operands or access the output.
    pub(super) unsafe fn run(self, isa: Isa, rows: usize, panels: usize) {
        // SAFETY: the caller promises valid addresses, and an `Isa` proves that the CPU has the
        // instructions.
        unsafe {
            match isa.level() {
                Level::Portable => self.dispatch::<Portable>(rows, panels),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => self.avx2(rows, panels),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => self.avx512(rows, panels),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(self, rows: usize, panels: usize) {
        // SAFETY: the caller promises valid addresses, and the function enables AVX2 and FMA.
        unsafe { self.dispatch::<Avx2>(rows, panels) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,fma")]
    unsafe fn avx512(self, rows: usize, panels: usize) {
        // SAFETY: the caller promises valid addresses, and the function enables AVX-512F.
        unsafe { self.dispatch::<Avx512>(rows, panels) }
    }

    #[inline(always)]
    unsafe fn dispatch<W: Simd16>(self, rows: usize, panels: usize) {
        // SAFETY: the caller promises valid addresses and the instructions of `W`.
        unsafe {
            // The guards are constants: each instruction set compiles only the tiles that it uses.
            match (rows, panels) {
                (1, 4) if W::PANELS[1] == 4 => self.compute::<W, 1, 4>(),
                (2, 2) if W::PANELS[2] == 2 => self.compute::<W, 2, 2>(),
                (2, 4) if W::PANELS[2] == 4 => self.compute::<W, 2, 4>(),
                (3, 4) if W::PANELS[3] == 4 => self.compute::<W, 3, 4>(),
                (4, 4) if W::PANELS[4] == 4 => self.compute::<W, 4, 4>(),
                (5, 4) if W::PANELS[5] == 4 => self.compute::<W, 5, 4>(),
                (6, 4) if W::PANELS[6] == 4 => self.compute::<W, 6, 4>(),
                (1, 1) => self.compute::<W, 1, 1>(),
                (2, 1) => self.compute::<W, 2, 1>(),
                (3, 1) => self.compute::<W, 3, 1>(),
                (4, 1) => self.compute::<W, 4, 1>(),
                (5, 1) => self.compute::<W, 5, 1>(),
                (6, 1) => self.compute::<W, 6, 1>(),
                _ => unreachable!("a tile of {rows} rows and {panels} panels"),
            }
        }
    }

    #[inline(always)]
    unsafe fn compute<W: Simd16, const ROWS: usize, const PANELS: usize>(self) {
        // SAFETY: the caller promises that every address below is valid, and the instructions of
        // `W`.
        unsafe {
            let mut sums = [[W::zero(); PANELS]; ROWS];
            if !self.zero_init {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = W::load(self.c.add(i * self.c_row + p * PANEL));
                    }
                }
            }
            let (mut a, mut b, mut next) = (self.a, self.b, self.prefetch.start);
            for _ in 0..self.depth {
                let mut right = [W::zero(); PANELS];
                for (p, right) in right.iter_mut().enumerate() {
                    *right = E::load(b.add(p * self.b_panel));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let left = *a.add(i * self.a_row);
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = sum.add_scaled(left, right);
                    }
                }
                prefetch(next);
                next = next.wrapping_add(self.prefetch.step);
                // After the last iteration the pointers are past the end and are not dereferenced.
                a = a.wrapping_add(self.a_step);
                b = b.wrapping_add(self.b_step);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (p, sum) in sums.iter().enumerate() {
                    sum.store(self.c.add(i * self.c_row + p * PANEL));
                }
            }
        }
    }
}
