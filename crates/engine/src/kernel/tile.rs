//! The innermost loop: a few rows times a few panels, with all sums in registers.

#![expect(
    unsafe_code,
    reason = "reads and writes through raw pointers; every function says what it needs"
)]

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Simd16};
use super::{Isa, PANEL};

/// The most rows that one tile has.
pub(super) const ROWS: usize = 6;

/// What will be read from memory after a tile: brought nearer meanwhile, `step` bytes with every step
/// of the chains. Any address will do.
#[derive(Clone, Copy)]
pub(super) struct Prefetch {
    start: *const u8,
    step: usize,
}

impl Prefetch {
    /// Weights from `start` on, sixteen with every step.
    pub(super) fn from<E>(start: *const E) -> Self {
        Self { start: start.cast(), step: PANEL * size_of::<E>() }
    }

    /// One of `parts` equal parts of what `steps` steps would read.
    pub(super) fn part(self, part: usize, parts: usize, steps: usize) -> Self {
        let start = self.start.wrapping_add(steps * self.step * part / parts);
        Self { start, step: self.step / parts }
    }

    /// Nothing but what is at hand.
    pub(super) fn none<E>(near: *const E) -> Self {
        Self { start: near.cast(), step: 0 }
    }
}

/// Asks for what stands there to be brought into the caches; any address will do.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of every x86-64; reads nothing and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// One product of a few rows with a few panels.
#[derive(Clone, Copy)]
pub(super) struct Tile<E> {
    /// Length of the chains.
    pub(super) depth: usize,
    /// The left side: element `(i, k)` stands at `i · a_row + k · a_step`.
    pub(super) a: *const f32,
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    /// The right side: sixteen elements at `p · b_panel + k · b_step`.
    pub(super) b: *const E,
    pub(super) b_panel: usize,
    pub(super) b_step: usize,
    pub(super) next: Prefetch,
    /// The sums: sixteen at `i · c_row + p · 16`.
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Whether the sums start at zero or go on from what is there.
    pub(super) zero_init: bool,
}

/// What the right side is made of.
pub(super) trait PanelElement: Copy {
    /// # Safety
    /// As [`Simd16::load`].
    unsafe fn load<W: Simd16>(from: *const Self) -> W;
}

impl PanelElement for f32 {
    #[inline(always)]
    unsafe fn load<W: Simd16>(from: *const Self) -> W {
        // SAFETY: the caller's promise is the same.
        unsafe { W::load(from) }
    }
}

/// A bf16 as its bits.
impl PanelElement for u16 {
    #[inline(always)]
    unsafe fn load<W: Simd16>(from: *const Self) -> W {
        // SAFETY: the caller's promise is the same.
        unsafe { W::load_bf16(from) }
    }
}

impl<E: PanelElement> Tile<E> {
    /// How many panels a tile of `rows` rows should cover.
    pub(super) fn panels(isa: Isa, rows: usize) -> usize {
        match isa {
            Isa::Portable => Portable::PANELS[rows],
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::PANELS[rows],
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::PANELS[rows],
        }
    }

    /// Computes it: `rows` is 1 to [`ROWS`], `panels` is 1 or what [`Tile::panels`] says.
    ///
    /// # Safety
    /// The machine has `isa`; all addresses that the fields describe are valid, and the sums are
    /// nobody else's meanwhile.
    pub(super) unsafe fn run(self, isa: Isa, rows: usize, panels: usize) {
        // SAFETY: the caller's promise, handed on.
        unsafe {
            match isa {
                Isa::Portable => self.any::<Portable>(rows, panels),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => self.avx2(rows, panels),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => self.avx512(rows, panels),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(self, rows: usize, panels: usize) {
        // SAFETY: the caller's promise, and the instructions are there.
        unsafe { self.any::<Avx2>(rows, panels) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,fma")]
    unsafe fn avx512(self, rows: usize, panels: usize) {
        // SAFETY: the caller's promise, and the instructions are there.
        unsafe { self.any::<Avx512>(rows, panels) }
    }

    #[inline(always)]
    unsafe fn any<W: Simd16>(self, rows: usize, panels: usize) {
        // SAFETY: the caller's promise, handed on.
        unsafe {
            // The guards are known when this is compiled: no kind of machine gets tiles that it
            // does not use.
            match (rows, panels) {
                (1, 4) if W::PANELS[1] == 4 => self.sums::<W, 1, 4>(),
                (2, 2) if W::PANELS[2] == 2 => self.sums::<W, 2, 2>(),
                (2, 4) if W::PANELS[2] == 4 => self.sums::<W, 2, 4>(),
                (3, 4) if W::PANELS[3] == 4 => self.sums::<W, 3, 4>(),
                (4, 4) if W::PANELS[4] == 4 => self.sums::<W, 4, 4>(),
                (5, 4) if W::PANELS[5] == 4 => self.sums::<W, 5, 4>(),
                (6, 4) if W::PANELS[6] == 4 => self.sums::<W, 6, 4>(),
                (1, 1) => self.sums::<W, 1, 1>(),
                (2, 1) => self.sums::<W, 2, 1>(),
                (3, 1) => self.sums::<W, 3, 1>(),
                (4, 1) => self.sums::<W, 4, 1>(),
                (5, 1) => self.sums::<W, 5, 1>(),
                (6, 1) => self.sums::<W, 6, 1>(),
                _ => unreachable!("a tile of {rows} rows and {panels} panels"),
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<W: Simd16, const ROWS: usize, const PANELS: usize>(self) {
        // SAFETY: the caller's promise covers every address below.
        unsafe {
            let mut sums = [[W::zero(); PANELS]; ROWS];
            if !self.zero_init {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = W::load(self.c.add(i * self.c_row + p * PANEL));
                    }
                }
            }
            let (mut a, mut b, mut next) = (self.a, self.b, self.next.start);
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
                next = next.wrapping_add(self.next.step);
                // One past the end at the last turn, where nothing is read.
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
