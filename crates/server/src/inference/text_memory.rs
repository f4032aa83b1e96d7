//! [`TextMemory`]: limits the memory of the texts that are tokenized at the same time.

use parking_lot::{Condvar, Mutex};
use tinkex_inference::SHORT_RENDERED_BYTES;
use tinkex_text::Tokenizer;

/// Size in bytes up to which a text is tokenized without a reservation. Short requests are tokenized
/// on an async thread, which must not wait; templates write no longer texts for them.
const SMALL_TEXT: usize = SHORT_RENDERED_BYTES;

/// Budget for the memory that tokenizers need while they encode texts.
pub(crate) struct TextMemory {
    /// Total number of bytes.
    limit: usize,
    /// Bytes that are not reserved.
    available: Mutex<usize>,
    released: Condvar,
}

impl TextMemory {
    /// Creates a budget of `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, available: Mutex::new(limit), released: Condvar::new() }
    }

    /// Returns the size of the longest text that may be tokenized, in bytes.
    pub(crate) fn max_text_bytes(&self) -> usize {
        (self.limit / Tokenizer::ENCODING_BYTES).max(SMALL_TEXT)
    }

    /// Runs `encode` for a text of `bytes` bytes. Waits until the texts that other threads encode
    /// leave enough memory; a text of at most [`SMALL_TEXT`] bytes does not wait.
    pub(crate) fn reserve<T>(&self, bytes: usize, encode: impl FnOnce() -> T) -> T {
        if bytes <= SMALL_TEXT {
            return encode();
        }
        let needed = bytes.saturating_mul(Tokenizer::ENCODING_BYTES).min(self.limit);
        let _reservation = self.wait_for(needed);
        encode()
    }

    fn wait_for(&self, needed: usize) -> Reservation<'_> {
        let mut available = self.available.lock();
        self.released.wait_while(&mut available, |available| *available < needed);
        *available -= needed;
        Reservation { memory: self, bytes: needed }
    }
}

/// Reserved bytes of a [`TextMemory`].
struct Reservation<'a> {
    memory: &'a TextMemory,
    bytes: usize,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        *self.memory.available.lock() += self.bytes;
        self.memory.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn long_texts_wait_for_each_other_and_short_texts_do_not() {
        let memory = TextMemory::new(100 * SMALL_TEXT * Tokenizer::ENCODING_BYTES);
        let longest = memory.max_text_bytes();
        assert_eq!(longest, 100 * SMALL_TEXT);
        let (finished, order) = mpsc::channel();
        std::thread::scope(|scope| {
            memory.reserve(longest, || {
                let other = finished.clone();
                let memory = &memory;
                scope.spawn(move || memory.reserve(2 * SMALL_TEXT, || other.send("long")));
                memory.reserve(SMALL_TEXT, || finished.send("short")).unwrap();
                finished.send("longest").unwrap();
            });
        });
        drop(finished);
        assert_eq!(order.iter().collect::<Vec<_>>(), ["short", "longest", "long"]);
        assert_eq!(*memory.available.lock(), memory.limit);
    }

    #[test]
    fn a_panic_releases_the_memory() {
        let memory = TextMemory::new(1 << 30);
        let panic = || memory.reserve(1 << 20, || panic!("the test expects this"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panic)).is_err());
        assert_eq!(*memory.available.lock(), 1 << 30);
    }
}
