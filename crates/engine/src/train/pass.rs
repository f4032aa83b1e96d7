//! [`PassProgress`]: the state of a pass between two micro-batches.

use super::forward_pass::MIN_SHARED_PREFIX;
use super::objective::{DatumLoss, TrainingOutput, report};
use crate::model::{AdapterGradients, PackedBatch, PrefixTree};

/// A pass over a batch of any size, of which some micro-batches are done.
///
/// Data with a common prefix form a tree, which is not divided. The sums continue over micro-batches
/// in the same order, so the division into micro-batches does not change a bit of the result.
#[derive(Clone, Debug)]
pub struct PassProgress {
    /// Trees in the order of execution.
    pub(super) trees: Vec<PrefixTree>,
    /// Number of trees whose data are done.
    pub(super) done: usize,
    /// Number of input tokens of each datum.
    pub(super) tokens: Vec<usize>,
    /// Log-probabilities of the targets of each datum; empty until the datum is done.
    pub(super) logprobs: Vec<Vec<f32>>,
    /// Loss of each datum; `None` until the datum is done.
    pub(super) losses: Vec<Option<DatumLoss>>,
    /// Gradients of the data that are done; `None` for a pass without gradients.
    pub(super) gradients: Option<AdapterGradients>,
}

/// Data that a pass executes together.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    data: Vec<usize>,
    /// Number of trees that the data form.
    trees: usize,
    rows: usize,
}

impl MicroBatch {
    /// Returns the indices of the data, in the order of execution.
    #[must_use]
    pub fn data(&self) -> &[usize] {
        &self.data
    }

    /// Returns the number of rows: tokens, of which a common prefix counts once.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }
}

impl PassProgress {
    /// Begins a pass over data with these input tokens.
    pub(super) fn new(tokens: &[&[u32]], gradients: Option<AdapterGradients>) -> Self {
        Self {
            trees: PackedBatch::trees(tokens, MIN_SHARED_PREFIX),
            done: 0,
            tokens: tokens.iter().map(|tokens| tokens.len()).collect(),
            logprobs: vec![Vec::new(); tokens.len()],
            losses: tokens.iter().map(|_| None).collect(),
            gradients,
        }
    }

    /// Returns a number that increases with every micro-batch, from 0.
    #[must_use]
    pub fn position(&self) -> usize {
        self.done
    }

    /// Returns the next trees, as many as fit `max_rows`; `None` if all are done.
    pub(super) fn next(&self, max_rows: usize) -> Option<MicroBatch> {
        let (first, others) = self.trees[self.done..].split_first()?;
        let mut batch = MicroBatch { data: first.sequences.clone(), trees: 1, rows: first.rows };
        for tree in others {
            if batch.rows + tree.rows > max_rows {
                break;
            }
            batch.data.extend(&tree.sequences);
            batch.trees += 1;
            batch.rows += tree.rows;
        }
        Some(batch)
    }

    /// Records the results of the data of a micro-batch.
    pub(super) fn record(
        &mut self,
        batch: &MicroBatch,
        logprobs: Vec<Vec<f32>>,
        losses: Vec<DatumLoss>,
    ) {
        for ((index, logprobs), loss) in batch.data.iter().zip(logprobs).zip(losses) {
            self.logprobs[*index] = logprobs;
            self.losses[*index] = Some(loss);
        }
        self.done += batch.trees;
    }

    /// Returns the result of a pass whose data are all done.
    pub(super) fn into_output(self) -> TrainingOutput {
        debug_assert_eq!(self.done, self.trees.len(), "all micro-batches are done");
        let losses = self.losses.into_iter().flatten().collect();
        let metrics = report(&self.tokens, losses);
        TrainingOutput { logprobs: self.logprobs, metrics }
    }
}
