//! [`UnappliedPasses`]: the passes whose gradients no optimizer step has applied, for the errors of
//! optimizer steps.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tinkex_wire::Seq;

use crate::error::Error;

/// Chunks whose gradients the server holds or will hold, by sequence number. Clones share the
/// chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct UnappliedPasses(Arc<Mutex<BTreeMap<u64, UnappliedChunk>>>);

/// A chunk of a pass that the server has accepted.
#[derive(Clone, Debug)]
struct UnappliedChunk {
    /// Sequence number of the first chunk of the pass.
    pass: Seq,
    /// Indices of the datums of this chunk in the batch of the pass.
    datums: Range<usize>,
}

impl UnappliedPasses {
    /// Adds a chunk that the server has accepted. `pass` is the sequence number of the first chunk
    /// of the same pass.
    pub(super) fn add(&self, seq: Seq, pass: Seq, datums: Range<usize>) {
        self.lock().insert(seq.get(), UnappliedChunk { pass, datums });
    }

    /// Removes a chunk that the server failed to execute.
    pub(super) fn remove(&self, seq: Seq) {
        self.lock().remove(&seq.get());
    }

    /// Removes the chunks before request `seq`, which has applied or discarded their gradients.
    pub(super) fn clear_before(&self, seq: Seq) {
        let mut chunks = self.lock();
        *chunks = chunks.split_off(&seq.get());
    }

    /// Adds to `error` the number of passes and datums whose gradients optimizer step `seq` did not
    /// apply. `pass` is the pass of the same call, if any; the error lists its datums.
    pub(super) fn describe(&self, error: Error, seq: Seq, pass: Option<Seq>) -> Error {
        let chunks = self.lock();
        let unapplied: Vec<&UnappliedChunk> =
            chunks.range(..seq.get()).map(|(_, chunk)| chunk).collect();
        let passes: BTreeSet<u64> = unapplied.iter().map(|chunk| chunk.pass.get()).collect();
        let datums = unapplied.iter().map(|chunk| chunk.datums.len()).sum();
        let own = unapplied.iter().filter(|chunk| Some(chunk.pass) == pass);
        error.with_unapplied(passes.len(), datums, own.map(|chunk| chunk.datums.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, UnappliedChunk>> {
        self.0.lock()
    }
}
