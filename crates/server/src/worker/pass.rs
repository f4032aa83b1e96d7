//! [`RunningPasses`]: training passes that are executed one micro-batch at a time.
//!
//! Between two micro-batches the worker samples, executes requests of other models, and notices
//! that a session has ended or that the server stops. The next micro-batch belongs to the user and
//! session that have received least; the passes of one session take turns. Later requests of a model
//! with a running pass wait in the queue.

use std::collections::VecDeque;
use std::time::Duration;

use tinkex_backend::model_outcome::{open_run, usage_key};
use tinkex_backend::operation::ModelOperation;
use tinkex_backend::outcome::{Outcome, OutcomeHistory};
use tinkex_backend::queue::{QueuedOperation, fairness_key, is_suspect};
use tinkex_engine::train::PassProgress;
use tinkex_fairness::{FairShares, ShareId};
use tinkex_store::history::OperationHistory;
use tinkex_store::log;
use tinkex_store::store::{ModelRunRecord, UsageMeter};
use tinkex_wire::{ModelId, PassMode};
use tokio::time::Instant;

use super::dropped_pass::check_not_dropped;
use super::{Worker, micros};
use crate::fault::engine_failure;
use crate::operation::{EngineOperation, EngineTraining, TrainingPass};

/// Duration of a micro-batch for which the worker aims: the time for which a sample waits for a
/// pass.
const MICRO_BATCH_TIME: Duration = Duration::from_millis(150);

/// Minimum number of rows of a micro-batch. With fewer rows, a pass over a large model would spend
/// its time on reading the weights.
const MIN_ROWS: usize = 256;

/// Maximum number of rows of a micro-batch.
const MAX_ROWS: usize = 1 << 20;

/// Maximum factor between the limits of two consecutive micro-batches, because a measurement of a
/// short time is not exact.
const MAX_GROWTH: usize = 4;

/// Time after which a stop interrupts a micro-batch. A shorter micro-batch ends first, so that its
/// results are part of the progress that the stop persists.
const INTERRUPT_AFTER: Duration = Duration::from_secs(2);

/// Minimum time between two writes of the progress of a pass.
const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum share of the time of a pass that writing its progress may take, as its inverse: 3 %.
const WRITE_SHARE: u32 = 33;

/// Assumed speed of the first write of the progress of a pass, in bytes per millisecond: 100 MB/s.
const WRITE_SPEED: usize = 100_000;

/// Training passes that have begun and have no outcome.
#[derive(Default)]
pub(super) struct RunningPasses {
    /// Passes, least recently executed first.
    passes: VecDeque<RunningPass>,
    /// Microseconds that users and sessions have received.
    shares: FairShares,
}

/// A training pass that has begun and has no outcome.
pub(super) struct RunningPass {
    request: QueuedOperation<EngineOperation>,
    share: ShareId,
    /// `None` before the first micro-batch.
    progress: Option<PassProgress>,
    /// Whether earlier processes may have died because of the pass, and this process has not
    /// persisted any progress yet.
    is_suspect: bool,
    /// Time for which the pass was executed.
    computed: Duration,
    /// Time per row of the slowest micro-batch so far.
    row_time: Duration,
    began: Instant,
    writes: ProgressWrites,
}

/// When the progress of a pass was written, and how long that took.
#[derive(Default)]
struct ProgressWrites {
    last: Option<Instant>,
    last_took: Duration,
    total: Duration,
}

/// Limit on the rows of a model's micro-batches, adapted to the measured speed.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowLimit(usize);

impl Default for RowLimit {
    fn default() -> Self {
        Self(MIN_ROWS)
    }
}

impl RowLimit {
    /// Adapts the limit to a micro-batch of `rows` rows that took `elapsed`.
    fn adapt(&mut self, rows: usize, elapsed: Duration) {
        // A micro-batch far below the limit says little about the speed of a larger one.
        if rows < self.0 / 2 && elapsed < MICRO_BATCH_TIME {
            return;
        }
        let micros = elapsed.as_micros().max(1);
        let fitting = MICRO_BATCH_TIME.as_micros() * rows as u128 / micros;
        let fitting = usize::try_from(fitting).unwrap_or(MAX_ROWS);
        let largest = self.0.saturating_mul(MAX_GROWTH).min(MAX_ROWS);
        self.0 = fitting.clamp(MIN_ROWS, largest);
    }
}

impl RunningPasses {
    pub(super) fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    /// Returns whether a pass of the model is running.
    pub(super) fn has(&self, model: &ModelId) -> bool {
        self.passes.iter().any(|running| running.request.model == *model)
    }

    /// Removes and returns the pass whose micro-batch is next.
    fn next(&mut self) -> Option<RunningPass> {
        let order = |index: &usize| self.shares.order(self.passes[*index].share);
        let next = (0..self.passes.len()).min_by_key(order)?;
        self.passes.remove(next)
    }
}

impl RunningPass {
    fn new(request: QueuedOperation<EngineOperation>, share: ShareId) -> Self {
        Self {
            is_suspect: is_suspect(request.starts),
            request,
            share,
            progress: None,
            computed: Duration::ZERO,
            row_time: Duration::ZERO,
            began: Instant::now(),
            writes: ProgressWrites::default(),
        }
    }

    /// Returns whether the progress is to be written now.
    fn write_is_due(&self, progress: &PassProgress) -> bool {
        if self.writes.last.unwrap_or(self.began).elapsed() < MIN_WRITE_INTERVAL {
            return false;
        }
        let expected = match self.writes.last {
            Some(_) => self.writes.last_took,
            None => Duration::from_millis((progress.encoded_size() / WRITE_SPEED) as u64),
        };
        (self.writes.total + expected) * WRITE_SHARE <= self.began.elapsed()
    }

    fn pass(&self) -> &TrainingPass {
        match &self.request.operation {
            ModelOperation::Train(EngineTraining::Pass(pass)) => pass,
            _ => unreachable!("`begin_pass` is called with training passes only"),
        }
    }
}

/// Returns whether a micro-batch of `rows` rows is expected to take so long that a stop may
/// interrupt it, which destroys its progress. The worker then keeps a copy.
///
/// A pass has no `row_time` before its first micro-batch, which needs no copy: all progress before
/// it is durable.
fn needs_copy(row_time: Duration, rows: usize) -> bool {
    let rows = u32::try_from(rows).unwrap_or(u32::MAX);
    // The estimate is not exact, and copying takes much less time than such a micro-batch.
    row_time.saturating_mul(rows) >= INTERRUPT_AFTER / 4
}

/// What one turn of a pass led to.
enum PassTurn {
    /// The pass has more micro-batches.
    Unfinished,
    Finished(Outcome),
}

impl Worker {
    /// Begins a training pass. Its micro-batches are executed by [`step_pass`](Self::step_pass). A
    /// suspect executes its first micro-batch at once, alone.
    pub(super) fn begin_pass(&mut self, request: QueuedOperation<EngineOperation>) {
        self.context.queue().hold(&request.model, request.bytes);
        let share = self.passes.shares.enter(&fairness_key(&request.account));
        let running = RunningPass::new(request, share);
        if running.is_suspect {
            self.step(running);
        } else {
            self.passes.passes.push_back(running);
        }
    }

    /// Persists the progress of all running passes, before the server stops.
    pub(super) fn persist_passes(&mut self) {
        for mut running in std::mem::take(&mut self.passes.passes) {
            if let Some(progress) = running.progress.take() {
                self.persist(&mut running, &progress);
            }
        }
    }

    /// Removes the files of passes that have a durable outcome.
    pub(super) fn remove_pass_files(&mut self) {
        if !self.pass_files.is_empty() {
            self.pass_files.remove_finished(&self.context.backend.store.lock());
        }
    }

    /// Executes one micro-batch of the next running pass, if any.
    pub(super) fn step_pass(&mut self) {
        if let Some(running) = self.passes.next() {
            self.step(running);
        }
    }

    fn step(&mut self, mut running: RunningPass) {
        let start = Instant::now();
        let id = running.request.id.clone();
        let model = running.request.model.clone();
        let turn = self.catching(&id, &model, |worker| match worker.advance(&mut running) {
            Ok(turn) => turn,
            Err(failed) => PassTurn::Finished(failed),
        });
        running.computed += start.elapsed();
        self.passes.shares.charge(running.share, micros(start.elapsed()).max(1));
        let outcome = match turn {
            Ok(PassTurn::Unfinished) => {
                self.touch(&model);
                return self.passes.passes.push_back(running);
            }
            Ok(PassTurn::Finished(outcome)) | Err(outcome) => outcome,
        };
        let RunningPass { request, computed, is_suspect, share, .. } = running;
        self.passes.shares.leave(share);
        if is_suspect {
            self.end_suspect(&id, &outcome);
        }
        self.context.queue().release(&model, request.bytes);
        self.complete(request, computed, outcome);
    }

    /// Executes the next micro-batch of a pass, and ends the pass after the last one.
    fn advance(&mut self, running: &mut RunningPass) -> Result<PassTurn, Outcome> {
        // Fails if the session has ended or the run was deleted since the last micro-batch.
        let run = open_run(&self.context.backend.store, &running.request.model)?;
        check_not_dropped(&run)?;
        // Restores the model if it was evicted. The progress stays valid, because the restored
        // weights have the same bits.
        self.model(&run)?;
        let model = self.models.get_mut(&run.id).expect("the model was restored");
        let progress = running.progress.take();
        let pass = running.pass();
        let mut progress = match progress {
            Some(progress) => progress,
            None => {
                let begin = || pass.data.begin(&model.trainer, pass.mode);
                let continued = self.pass_files.continued(&running.request.id, begin());
                continued.unwrap_or_else(begin)
            }
        };
        if let Some(batch) = model.trainer.next_micro_batch(&progress, model.row_limit.0) {
            if running.is_suspect {
                self.crashes.begin(&running.request.id, progress.position());
            }
            let queue = self.context.backends.engine();
            let start = Instant::now();
            let interrupt = || start.elapsed() > INTERRUPT_AFTER && queue.is_stopping();
            let copy = needs_copy(running.row_time, batch.rows()).then(|| progress.clone());
            let advanced = pass.data.run_micro_batch(&model.trainer, progress, &batch, &interrupt);
            let Some(advanced) = advanced.map_err(engine_failure)? else {
                // The server stops. The pass continues after the restart from the copy, which
                // `persist_passes` writes, or else from the progress that is already durable.
                running.progress = copy;
                self.crashes.interrupted(&running.request.id);
                return Ok(PassTurn::Unfinished);
            };
            drop(copy);
            model.row_limit.adapt(batch.rows(), start.elapsed());
            let rows = u32::try_from(batch.rows()).unwrap_or(u32::MAX).max(1);
            running.row_time = running.row_time.max(start.elapsed() / rows);
            self.context.metrics.micro_batches.add(1);
            if model.trainer.next_micro_batch(&advanced, 1).is_some() {
                if running.is_suspect || running.write_is_due(&advanced) {
                    self.persist(running, &advanced);
                }
                running.progress = Some(advanced);
                return Ok(PassTurn::Unfinished);
            }
            progress = advanced;
        }
        self.finish_pass(&run, running, progress).map(PassTurn::Finished)
    }

    /// Writes the progress of a pass to its file.
    fn persist(&mut self, running: &mut RunningPass, progress: &PassProgress) {
        let start = Instant::now();
        let written = self.pass_files.write(&running.request.id, progress);
        running.writes.last = Some(Instant::now());
        running.writes.last_took = start.elapsed();
        running.writes.total += running.writes.last_took;
        if let Err(error) = written {
            // After a restart, the pass continues from its previous progress, or begins again.
            tracing::warn!(target: log::STORAGE, %error, "cannot persist the progress of a pass");
        }
        if std::mem::take(&mut running.is_suspect) {
            self.crashes.survived(&running.request.id);
        }
    }

    /// Adds the gradients of a pass whose micro-batches are all done, and returns its outcome.
    fn finish_pass(
        &mut self,
        run: &ModelRunRecord,
        running: &RunningPass,
        progress: PassProgress,
    ) -> Result<Outcome, Outcome> {
        let pass = running.pass();
        let model = self.model(run)?;
        let output = model.trainer.finish_pass(progress).map_err(engine_failure)?;
        let backward = pass.mode == PassMode::ForwardBackward && !pass.data.is_empty();
        model.gradients_pending |= backward;
        let tokens = u64::try_from(pass.data.tokens()).unwrap_or(u64::MAX);
        let history = OperationHistory {
            tokens,
            metrics: output.metrics.clone(),
            advantages: pass.data.advantages(),
            ..Default::default()
        };
        let outcome = Outcome::proto(pass.data.to_wire_output(output).to_proto())
            .with_history(OutcomeHistory::Operation(history));
        self.context.backend.metrics.trained_tokens.add(tokens);
        let outcome = outcome
            .with_usage(vec![(usage_key(self.context.clock(), run, UsageMeter::Training), tokens)]);
        Ok(if backward { outcome.with_model_changed() } else { outcome })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_is_copied_before_a_long_micro_batch() {
        assert!(!needs_copy(Duration::ZERO, usize::MAX), "the first micro-batch");
        assert!(!needs_copy(Duration::from_millis(1), 499));
        assert!(needs_copy(Duration::from_millis(1), 500));
        assert!(needs_copy(Duration::from_millis(1), usize::MAX));
    }

    #[test]
    fn the_row_limit_follows_the_speed_of_the_model() {
        let mut limit = RowLimit::default();
        // A thousand rows take 15 ms.
        let time = |rows: usize| Duration::from_micros(15 * rows as u64);
        let mut limits = Vec::new();
        for _ in 0..5 {
            limit.adapt(limit.0, time(limit.0));
            limits.push(limit.0);
        }
        assert_eq!(limits, [1_024, 4_096, 10_000, 10_000, 10_000]);
        // The last micro-batch of a pass is small.
        limit.adapt(3, Duration::from_millis(1));
        assert_eq!(limit.0, 10_000);
        // One long sequence takes ten seconds.
        limit.adapt(2_000, Duration::from_secs(10));
        assert_eq!(limit.0, MIN_ROWS);
        limit.adapt(MIN_ROWS, Duration::ZERO);
        assert_eq!(limit.0, MIN_ROWS * MAX_GROWTH);
    }
}
