//! [`PanelFormat`]: how the micro-kernel reads the weights of a panel from memory.
//!
//! A panel has sixteen outputs, whose weights it stores in blocks of inputs. Within a block, lane
//! `l` of every vector belongs to output `l`. The quantized formats have the bits of sixteen GGUF
//! rows in another order:
//!
//! | Format | Inputs per block | Bytes per block | Contents |
//! |---|---|---|---|
//! | [`F32`] | 1 | 64 | 16 weights |
//! | [`F16`] | 1 | 32 | 16 weights |
//! | [`Bf16`] | 2 | 64 | 16 words: the weight of the first input, then (upper half) of the second |
//! | [`Q8_0`] | 32 | 544 | 16 scales (f16); 16 words for every 4 inputs |
//! | [`Q4_0`] | 32 | 288 | 16 scales (f16); 16 words for every 8 inputs |
//! | [`Q4K`] | 256 | 2368 | 16 scales and 16 minimum scales (f16); 16 factors of the scale and 16 of the minimum (bytes) for every 32 inputs; 16 words for every 8 inputs |
//! | [`Q6K`] | 256 | 3392 | 16 scales (f16) and 32 unused bytes; 16 factors (signed bytes) for every 16 inputs; 3 × 16 words for every 16 inputs |
//!
//! A weight is stored as an unsigned number, from which the format's scale and minimum restore the
//! value. A word has four numbers of 8 bits (`Q8_0`, whose signed numbers are stored plus 128) or
//! eight numbers of 4 bits, the first number in the lowest bits. Three words of `Q6_K` have sixteen
//! numbers of 6 bits: each word has five numbers, from its lowest bits on, and in its highest bits
//! two bits of the last number.
//!
//! The decoded weights equal the weights that the reference implementation of GGUF decodes to f32,
//! bit for bit: the products of a scale, a factor and a number fit in the mantissa, so only the
//! subtraction of `Q4_K`'s minimum rounds.

#![expect(
    unsafe_code,
    reason = "reads through raw pointers; every function documents its requirements"
)]

use super::simd::{BYTE_BASE, Simd16};

/// Storage format of a panel, read in blocks. A block consists of `PARTS` parts, each with its own
/// scale, a part of `PART_CHUNKS` chunks, and a chunk of `CHUNK_INPUTS` inputs.
///
/// # Safety
/// The CPU must have the instructions of `W` when a method is called. `block` must be the address
/// of `BLOCK_BYTES` readable bytes, with any alignment. `part` must be less than `PARTS`, and `I`
/// less than `CHUNK_INPUTS`. `from` must be the address of a chunk in such a block. The block must
/// stay readable while the result of `chunk` is used, which may be an address in it.
pub(super) trait PanelFormat {
    /// Number of inputs in a block.
    const BLOCK_INPUTS: usize;
    /// Size of a block in bytes.
    const BLOCK_BYTES: usize;
    /// Number of parts in a block.
    const PARTS: usize = 1;
    /// Number of chunks in a part.
    const PART_CHUNKS: usize = 1;
    /// Number of inputs in a chunk, at most 16.
    const CHUNK_INPUTS: usize;
    /// Size of a chunk in bytes.
    const CHUNK_BYTES: usize;
    /// Whether the weights are quantized.
    const QUANTIZED: bool = true;
    /// Distance in blocks between the weights that are read and the weights that are prefetched: about
    /// 2 KiB of each panel, but at least one block; 8 to 14 KiB in a group of four panels.
    const BLOCKS_AHEAD: usize;

    /// Scale of one part.
    type Scale<W: Simd16>: Copy;
    /// Stored weights of one chunk.
    type Chunk<W: Simd16>: Copy;

    /// Loads the scale of part `part`.
    unsafe fn scale<W: Simd16>(block: *const u8, part: usize) -> Self::Scale<W>;
    /// Returns the offset in bytes of a chunk in its block.
    fn chunk_offset(part: usize, chunk: usize) -> usize;
    /// Loads the chunk at `from`.
    unsafe fn chunk<W: Simd16>(from: *const u8) -> Self::Chunk<W>;
    /// Decodes the weights of input `I` of a chunk.
    unsafe fn weights<W: Simd16, const I: usize>(chunk: Self::Chunk<W>, scale: Self::Scale<W>)
    -> W;
}

/// Returns the lowest bit of field `index` of a word with fields of `bits` bits.
#[expect(clippy::cast_possible_truncation, reason = "a word has 32 bits")]
const fn first_bit(index: usize, bits: u32) -> u32 {
    index as u32 * bits
}

pub(super) struct F32;

impl PanelFormat for F32 {
    const BLOCK_INPUTS: usize = 1;
    const BLOCK_BYTES: usize = 64;
    const BLOCKS_AHEAD: usize = 32;
    const CHUNK_INPUTS: usize = 1;
    const CHUNK_BYTES: usize = 64;
    const QUANTIZED: bool = false;

    type Scale<W: Simd16> = ();
    type Chunk<W: Simd16> = W;

    #[inline(always)]
    unsafe fn scale<W: Simd16>(_: *const u8, _: usize) {}

    #[inline(always)]
    fn chunk_offset(_: usize, _: usize) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn chunk<W: Simd16>(from: *const u8) -> W {
        // SAFETY: the caller promises a valid chunk and the instructions of `W`.
        unsafe { W::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn weights<W: Simd16, const I: usize>(chunk: W, (): ()) -> W {
        chunk
    }
}

pub(super) struct F16;

impl PanelFormat for F16 {
    const BLOCK_INPUTS: usize = 1;
    const BLOCK_BYTES: usize = 32;
    const BLOCKS_AHEAD: usize = 64;
    const CHUNK_INPUTS: usize = 1;
    const CHUNK_BYTES: usize = 32;
    const QUANTIZED: bool = false;

    type Scale<W: Simd16> = ();
    type Chunk<W: Simd16> = W;

    #[inline(always)]
    unsafe fn scale<W: Simd16>(_: *const u8, _: usize) {}

    #[inline(always)]
    fn chunk_offset(_: usize, _: usize) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn chunk<W: Simd16>(from: *const u8) -> W {
        // SAFETY: the caller promises a valid chunk and the instructions of `W`.
        unsafe { W::load_f16(from) }
    }

    #[inline(always)]
    unsafe fn weights<W: Simd16, const I: usize>(chunk: W, (): ()) -> W {
        chunk
    }
}

pub(super) struct Bf16;

impl PanelFormat for Bf16 {
    const BLOCK_INPUTS: usize = 2;
    const BLOCK_BYTES: usize = 64;
    const BLOCKS_AHEAD: usize = 32;
    const CHUNK_INPUTS: usize = 2;
    const CHUNK_BYTES: usize = 64;
    const QUANTIZED: bool = false;

    type Scale<W: Simd16> = ();
    type Chunk<W: Simd16> = W::Words;

    #[inline(always)]
    unsafe fn scale<W: Simd16>(_: *const u8, _: usize) {}

    #[inline(always)]
    fn chunk_offset(_: usize, _: usize) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn chunk<W: Simd16>(from: *const u8) -> W::Words {
        // SAFETY: the caller promises a valid chunk and the instructions of `W`.
        unsafe { W::load_words(from) }
    }

    #[inline(always)]
    unsafe fn weights<W: Simd16, const I: usize>(chunk: W::Words, (): ()) -> W {
        // SAFETY: the caller promises the instructions of `W`.
        unsafe { if I == 0 { W::lower_bf16(chunk) } else { W::upper_bf16(chunk) } }
    }
}

/// `scale · number`, with a signed number of 8 bits, stored plus 128.
pub(super) struct Q8_0;

impl Q8_0 {
    /// The stored byte that means 0.
    pub(super) const ZERO: u8 = 128;
}

impl PanelFormat for Q8_0 {
    const BLOCK_INPUTS: usize = 32;
    const BLOCK_BYTES: usize = 32 + 32 * 16;
    const BLOCKS_AHEAD: usize = 4;
    const PART_CHUNKS: usize = 8;
    const CHUNK_INPUTS: usize = 4;
    const CHUNK_BYTES: usize = 64;

    /// The scale, and the scale times the value that [`Simd16::byte`] returns for the number 0.
    type Scale<W: Simd16> = (W, W);
    type Chunk<W: Simd16> = W::Words;

    #[inline(always)]
    unsafe fn scale<W: Simd16>(block: *const u8, _: usize) -> (W, W) {
        // SAFETY: the caller promises a valid block and the instructions of `W`.
        unsafe {
            let scale = W::load_f16(block);
            (scale, scale.times(W::all(BYTE_BASE + f32::from(Self::ZERO))))
        }
    }

    #[inline(always)]
    fn chunk_offset(_: usize, chunk: usize) -> usize {
        32 + chunk * 64
    }

    #[inline(always)]
    unsafe fn chunk<W: Simd16>(from: *const u8) -> W::Words {
        // SAFETY: the caller promises a valid chunk and the instructions of `W`.
        unsafe { W::load_words(from) }
    }

    #[inline(always)]
    unsafe fn weights<W: Simd16, const I: usize>(chunk: W::Words, (scale, zero): (W, W)) -> W {
        // Both products are exact: a scale has 11 significant bits, a byte with its base 16, and
        // `BYTE_BASE + 128` has 9. The difference is `scale · number`, which has at most 19.
        // SAFETY: the caller promises the instructions of `W`.
        unsafe { scale.times_minus(W::byte::<I>(chunk), zero) }
    }
}

/// `scale · (number - 8)`, with a number of 4 bits.
pub(super) struct Q4_0;

impl PanelFormat for Q4_0 {
    const BLOCK_INPUTS: usize = 32;
    const BLOCK_BYTES: usize = 32 + 32 * 8;
    const BLOCKS_AHEAD: usize = 8;
    const PART_CHUNKS: usize = 4;
    const CHUNK_INPUTS: usize = 8;
    const CHUNK_BYTES: usize = 64;

    type Scale<W: Simd16> = W;
    type Chunk<W: Simd16> = W::Words;

    #[inline(always)]
    unsafe fn scale<W: Simd16>(block: *const u8, _: usize) -> W {
        // SAFETY: the caller promises a valid block and the instructions of `W`.
        unsafe { W::load_f16(block) }
    }

    #[inline(always)]
    fn chunk_offset(_: usize, chunk: usize) -> usize {
        32 + chunk * 64
    }

    #[inline(always)]
    unsafe fn chunk<W: Simd16>(from: *const u8) -> W::Words {
        // SAFETY: the caller promises a valid chunk and the instructions of `W`.
        unsafe { W::load_words(from) }
    }

    #[inline(always)]
    unsafe fn weights<W: Simd16, const I: usize>(chunk: W::Words, scale: W) -> W {
        // SAFETY: the caller promises the instructions of `W`.
        unsafe { scale.times(W::field(chunk, first_bit(I, 4), 4, 8)) }
    }
}

/// `scale · factor · number - minimum scale · minimum factor`, with a number of 4 bits.
pub(super) struct Q4K;

impl Q4K {
    /// Offset in bytes of the factors in a block.
    pub(super) const FACTORS: usize = 64;
    /// Offset in bytes of the numbers in a block.
    pub(super) const NUMBERS: usize = Self::FACTORS + 8 * 32;
}

impl PanelFormat for Q4K {
    const BLOCK_INPUTS: usize = 256;
    const BLOCK_BYTES: usize = Self::NUMBERS + 256 * 8;
    const PARTS: usize = 8;
    const BLOCKS_AHEAD: usize = 1;
    const PART_CHUNKS: usize = 4;
    const CHUNK_INPUTS: usize = 8;
    const CHUNK_BYTES: usize = 64;

    /// The scale and the minimum of the part.
    type Scale<W: Simd16> = (W, W);
    type Chunk<W: Simd16> = W::Words;

    #[inline(always)]
    unsafe fn scale<W: Simd16>(block: *const u8, part: usize) -> (W, W) {
        // SAFETY: the caller promises a valid block and the instructions of `W`.
        unsafe {
            let factors = block.add(Self::FACTORS + part * 32);
            (
                W::load_f16(block).times(W::load_u8(factors)),
                W::load_f16(block.add(32)).times(W::load_u8(factors.add(16))),
            )
        }
    }

    #[inline(always)]
    fn chunk_offset(part: usize, chunk: usize) -> usize {
        Self::NUMBERS + part * 256 + chunk * 64
    }

    #[inline(always)]
    unsafe fn chunk<W: Simd16>(from: *const u8) -> W::Words {
        // SAFETY: the caller promises a valid chunk and the instructions of `W`.
        unsafe { W::load_words(from) }
    }

    #[inline(always)]
    unsafe fn weights<W: Simd16, const I: usize>(chunk: W::Words, (scale, minimum): (W, W)) -> W {
        // SAFETY: the caller promises the instructions of `W`.
        unsafe { scale.times_minus(W::field(chunk, first_bit(I, 4), 4, 0), minimum) }
    }
}

/// `scale · factor · (number - 32)`, with a number of 6 bits.
pub(super) struct Q6K;

impl Q6K {
    /// Offset in bytes of the factors in a block.
    pub(super) const FACTORS: usize = 64;
    /// Offset in bytes of the numbers in a block.
    pub(super) const NUMBERS: usize = Self::FACTORS + 16 * 16;
}

impl PanelFormat for Q6K {
    const BLOCK_INPUTS: usize = 256;
    const BLOCK_BYTES: usize = Self::NUMBERS + 256 * 12;
    const PARTS: usize = 16;
    const BLOCKS_AHEAD: usize = 1;
    const CHUNK_INPUTS: usize = 16;
    const CHUNK_BYTES: usize = 192;

    type Scale<W: Simd16> = W;
    type Chunk<W: Simd16> = [W::Words; 3];

    #[inline(always)]
    unsafe fn scale<W: Simd16>(block: *const u8, part: usize) -> W {
        // SAFETY: the caller promises a valid block and the instructions of `W`.
        unsafe {
            let factors = block.add(Self::FACTORS + part * 16);
            W::load_f16(block).times(W::load_i8(factors.cast()))
        }
    }

    #[inline(always)]
    fn chunk_offset(part: usize, _: usize) -> usize {
        Self::NUMBERS + part * 192
    }

    #[inline(always)]
    unsafe fn chunk<W: Simd16>(from: *const u8) -> [W::Words; 3] {
        // SAFETY: the caller promises a valid chunk and the instructions of `W`.
        unsafe { [W::load_words(from), W::load_words(from.add(64)), W::load_words(from.add(128))] }
    }

    #[inline(always)]
    unsafe fn weights<W: Simd16, const I: usize>(chunk: [W::Words; 3], scale: W) -> W {
        // SAFETY: the caller promises the instructions of `W`.
        unsafe {
            scale.times(if I == 15 {
                W::field(W::join_top_bits(chunk), 0, 6, 32)
            } else {
                W::field(chunk[I / 5], first_bit(I % 5, 6), 6, 32)
            })
        }
    }
}
