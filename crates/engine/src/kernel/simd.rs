//! [`Simd16`]: vectors of sixteen f32 values, in three implementations.
//!
//! A fused multiply-add rounds once in all of them, so all three give the same bits.

#![expect(
    unsafe_code,
    reason = "vector instructions and raw loads; every method documents its requirements"
)]

use half::f16;

use super::PANEL;

/// A vector of sixteen f32 values.
///
/// # Safety
/// The CPU must have the implementation's instructions when a method is called. Pointers must be
/// valid for sixteen elements of the type that the method reads; any alignment is allowed.
pub(super) trait Simd16: Copy {
    /// Panels per tile, indexed by the number of rows, chosen so that the accumulators fill the
    /// registers. 0 means that there are no tiles with this number of rows.
    const PANELS: [usize; 9];
    /// Panels per tile of one row if the weights are quantized: fewer, because the scales of the
    /// weights occupy registers, too.
    const QUANTIZED_PANELS: usize;
    /// Maximum number of rows of a tile if the weights are quantized. 0 means that they are decoded
    /// into a buffer.
    const MAX_QUANTIZED_ROWS: usize;

    /// Sixteen 32-bit words.
    type Words: Copy;

    unsafe fn zero() -> Self;
    /// Returns a vector whose elements are all `value`.
    unsafe fn all(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Loads sixteen IEEE half-precision values as f32, little-endian.
    unsafe fn load_f16(from: *const u8) -> Self;
    /// Loads sixteen signed bytes as f32.
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Loads sixteen unsigned bytes as f32.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// Returns `self + scale · values`, rounded once per element.
    unsafe fn add_scaled(self, scale: f32, values: Self) -> Self;
    /// Returns `self · factor`.
    unsafe fn times(self, factor: Self) -> Self;
    /// Returns `self · factor - offset`, rounded once per element.
    unsafe fn times_minus(self, factor: Self, offset: Self) -> Self;

    /// Loads sixteen little-endian words.
    unsafe fn load_words(from: *const u8) -> Self::Words;
    /// Returns the bf16 values in the lower half of each word.
    unsafe fn lower_bf16(words: Self::Words) -> Self;
    /// Returns the bf16 values in the upper half of each word.
    unsafe fn upper_bf16(words: Self::Words) -> Self;
    /// Returns [`BYTE_BASE`] plus byte `I` of each word, 0 being the lowest byte.
    unsafe fn byte<const I: usize>(words: Self::Words) -> Self;
    /// Returns the unsigned number in the `bits` bits of each word from bit `shift` on, minus
    /// `offset`. `bits` is at most 8. `shift`, `bits` and `offset` should be constants, so that the
    /// compiler removes the branches on them.
    unsafe fn field(words: Self::Words, shift: u32, bits: u32, offset: u8) -> Self;
    /// Returns words with bits 30 and 31 of each of the given words in bits 0 to 5.
    unsafe fn join_top_bits(words: [Self::Words; 3]) -> Self::Words;
}

/// Number that [`Simd16::byte`] adds to a byte, 2¹⁵: in the mantissa of a number from 2¹⁵ to 2¹⁶, the
/// units are bits 8 to 15.
pub(super) const BYTE_BASE: f32 = 32_768.0;

/// Returns the exponent bits of the f32 whose mantissa bit `shift` has the value 1.
#[cfg(target_arch = "x86_64")]
const fn exponent_bits(shift: u32) -> u32 {
    (127 + 23 - shift) << 23
}

/// Sixteen values in an array, for any CPU.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; PANEL]);

impl Simd16 for Portable {
    const PANELS: [usize; 9] = [0, 1, 1, 1, 1, 1, 1, 0, 0];
    const QUANTIZED_PANELS: usize = 0;
    const MAX_QUANTIZED_ROWS: usize = 0;

    type Words = [u32; PANEL];

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; PANEL])
    }

    #[inline(always)]
    unsafe fn all(value: f32) -> Self {
        Self([value; PANEL])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller promises sixteen readable values; the read requires no alignment.
        Self(unsafe { from.cast::<[f32; PANEL]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller promises sixteen writable values; the write requires no alignment.
        unsafe { to.cast::<[f32; PANEL]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller promises sixteen readable values; the read requires no alignment.
        let halves = unsafe { from.cast::<[[u8; 2]; PANEL]>().read_unaligned() };
        Self(halves.map(|half| f16::from_le_bytes(half).to_f32()))
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller promises sixteen readable bytes.
        Self(unsafe { from.cast::<[i8; PANEL]>().read_unaligned() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: the caller promises sixteen readable bytes.
        Self(unsafe { from.cast::<[u8; PANEL]>().read_unaligned() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn add_scaled(mut self, scale: f32, values: Self) -> Self {
        for (sum, value) in self.0.iter_mut().zip(values.0) {
            *sum = scale.mul_add(value, *sum);
        }
        self
    }

    #[inline(always)]
    unsafe fn times(mut self, factor: Self) -> Self {
        for (value, factor) in self.0.iter_mut().zip(factor.0) {
            *value *= factor;
        }
        self
    }

    #[inline(always)]
    unsafe fn times_minus(mut self, factor: Self, offset: Self) -> Self {
        for ((value, factor), offset) in self.0.iter_mut().zip(factor.0).zip(offset.0) {
            *value = value.mul_add(factor, -offset);
        }
        self
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> Self::Words {
        // SAFETY: the caller promises sixteen readable words; the read requires no alignment.
        let words = unsafe { from.cast::<[[u8; 4]; PANEL]>().read_unaligned() };
        words.map(u32::from_le_bytes)
    }

    #[inline(always)]
    unsafe fn lower_bf16(words: Self::Words) -> Self {
        Self(words.map(|word| f32::from_bits(word << 16)))
    }

    #[inline(always)]
    unsafe fn upper_bf16(words: Self::Words) -> Self {
        Self(words.map(|word| f32::from_bits(word & 0xffff_0000)))
    }

    #[inline(always)]
    unsafe fn byte<const I: usize>(words: Self::Words) -> Self {
        Self(words.map(|word| BYTE_BASE + f32::from(word.to_le_bytes()[I])))
    }

    #[inline(always)]
    unsafe fn field(words: Self::Words, shift: u32, bits: u32, offset: u8) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a field has at most eight bits")]
        let number = |word: u32| f32::from(((word >> shift) & ((1 << bits) - 1)) as u8);
        Self(words.map(|word| number(word) - f32::from(offset)))
    }

    #[inline(always)]
    unsafe fn join_top_bits([mut a, b, c]: [Self::Words; 3]) -> Self::Words {
        for (a, (b, c)) in a.iter_mut().zip(b.into_iter().zip(c)) {
            *a = (*a >> 30) | ((b >> 30) << 2) | ((c >> 30) << 4);
        }
        a
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m256i, __m512, __m512i, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128,
        _mm256_and_si256, _mm256_castsi256_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
        _mm256_cvtepu8_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_fmsub_ps, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_mul_ps, _mm256_or_si256, _mm256_set1_epi32, _mm256_set1_ps,
        _mm256_setzero_ps, _mm256_slli_epi32, _mm256_srl_epi32, _mm256_srli_epi32,
        _mm256_storeu_ps, _mm256_sub_ps, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps,
        _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtph_ps,
        _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps,
        _mm512_or_si512, _mm512_permutexvar_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_ps,
        _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srl_epi32, _mm512_srli_epi32,
        _mm512_storeu_ps, _mm512_sub_ps, _mm512_ternarylogic_epi32,
    };

    use super::{BYTE_BASE, Simd16, exponent_bits};

    /// Mask of the upper sixteen of 32 bits.
    const UPPER: i32 = -0x1_0000;
    /// Mask of bits 8 to 15.
    const BYTE_MASK: i32 = 0xff00;
    /// Number of mantissa bits of an f32.
    const MANTISSA: u32 = 23;

    /// Sixteen values in two registers of AVX2.
    #[derive(Clone, Copy)]
    pub(in crate::kernel) struct Avx2(__m256, __m256);

    impl Simd16 for Avx2 {
        // Up to twelve of the sixteen registers are accumulators. Three rows of two panels would
        // leave too few registers for the operands.
        const PANELS: [usize; 9] = [0, 4, 2, 1, 1, 1, 1, 0, 0];
        const QUANTIZED_PANELS: usize = 2;
        const MAX_QUANTIZED_ROWS: usize = 4;

        type Words = (__m256i, __m256i);

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe { Self(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }

        #[inline(always)]
        unsafe fn all(value: f32) -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller promises AVX2 and sixteen readable floats.
            unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
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
        unsafe fn load_f16(from: *const u8) -> Self {
            // SAFETY: the caller promises F16C and sixteen readable 16-bit values.
            unsafe {
                Self(
                    _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                    _mm256_cvtph_ps(_mm_loadu_si128(from.add(16).cast())),
                )
            }
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: the caller promises AVX2 and sixteen readable bytes.
            unsafe {
                let a = from.cast();
                let b = from.add(8).cast();
                Self(
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(a))),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(b))),
                )
            }
        }

        #[inline(always)]
        unsafe fn load_u8(from: *const u8) -> Self {
            // SAFETY: the caller promises AVX2 and sixteen readable bytes.
            unsafe {
                let a = from.cast();
                let b = from.add(8).cast();
                Self(
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(a))),
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(b))),
                )
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

        #[inline(always)]
        unsafe fn times(self, factor: Self) -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe { Self(_mm256_mul_ps(self.0, factor.0), _mm256_mul_ps(self.1, factor.1)) }
        }

        #[inline(always)]
        unsafe fn times_minus(self, factor: Self, offset: Self) -> Self {
            // SAFETY: the caller promises AVX2 and FMA.
            unsafe {
                Self(
                    _mm256_fmsub_ps(self.0, factor.0, offset.0),
                    _mm256_fmsub_ps(self.1, factor.1, offset.1),
                )
            }
        }

        #[inline(always)]
        unsafe fn load_words(from: *const u8) -> Self::Words {
            // SAFETY: the caller promises AVX2 and sixteen readable words.
            unsafe { (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())) }
        }

        #[inline(always)]
        unsafe fn lower_bf16((a, b): Self::Words) -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe {
                Self(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
                )
            }
        }

        #[inline(always)]
        unsafe fn upper_bf16((a, b): Self::Words) -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe {
                let upper = _mm256_set1_epi32(UPPER);
                Self(
                    _mm256_castsi256_ps(_mm256_and_si256(a, upper)),
                    _mm256_castsi256_ps(_mm256_and_si256(b, upper)),
                )
            }
        }

        #[inline(always)]
        unsafe fn byte<const I: usize>((a, b): Self::Words) -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe { Self(byte256::<I>(a), byte256::<I>(b)) }
        }

        #[inline(always)]
        unsafe fn field((a, b): Self::Words, shift: u32, bits: u32, offset: u8) -> Self {
            // SAFETY: the caller promises AVX2.
            unsafe { Self(field256(a, shift, bits, offset), field256(b, shift, bits, offset)) }
        }

        #[inline(always)]
        unsafe fn join_top_bits([a, b, c]: [Self::Words; 3]) -> Self::Words {
            // SAFETY: the caller promises AVX2.
            unsafe { (join256(a.0, b.0, c.0), join256(a.1, b.1, c.1)) }
        }
    }

    /// Implements [`Simd16::join_top_bits`] for eight words.
    #[inline(always)]
    unsafe fn join256(a: __m256i, b: __m256i, c: __m256i) -> __m256i {
        // SAFETY: the caller promises AVX2.
        unsafe {
            let b = _mm256_slli_epi32::<2>(_mm256_srli_epi32::<30>(b));
            let c = _mm256_slli_epi32::<4>(_mm256_srli_epi32::<30>(c));
            _mm256_or_si256(_mm256_srli_epi32::<30>(a), _mm256_or_si256(b, c))
        }
    }

    /// Implements [`Simd16::byte`] for eight words: moves the byte to bits 8 to 15 and adds the
    /// exponent of [`BYTE_BASE`].
    #[inline(always)]
    unsafe fn byte256<const I: usize>(words: __m256i) -> __m256 {
        // SAFETY: the caller promises AVX2.
        unsafe {
            let moved = match I {
                0 => _mm256_slli_epi32::<8>(words),
                1 => words,
                2 => _mm256_srli_epi32::<8>(words),
                _ => _mm256_srli_epi32::<16>(words),
            };
            let exponent = _mm256_set1_epi32(BYTE_BASE.to_bits().cast_signed());
            let byte = _mm256_and_si256(moved, _mm256_set1_epi32(BYTE_MASK));
            _mm256_castsi256_ps(_mm256_or_si256(byte, exponent))
        }
    }

    /// Implements [`Simd16::field`] for eight words.
    ///
    /// Inserts the field into the mantissa of a power of two and subtracts this power, which leaves
    /// the number. The method needs no conversion from integers, and no shift if the field lies in the
    /// lower 23 bits, where an f32 has its mantissa.
    #[inline(always)]
    unsafe fn field256(words: __m256i, shift: u32, bits: u32, offset: u8) -> __m256 {
        // SAFETY: the caller promises AVX2.
        unsafe {
            let (words, shift) = if shift + bits > MANTISSA {
                (_mm256_srl_epi32(words, _mm_cvtsi32_si128(shift.cast_signed())), 0)
            } else {
                (words, shift)
            };
            let mask = _mm256_set1_epi32((((1_u32 << bits) - 1) << shift).cast_signed());
            let power = exponent_bits(shift);
            let exponent = _mm256_set1_epi32(power.cast_signed());
            let number = _mm256_or_si256(_mm256_and_si256(words, mask), exponent);
            let base = _mm256_set1_ps(f32::from_bits(power) + f32::from(offset));
            _mm256_sub_ps(_mm256_castsi256_ps(number), base)
        }
    }

    /// Shifts sixteen words to the right by a constant.
    #[inline(always)]
    unsafe fn shift512(words: __m512i, by: u32) -> __m512i {
        // SAFETY: the caller promises AVX-512F.
        unsafe {
            match by {
                0 => words,
                by => _mm512_srl_epi32(words, _mm_cvtsi32_si128(by.cast_signed())),
            }
        }
    }

    /// Sixteen values in one register of AVX-512.
    #[derive(Clone, Copy)]
    pub(in crate::kernel) struct Avx512(__m512);

    impl Simd16 for Avx512 {
        // Up to 24 of the 32 registers are accumulators.
        const PANELS: [usize; 9] = [0, 4, 4, 4, 4, 4, 4, 2, 2];
        const QUANTIZED_PANELS: usize = 4;
        const MAX_QUANTIZED_ROWS: usize = 8;

        type Words = __m512i;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_setzero_ps()) }
        }

        #[inline(always)]
        unsafe fn all(value: f32) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller promises AVX-512F and sixteen readable floats.
            unsafe { Self(_mm512_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller promises AVX-512F and sixteen writable floats.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn load_f16(from: *const u8) -> Self {
            // SAFETY: the caller promises AVX-512F and sixteen readable 16-bit values.
            unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: the caller promises AVX-512F and sixteen readable bytes.
            unsafe {
                let bytes = _mm_loadu_si128(from.cast());
                Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
            }
        }

        #[inline(always)]
        unsafe fn load_u8(from: *const u8) -> Self {
            // SAFETY: the caller promises AVX-512F and sixteen readable bytes.
            unsafe {
                let bytes = _mm_loadu_si128(from.cast());
                Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)))
            }
        }

        #[inline(always)]
        unsafe fn add_scaled(self, scale: f32, values: Self) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_fmadd_ps(_mm512_set1_ps(scale), values.0, self.0)) }
        }

        #[inline(always)]
        unsafe fn times(self, factor: Self) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_mul_ps(self.0, factor.0)) }
        }

        #[inline(always)]
        unsafe fn times_minus(self, factor: Self, offset: Self) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_fmsub_ps(self.0, factor.0, offset.0)) }
        }

        #[inline(always)]
        unsafe fn load_words(from: *const u8) -> Self::Words {
            // SAFETY: the caller promises AVX-512F and sixteen readable words.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }

        #[inline(always)]
        unsafe fn lower_bf16(words: Self::Words) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))) }
        }

        #[inline(always)]
        unsafe fn upper_bf16(words: Self::Words) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe { Self(_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(UPPER)))) }
        }

        #[inline(always)]
        unsafe fn byte<const I: usize>(words: Self::Words) -> Self {
            // The same method as in `byte256`.
            // SAFETY: the caller promises AVX-512F.
            unsafe {
                let moved = match I {
                    0 => _mm512_slli_epi32::<8>(words),
                    1 => words,
                    2 => _mm512_srli_epi32::<8>(words),
                    _ => _mm512_srli_epi32::<16>(words),
                };
                let exponent = _mm512_set1_epi32(BYTE_BASE.to_bits().cast_signed());
                // Bitwise `exponent | (moved & mask)`.
                let mask = _mm512_set1_epi32(BYTE_MASK);
                let bits = _mm512_ternarylogic_epi32::<0xF8>(exponent, moved, mask);
                Self(_mm512_castsi512_ps(bits))
            }
        }

        #[inline(always)]
        unsafe fn field(words: Self::Words, shift: u32, bits: u32, offset: u8) -> Self {
            // SAFETY: the caller promises AVX-512F.
            unsafe {
                if bits == 4 {
                    // The permutation selects the number by the lowest four bits of a word.
                    let numbers = _mm512_setr_ps(
                        0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0,
                        14.0, 15.0,
                    );
                    let numbers = _mm512_sub_ps(numbers, _mm512_set1_ps(f32::from(offset)));
                    return Self(_mm512_permutexvar_ps(shift512(words, shift), numbers));
                }
                // The same method as in `field256`.
                let (by, shift) = if shift + bits > MANTISSA { (shift, 0) } else { (0, shift) };
                let mask = _mm512_set1_epi32((((1_u32 << bits) - 1) << shift).cast_signed());
                let power = exponent_bits(shift);
                let exponent = _mm512_set1_epi32(power.cast_signed());
                // Bitwise `exponent | (words & mask)`.
                let number = _mm512_ternarylogic_epi32::<0xF8>(exponent, shift512(words, by), mask);
                let base = f32::from_bits(power) + f32::from(offset);
                Self(_mm512_add_ps(_mm512_castsi512_ps(number), _mm512_set1_ps(-base)))
            }
        }

        #[inline(always)]
        unsafe fn join_top_bits([a, b, c]: [Self::Words; 3]) -> Self::Words {
            // SAFETY: the caller promises AVX-512F.
            unsafe {
                let b = _mm512_slli_epi32::<2>(_mm512_srli_epi32::<30>(b));
                let c = _mm512_slli_epi32::<4>(_mm512_srli_epi32::<30>(c));
                _mm512_or_si512(_mm512_srli_epi32::<30>(a), _mm512_or_si512(b, c))
            }
        }
    }
}
