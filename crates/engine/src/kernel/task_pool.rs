//! [`TaskPool`]: who computes what at the same time.

use std::marker::PhantomData;
use std::sync::Arc;

use super::thread_pool::ThreadPool;
use crate::{Error, Result};

/// Fewer operations than this are done sooner than handed out.
const WORTH: usize = 1 << 16;

/// Threads that share independent tasks. What a task computes must not depend on who runs it.
#[derive(Clone)]
pub(crate) struct TaskPool {
    threads: usize,
    /// `None` with one thread: the caller's own does the work.
    crew: Option<Arc<ThreadPool>>,
}

impl TaskPool {
    /// `threads` of them, the caller's among them; 0 means one for each core.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            some => some,
        };
        let crew = match threads {
            1 => None,
            _ => Some(Arc::new(
                ThreadPool::new(threads - 1)
                    .map_err(|error| Error::invalid("threads", error.to_string()))?,
            )),
        };
        Ok(Self { threads, crew })
    }

    /// The caller's thread alone.
    pub(crate) fn alone() -> Self {
        Self { threads: 1, crew: None }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `task` once for every number below `count`, in any order, on any thread.
    pub(crate) fn each(&self, count: usize, task: impl Fn(usize) + Sync) {
        match &self.crew {
            Some(crew) if count > 1 => crew.each(count, task),
            _ => (0..count).for_each(task),
        }
    }

    /// The same where all tasks together are `work` multiply-adds: too few are not worth sharing.
    pub(crate) fn each_if_worth(&self, work: usize, count: usize, task: impl Fn(usize) + Sync) {
        if work < WORTH {
            (0..count).for_each(task);
        } else {
            self.each(count, task);
        }
    }

    /// The results of `task` for every number below `count`, in order.
    pub(crate) fn map<T: Send>(&self, count: usize, task: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
        self.each_part(&mut results, 1, |index, result| result[0] = Some(task(index)));
        results.into_iter().flatten().collect()
    }

    /// Runs `task` on every row of a matrix whose rows are `width` long, each of them being `work`
    /// operations.
    pub(crate) fn each_row<T: Send>(
        &self,
        matrix: &mut [T],
        width: usize,
        work: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let count = matrix.len() / width;
        if count * work < WORTH {
            return matrix.chunks_exact_mut(width).enumerate().for_each(|(i, row)| task(i, row));
        }
        let least = count.div_ceil(self.threads * 4);
        let whole = &mut matrix[..count * width];
        self.each_part(whole, least * width, |part, rows| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                task(part * least + i, row);
            }
        });
    }

    /// [`each_row`](Self::each_row) of a matrix that has a number beside every row.
    pub(crate) fn each_row_with<T: Send>(
        &self,
        matrix: &mut [T],
        width: usize,
        beside: &mut [T],
        work: usize,
        task: impl Fn(usize, &mut [T], &mut T) + Sync,
    ) {
        let rows = matrix.chunks_exact_mut(width).zip(beside);
        let mut rows: Vec<(&mut [T], &mut T)> = rows.collect();
        self.each_row(&mut rows, 1, work, |i, row| {
            let (row, beside) = &mut row[0];
            task(i, row, beside);
        });
    }
}

impl std::fmt::Debug for TaskPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskPool").field("threads", &self.threads).finish()
    }
}

/// A slice that several tasks write to, each its own part.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

#[expect(unsafe_code, reason = "the parts that tasks take do not overlap; see `part`")]
mod shared {
    use super::{PhantomData, SharedMut, TaskPool};

    impl TaskPool {
        /// Runs `task` on every part of a slice; parts are `len` long, but for the last.
        pub(super) fn each_part<T: Send>(
            &self,
            slice: &mut [T],
            len: usize,
            task: impl Fn(usize, &mut [T]) + Sync,
        ) {
            let total = slice.len();
            let shared = SharedMut::new(slice);
            self.each(total.div_ceil(len), |part| {
                let start = part * len;
                // SAFETY: every part is given out once, and parts do not overlap.
                task(part, unsafe { shared.part(start, len.min(total - start)) });
            });
        }
    }

    // SAFETY: a `SharedMut` gives access to `T`s of an exclusive borrow only through `part`, whose
    // caller promises that parts in use at the same time do not overlap. So it may go where the
    // `&mut [T]` parts may go, which is where `T: Send` may.
    unsafe impl<T: Send> Send for SharedMut<'_, T> {}
    // SAFETY: as above.
    unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

    impl<'a, T> SharedMut<'a, T> {
        pub(crate) fn new(slice: &'a mut [T]) -> Self {
            Self { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
        }

        /// `len` elements from `start` on.
        ///
        /// # Safety
        /// While the part lives nobody else may have a part that overlaps it.
        #[expect(clippy::mut_from_ref, reason = "the promise above makes the borrow exclusive")]
        pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
            assert!(start <= self.len && len <= self.len - start, "part outside its slice");
            // SAFETY: inside the slice by the check above, alive for 'a, and exclusive by the
            // caller's promise.
            unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
        }

        /// The address of one element, for writes of single elements.
        pub(crate) fn address(&self, index: usize) -> *mut T {
            assert!(index < self.len || (index == 0 && self.len == 0), "address outside its slice");
            // SAFETY: inside the slice by the check above.
            unsafe { self.start.add(index) }
        }
    }
}
