//! Observation of file operations, to inject faults in tests and simulations.
//!
//! A simulation needs to know what is durable, to make operations fail, and to end the simulated
//! process between two operations. Tests of this crate interrupt a replacement after each operation.
//! An observer sees the operations of its own thread only. Without an observer, an announcement
//! costs one read of a thread-local variable.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;

/// An operation that is about to be performed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum FileOperation<'a> {
    /// Bytes are appended to a file.
    Append(&'a File),
    /// A file is truncated to a length in bytes.
    Truncate(&'a File, u64),
    /// A file is flushed.
    SyncFile(&'a File),
    /// The entries of a folder are flushed.
    SyncFolder(&'a Path),
    /// A file or folder is renamed, which replaces a file at the second path.
    Rename(&'a Path, &'a Path),
    /// Two paths are swapped.
    Exchange(&'a Path, &'a Path),
    /// A file or folder is removed.
    Remove(&'a Path),
    /// A transaction of a database is committed.
    Commit,
    /// A file is opened to be read.
    Read(&'a Path),
}

type Observer = Rc<dyn Fn(FileOperation<'_>) -> io::Result<()>>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Passes all operations of this thread to `observer`, until the returned value is dropped. An
/// operation for which it returns an error is not performed and fails with that error.
pub fn observe_thread(
    observer: impl Fn(FileOperation<'_>) -> io::Result<()> + 'static,
) -> ThreadObserver {
    OBSERVER.with_borrow_mut(|current| *current = Some(Rc::new(observer)));
    ThreadObserver(())
}

/// Ends the observation of this thread when it is dropped.
#[derive(Debug)]
#[must_use = "the observation ends when this value is dropped"]
pub struct ThreadObserver(());

impl Drop for ThreadObserver {
    fn drop(&mut self) {
        OBSERVER.with_borrow_mut(|current| *current = None);
    }
}

/// Announces an operation to the observer of this thread.
///
/// # Errors
/// The error of the observer; the caller must not perform the operation then.
pub fn announce(operation: FileOperation<'_>) -> io::Result<()> {
    let observer = OBSERVER.with_borrow(Option::clone);
    observer.map_or(Ok(()), |observer| observer(operation))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn an_observer_can_fail_operations_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let announced = Rc::new(Cell::new(0));
        let counter = Rc::clone(&announced);
        let observer = observe_thread(move |operation| {
            counter.set(counter.get() + 1);
            match operation {
                FileOperation::Rename(..) => Err(io::Error::other("full")),
                _ => Ok(()),
            }
        });
        assert_eq!(crate::write(&path, "x").unwrap_err().to_string(), "full");
        assert_eq!((announced.get(), path.exists()), (2, false));
        drop(observer);
        crate::write(&path, "x").unwrap();
        assert_eq!(announced.get(), 2);
    }
}
