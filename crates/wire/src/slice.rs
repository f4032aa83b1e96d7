//! [`SharedSlice`]: an immutable, reference-counted slice.
//!
//! Token and tensor data can be large and has several owners at once: the caller, a chunk of a
//! batch, and a request that may be retried. All owners share one allocation.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Bound, Deref, RangeBounds};
use std::sync::Arc;

/// An immutable, reference-counted slice. Cloning and sub-slicing copy a pointer.
///
/// Conversion from `Vec<T>` or `Arc<[T]>` does not copy the elements.
///
/// ```
/// use tinkex_wire::SharedSlice;
///
/// let all = SharedSlice::from(vec![1_i64, 2, 3, 4]);
/// let tail = all.slice(1..);
/// assert_eq!(&tail[..], [2, 3, 4]);
/// assert_eq!(tail.as_ptr(), all[1..].as_ptr()); // the same memory
/// ```
pub struct SharedSlice<T> {
    owner: SliceStorage<T>,
    start: usize,
    end: usize,
}

/// Backing storage: a vector that was moved in, or an `Arc<[T]>` if the elements had to be copied.
enum SliceStorage<T> {
    // Empty slices have no allocation: a decoded message can contain many of them, at two bytes
    // each. `None` encodes them because a third variant would grow the struct by a word.
    Vec(Option<Arc<Vec<T>>>),
    Slice(Arc<[T]>),
}

impl<T> SharedSlice<T> {
    /// Returns a sub-slice that shares the memory.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let from = match range.start_bound() {
            Bound::Included(&n) => n,
            Bound::Excluded(&n) => n.checked_add(1).expect("range out of bounds"),
            Bound::Unbounded => 0,
        };
        let to = match range.end_bound() {
            Bound::Included(&n) => n.checked_add(1).expect("range out of bounds"),
            Bound::Excluded(&n) => n,
            Bound::Unbounded => self.len(),
        };
        assert!(from <= to && to <= self.len(), "range {from}..{to} out of {}", self.len());
        Self { owner: self.owner.clone(), start: self.start + from, end: self.start + to }
    }
}

impl<T> Deref for SharedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.owner {
            SliceStorage::Vec(None) => &[],
            SliceStorage::Vec(Some(owner)) => &owner[self.start..self.end],
            SliceStorage::Slice(owner) => &owner[self.start..self.end],
        }
    }
}

impl<T> Clone for SharedSlice<T> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone(), start: self.start, end: self.end }
    }
}

impl<T> Clone for SliceStorage<T> {
    fn clone(&self) -> Self {
        match self {
            Self::Vec(owner) => Self::Vec(owner.clone()),
            Self::Slice(owner) => Self::Slice(Arc::clone(owner)),
        }
    }
}

impl<T> Default for SharedSlice<T> {
    fn default() -> Self {
        Self { owner: SliceStorage::Vec(None), start: 0, end: 0 }
    }
}

impl<T> From<Vec<T>> for SharedSlice<T> {
    fn from(values: Vec<T>) -> Self {
        let end = values.len();
        Self { owner: SliceStorage::Vec((end > 0).then(|| Arc::new(values))), start: 0, end }
    }
}

impl<T> From<Arc<[T]>> for SharedSlice<T> {
    fn from(values: Arc<[T]>) -> Self {
        match values.len() {
            0 => Self::default(),
            end => Self { owner: SliceStorage::Slice(values), start: 0, end },
        }
    }
}

impl<T: Clone> From<&[T]> for SharedSlice<T> {
    fn from(values: &[T]) -> Self {
        if values.is_empty() { Self::default() } else { Self::from(Arc::from(values)) }
    }
}

impl<T, const N: usize> From<[T; N]> for SharedSlice<T> {
    fn from(values: [T; N]) -> Self {
        if N == 0 { Self::default() } else { Self::from(Arc::<[T]>::from(values)) }
    }
}

impl<T> FromIterator<T> for SharedSlice<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        Self::from(Vec::from_iter(values))
    }
}

impl<T: PartialEq> PartialEq for SharedSlice<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for SharedSlice<T> {}

impl<T: PartialEq> PartialEq<[T]> for SharedSlice<T> {
    fn eq(&self, other: &[T]) -> bool {
        **self == *other
    }
}

impl<T: Hash> Hash for SharedSlice<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl<T> AsRef<[T]> for SharedSlice<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<'a, T> IntoIterator for &'a SharedSlice<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: fmt::Debug> fmt::Debug for SharedSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_slice(self, f)
    }
}

/// Prints at most 16 elements and the total number.
pub(crate) fn debug_slice<T: fmt::Debug>(all: &[T], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    const SHOWN: usize = 16;
    let mut list = f.debug_list();
    list.entries(&all[..all.len().min(SHOWN)]);
    if all.len() > SHOWN {
        list.entry(&format_args!("… {} elements", all.len()));
    }
    list.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_slices_share_one_allocation() {
        let all: SharedSlice<u32> = (0..10).collect();
        let part = all.slice(2..=8).slice(1..3);
        assert_eq!(&part[..], [3, 4]);
        assert_eq!(part.as_ptr(), all[3..].as_ptr());
        assert!(all.slice(10..).is_empty());
    }

    #[test]
    fn storage_does_not_affect_equality_and_empty_slices_do_not_allocate() {
        let vector = SharedSlice::from(vec![1_u32, 2, 3]);
        let shared = SharedSlice::from(Arc::<[u32]>::from([1, 2, 3]));
        assert_eq!(vector, shared);
        assert_eq!(vector.slice(1..), shared.slice(1..).clone());
        let empty: [SharedSlice<u32>; 4] =
            [vec![].into(), Arc::<[u32]>::from([]).into(), (&[][..]).into(), [].into()];
        for empty in empty {
            assert!(empty.is_empty() && matches!(empty.owner, SliceStorage::Vec(None)));
        }
        assert_eq!(size_of::<SharedSlice<u32>>(), 4 * size_of::<usize>());
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn range_end_overflow_is_out_of_bounds() {
        let _ = SharedSlice::from([1]).slice(..=usize::MAX);
    }

    #[test]
    fn debug_output_is_truncated() {
        let text = format!("{:?}", SharedSlice::from(vec![0_u8; 20]));
        assert!(text.ends_with("… 20 elements]"), "{text}");
    }
}
