//! Asking the system for memory, so that a refusal is an error and not the end of the program.

use crate::{Error, Result};

/// An empty vector with room for `len` elements. The system hands the memory out when it is used.
///
/// # Errors
/// [`Error::OutOfMemory`] if the system refuses.
pub(crate) fn reserve<T>(what: &'static str, len: usize) -> Result<Vec<T>> {
    let mut out = Vec::new();
    match out.try_reserve_exact(len) {
        Ok(()) => Ok(out),
        Err(_) => Err(refused(what, len.saturating_mul(size_of::<T>()))),
    }
}

/// Whether the system would give `bytes` now; nothing is taken.
///
/// What follows asks for less at a time, and does not ask whether it may.
///
/// # Errors
/// [`Error::OutOfMemory`] if it would not.
pub(crate) fn probe(what: &'static str, bytes: usize) -> Result<()> {
    reserve::<u8>(what, bytes).map(drop)
}

fn refused(what: &'static str, needed: usize) -> Error {
    Error::OutOfMemory { what, needed: needed as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_machine_has_is_refused_and_what_it_has_is_not() {
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let error = probe("a bomb", bytes).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { needed, .. } if needed == bytes as u64));
            assert!(error.to_string().starts_with("a bomb needs "), "{error}");
        }
        probe("a page", 4096).unwrap();
        assert!(reserve::<u64>("much", usize::MAX).is_err());
        assert!(reserve::<f32>("a little", 5).unwrap().capacity() >= 5);
    }
}
