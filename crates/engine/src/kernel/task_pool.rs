//! [`TaskPool`]: distributes independent tasks over the thread pool.

use std::marker::PhantomData;
use std::sync::Arc;

use super::thread_pool::ThreadPool;
use crate::{Error, Result};

/// Minimum number of multiply-adds for which tasks are distributed over threads. Smaller work takes
/// less time than starting a parallel region.
const MIN_PARALLEL_WORK: usize = 1 << 16;

/// Runs independent tasks on one or more threads. The result of a task must not depend on the
/// thread that runs it. Cheap to clone; clones share the threads.
#[derive(Clone)]
pub(crate) struct TaskPool {
    threads: usize,
    /// `None` with one thread: the caller's thread runs all tasks.
    pool: Option<Arc<ThreadPool>>,
}

impl TaskPool {
    /// Creates a pool of `threads` threads, including the caller's; 0 means one per core.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the system cannot start the threads.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            some => some,
        };
        let pool = match threads {
            1 => None,
            _ => Some(Arc::new(ThreadPool::new(threads - 1).map_err(|error| {
                Error::invalid("threads", format!("cannot start {threads} threads: {error}"))
            })?)),
        };
        Ok(Self { threads, pool })
    }

    /// Creates a pool that runs every task on the caller's thread.
    pub(crate) fn single_threaded() -> Self {
        Self { threads: 1, pool: None }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `task` once for every index below `count`, in any order and on any thread.
    pub(crate) fn for_each(&self, count: usize, task: impl Fn(usize) + Sync) {
        match &self.pool {
            Some(pool) if count > 1 => pool.for_each(count, task),
            _ => (0..count).for_each(task),
        }
    }

    /// Like [`for_each`](Self::for_each), but runs on the caller's thread if all tasks together are
    /// fewer than [`MIN_PARALLEL_WORK`] multiply-adds. `work` is that total.
    pub(crate) fn for_each_if_large(&self, work: usize, count: usize, task: impl Fn(usize) + Sync) {
        if work < MIN_PARALLEL_WORK {
            (0..count).for_each(task);
        } else {
            self.for_each(count, task);
        }
    }

    /// Returns the results of `task` for every index below `count`, in index order.
    pub(crate) fn map<T: Send>(&self, count: usize, task: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
        self.for_each_chunk(&mut results, 1, |index, result| result[0] = Some(task(index)));
        results.into_iter().flatten().collect()
    }

    /// Runs `task(index, row)` for every row of a row-major matrix with `width` columns. `work` is
    /// the number of operations per row.
    pub(crate) fn for_each_row<T: Send>(
        &self,
        matrix: &mut [T],
        width: usize,
        work: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let count = matrix.len() / width;
        if count * work < MIN_PARALLEL_WORK {
            return matrix.chunks_exact_mut(width).enumerate().for_each(|(i, row)| task(i, row));
        }
        let rows_per_chunk = count.div_ceil(self.threads * 4);
        let whole_rows = &mut matrix[..count * width];
        self.for_each_chunk(whole_rows, rows_per_chunk * width, |chunk, rows| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                task(chunk * rows_per_chunk + i, row);
            }
        });
    }

    /// Like [`for_each_row`](Self::for_each_row), but also passes the element of `values` with the
    /// row's index: `task(index, row, value)`.
    pub(crate) fn for_each_row_with<T: Send>(
        &self,
        matrix: &mut [T],
        width: usize,
        values: &mut [T],
        work: usize,
        task: impl Fn(usize, &mut [T], &mut T) + Sync,
    ) {
        let rows = matrix.chunks_exact_mut(width).zip(values);
        let mut rows: Vec<(&mut [T], &mut T)> = rows.collect();
        self.for_each_row(&mut rows, 1, work, |i, row| {
            let (row, value) = &mut row[0];
            task(i, row, value);
        });
    }
}

impl std::fmt::Debug for TaskPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskPool").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// A mutable slice that several tasks write to, each to its own disjoint part.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

#[expect(unsafe_code, reason = "tasks write disjoint parts of one slice; see `SharedMut::part`")]
mod shared {
    use super::{PhantomData, SharedMut, TaskPool};

    impl TaskPool {
        /// Runs `task(index, chunk)` for every chunk of `len` elements; the last chunk may be
        /// shorter.
        pub(crate) fn for_each_chunk<T: Send>(
            &self,
            slice: &mut [T],
            len: usize,
            task: impl Fn(usize, &mut [T]) + Sync,
        ) {
            let total = slice.len();
            let shared = SharedMut::new(slice);
            self.for_each(total.div_ceil(len), |chunk| {
                let start = chunk * len;
                // SAFETY: every chunk index is given to one task, and chunks do not overlap.
                task(chunk, unsafe { shared.part(start, len.min(total - start)) });
            });
        }
    }

    // SAFETY: a `SharedMut` gives access to the elements of an exclusive borrow only through
    // `part`, whose caller promises that parts in use at the same time do not overlap, and through
    // `element_ptr`, whose dereference is unsafe. A `SharedMut` may therefore be sent wherever
    // `&mut [T]` may,
    // which requires `T: Send`.
    unsafe impl<T: Send> Send for SharedMut<'_, T> {}
    // SAFETY: as for `Send`; no `&T` is ever shared between threads.
    unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

    impl<'a, T> SharedMut<'a, T> {
        pub(crate) fn new(slice: &'a mut [T]) -> Self {
            Self { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
        }

        /// Returns the `len` elements from index `start`.
        ///
        /// # Safety
        /// No other part that overlaps this one may exist while it is borrowed.
        ///
        /// # Panics
        /// If the part is not inside the slice.
        #[expect(clippy::mut_from_ref, reason = "the caller promises that the part is exclusive")]
        pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
            assert!(start <= self.len && len <= self.len - start, "part outside its slice");
            // SAFETY: the part is inside the slice by the check above, the slice is borrowed for
            // 'a, and the part is exclusive by the caller's promise.
            unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
        }

        /// Returns a pointer to element `index`.
        ///
        /// # Panics
        /// If `index` is not inside the slice.
        pub(crate) fn element_ptr(&self, index: usize) -> *mut T {
            assert!(index < self.len, "element outside its slice");
            // SAFETY: `index` is inside the slice by the check above, so the pointer stays inside
            // its allocation.
            unsafe { self.start.add(index) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_results_equal_a_sequential_loop() {
        for threads in [1, 3] {
            let pool = TaskPool::new(threads).unwrap();
            for (rows, width) in [(0, 3), (1, 1), (7, 5), (1000, 3)] {
                let mut expected: Vec<usize> = (0..rows * width).collect();
                let mut matrix = expected.clone();
                let update = |i: usize, row: &mut [usize]| row.iter_mut().for_each(|x| *x += i);
                expected.chunks_exact_mut(width).enumerate().for_each(|(i, row)| update(i, row));
                // A large `work` makes the pool distribute even these few rows.
                pool.for_each_row(&mut matrix, width, MIN_PARALLEL_WORK, update);
                assert_eq!(matrix, expected, "{threads} threads, {rows} × {width}");
            }
            assert_eq!(pool.map(100, |i| i * i), (0..100).map(|i| i * i).collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = "element outside its slice")]
    fn a_pointer_past_the_end_is_refused() {
        SharedMut::new(&mut [1.0_f32, 2.0]).element_ptr(2);
    }
}
