//! Parts of the engine for the program that makes the built-in model (`crates/builtin-model`).
//!
//! Only that program enables the feature of this module. The module is not a part of the public
//! API and changes without notice.

use crate::rng::ChaCha8;
use crate::tokenizer;

pub use crate::train::full::FullTrainer;

/// Rule of [`pieces`] as a regular expression of the `tokenizers` library.
pub const SPLIT_PATTERN: &str = tokenizer::SPLIT_PATTERN;

/// Splits text into the pieces that no token crosses.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    tokenizer::pieces(text)
}

/// Returns the character that represents a byte in a `tokenizer.json`.
#[must_use]
pub fn byte_char(byte: u8) -> char {
    tokenizer::byte_char(byte)
}

/// Random numbers that are the same on every machine.
#[derive(Clone, Debug)]
pub struct RandomBits(ChaCha8);

impl RandomBits {
    /// Creates the generator of a seed and a stream number. Streams of one seed are independent.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(ChaCha8::new(seed, stream))
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }
}
