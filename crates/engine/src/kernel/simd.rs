//! [`Simd16`]: vectors of sixteen f32 values, in three implementations.
//!
//! A fused multiply-add rounds once in all of them, so all three give the same bits.

#![expect(
    unsafe_code,
    reason = "vector instructions and raw loads; every method documents its requirements"
)]

use super::PANEL;
use super::panels::bf16_index;

/// A vector of sixteen f32 values.
///
/// # Safety
/// The CPU must have the implementation's instructions when a method is called. Pointers must be
/// valid for sixteen elements; any alignment is allowed.
pub(super) trait Simd16: Copy {
    /// Panels per tile, indexed by the number of rows, chosen so that the accumulators fill the
    /// registers. Index 0 is unused.
    const PANELS: [usize; 7];
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Loads sixteen bf16 values in the interleaved order of [`Panels`](super::Panels) as f32.
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Returns `self + scale · values`, rounded once per element.
    unsafe fn add_scaled(self, scale: f32, values: Self) -> Self;
}

/// Sixteen values in an array, for any CPU.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; PANEL]);

impl Simd16 for Portable {
    const PANELS: [usize; 7] = [1; 7];

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; PANEL])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller promises sixteen readable values; the read requires no alignment.
        Self(unsafe { from.cast::<[f32; PANEL]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller promises sixteen readable values; the read requires no alignment.
        let bits = unsafe { from.cast::<[u16; PANEL]>().read_unaligned() };
        Self(std::array::from_fn(|lane| f32::from_bits(u32::from(bits[bf16_index(lane)]) << 16)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller promises sixteen writable values; the write requires no alignment.
        unsafe { to.cast::<[f32; PANEL]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn add_scaled(mut self, scale: f32, values: Self) -> Self {
        for (sum, value) in self.0.iter_mut().zip(values.0) {
            *sum = scale.mul_add(value, *sum);
        }
        self
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, _mm256_and_si256, _mm256_castsi256_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
        _mm256_slli_epi32, _mm256_storeu_ps, _mm512_castsi256_si512, _mm512_castsi512_ps,
        _mm512_fmadd_ps, _mm512_inserti64x4, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_storeu_ps,
    };

    use super::Simd16;

    /// Mask of the upper sixteen of 32 bits.
    const UPPER: i32 = -0x1_0000;

    /// Sixteen values in two registers of AVX2.
    #[derive(Clone, Copy)]
    pub(in crate::kernel) struct Avx2(__m256, __m256);

    impl Simd16 for Avx2 {
        // Up to twelve of the sixteen registers are accumulators. Three rows of two panels would
        // leave too few registers for the operands.
        const PANELS: [usize; 7] = [1, 4, 2, 1, 1, 1, 1];

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe { Self(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller promises AVX2 and sixteen readable floats.
            unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            // SAFETY: the caller promises AVX2 and sixteen readable 16-bit values.
            unsafe {
                let pairs = _mm256_loadu_si256(from.cast());
                let upper = _mm256_set1_epi32(UPPER);
                Self(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
                    _mm256_castsi256_ps(_mm256_and_si256(pairs, upper)),
                )
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller promises AVX2 and sixteen writable floats.
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(8), self.1);
            }
        }

        #[inline(always)]
        unsafe fn add_scaled(self, scale: f32, values: Self) -> Self {
            // SAFETY: the caller promises AVX2 and FMA.
            unsafe {
                let scale = _mm256_set1_ps(scale);
                Self(
                    _mm256_fmadd_ps(scale, values.0, self.0),
                    _mm256_fmadd_ps(scale, values.1, self.1),
                )
            }
        }
    }

    /// Sixteen values in one register of AVX-512.
    #[derive(Clone, Copy)]
    pub(in crate::kernel) struct Avx512(__m512);

    impl Simd16 for Avx512 {
        // Up to 24 of the 32 registers are accumulators.
        const PANELS: [usize; 7] = [1, 4, 4, 4, 4, 4, 4];

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_setzero_ps()) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller promises AVX-512F and sixteen readable floats.
            unsafe { Self(_mm512_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            // SAFETY: the caller promises AVX-512F, which implies AVX2, and sixteen readable 16-bit
            // values.
            unsafe {
                let pairs = _mm256_loadu_si256(from.cast());
                let even = _mm512_castsi256_si512(_mm256_slli_epi32::<16>(pairs));
                let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(UPPER));
                Self(_mm512_castsi512_ps(_mm512_inserti64x4::<1>(even, odd)))
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller promises AVX-512F and sixteen writable floats.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn add_scaled(self, scale: f32, values: Self) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_fmadd_ps(_mm512_set1_ps(scale), values.0, self.0)) }
        }
    }
}
