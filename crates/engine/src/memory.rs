//! Fallible allocation: if the system refuses memory, the caller gets an error and the process does
//! not abort.

use crate::kernel::free_unused_activations;
use crate::{Error, Result};

/// Returns an empty vector with capacity for `len` elements.
///
/// This reserves address space. The system may assign physical memory only when the elements are
/// written.
///
/// # Errors
/// [`Error::OutOfMemory`] if the system refuses the allocation. `what` names its purpose.
pub(crate) fn reserve<T>(what: &'static str, len: usize) -> Result<Vec<T>> {
    let mut out = Vec::new();
    // If the system refuses, free the memory that is kept for later activations and try again.
    let reserved = out.try_reserve_exact(len).or_else(|_| {
        free_unused_activations();
        out.try_reserve_exact(len)
    });
    match reserved {
        Ok(()) => Ok(out),
        Err(_) => Err(out_of_memory(what, len.saturating_mul(size_of::<T>()))),
    }
}

/// Checks that the system would currently provide `bytes` bytes, without keeping them.
///
/// Called before a computation that allocates this much in smaller pieces with the infallible
/// allocation functions.
///
/// # Errors
/// [`Error::OutOfMemory`] if the system would refuse. `what` names the purpose.
pub(crate) fn probe(what: &'static str, bytes: usize) -> Result<()> {
    reserve::<u8>(what, bytes).map(drop)
}

fn out_of_memory(what: &'static str, needed: usize) -> Error {
    Error::OutOfMemory { what, needed: needed as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_sizes_are_errors_and_small_ones_succeed() {
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let error = probe("a test", bytes).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { needed, .. } if needed == bytes as u64));
            assert!(error.to_string().contains("for a test"), "{error}");
        }
        probe("a page", 4096).unwrap();
        assert!(reserve::<u64>("a test", usize::MAX).is_err());
        assert!(reserve::<f32>("a test", 5).unwrap().capacity() >= 5);
    }
}
