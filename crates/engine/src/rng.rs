//! [`ChaCha8`]: a random number generator with the same output on every machine.

/// ChaCha8 random number generator, keyed by a seed and a stream number.
#[derive(Clone, Debug)]
pub(crate) struct ChaCha8 {
    /// Constant, key, block counter and nonce.
    state: [u32; 16],
    /// Output of the current block.
    block: [u32; 16],
    /// Number of words of `block` that have been returned.
    used: usize,
}

impl ChaCha8 {
    /// Creates the generator of a seed and a stream number. Streams of one seed are independent.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let words = |x: u64| {
            #[expect(clippy::cast_possible_truncation, reason = "splits x into its halves")]
            [x as u32, (x >> 32) as u32]
        };
        let mut state = [0; 16];
        // The constant "expand 32-byte k", then the key, then a counter and nonce of zero.
        state[..4].copy_from_slice(&[0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574]);
        state[4..6].copy_from_slice(&words(seed));
        state[6..8].copy_from_slice(&words(stream));
        Self { state, block: [0; 16], used: 16 }
    }

    /// Returns the next 32 random bits.
    fn next_u32(&mut self) -> u32 {
        if self.used == 16 {
            self.block = block(&self.state);
            let (low, carry) = self.state[12].overflowing_add(1);
            self.state[12] = low;
            self.state[13] = self.state[13].wrapping_add(u32::from(carry));
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// Returns the next 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) | u64::from(self.next_u32()) << 32
    }

    /// Returns a uniform number in [0, 1) with 24 random bits.
    pub(crate) fn uniform(&mut self) -> f32 {
        #[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
        let whole = (self.next_u32() >> 8) as f32;
        whole / 16_777_216.0
    }
}

/// Returns the output block of `state`: four double rounds, then the addition of the state.
fn block(state: &[u32; 16]) -> [u32; 16] {
    const QUARTER_ROUNDS: [[usize; 4]; 8] = [
        [0, 4, 8, 12],
        [1, 5, 9, 13],
        [2, 6, 10, 14],
        [3, 7, 11, 15],
        [0, 5, 10, 15],
        [1, 6, 11, 12],
        [2, 7, 8, 13],
        [3, 4, 9, 14],
    ];
    let mut x = *state;
    for _ in 0..4 {
        for [a, b, c, d] in QUARTER_ROUNDS {
            for (p, q, r, by) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
                x[p] = x[p].wrapping_add(x[q]);
                x[r] = (x[r] ^ x[p]).rotate_left(by);
            }
        }
    }
    for (x, state) in x.iter_mut().zip(state) {
        *x = x.wrapping_add(*state);
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the cipher's published test vector for a key of zeros.
    #[test]
    fn the_first_block_matches_the_published_test_vector() {
        let mut rng = ChaCha8::new(0, 0);
        assert_eq!(rng.next_u64().to_le_bytes(), [0x3e, 0x00, 0xef, 0x2f, 0x89, 0x5f, 0x40, 0xd6]);
        assert_eq!(rng.next_u64().to_le_bytes(), [0x7f, 0x5b, 0xb8, 0xe8, 0x1f, 0x09, 0xa5, 0xa1]);
    }
}
