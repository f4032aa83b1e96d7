//! The worker: the thread that owns the engine and executes operations.
//!
//! Training and sampling alternate by the compute time they have used, so that neither starves the
//! other; if one of them has nothing to do, the other uses all the time. A training pass runs one
//! micro-batch at a time. Samples of all sessions run in one batch per base model.

mod autosave_retry;
mod crash_record;
mod dropped_pass;
mod engines;
mod fault_retry;
mod model;
mod pass;
mod pass_files;
mod restored;
mod sample;
mod sample_response;
mod train;
mod weights_cache;
mod weights_folder;

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;
use tinkex_backend::context::BackendContext;
use tinkex_backend::operation::ModelOperation;
use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::{QueuedOperation, is_suspect};
use tinkex_store::clock::Clock;
use tinkex_store::disk::ServerHealth;
use tinkex_store::error::ServerError;
use tinkex_store::executor::LoopHandle;
use tinkex_store::log;
use tinkex_store::store::{FailureCategory, ResultKind, SessionEnd, Store};
use tinkex_wire::{ModelId, RequestId, SessionId};
use tokio::sync::watch;
use tokio::time::Instant;

use self::autosave_retry::AutosaveRetries;
use self::crash_record::CrashRecord;
pub(crate) use self::engines::Engines;
use self::fault_retry::FaultRetries;
use self::model::LiveModel;
pub(crate) use self::model::{lora_config, optimizer_kind};
use self::pass::RunningPasses;
use self::pass_files::PassFiles;
use self::restored::CrashSuspectSamples;
use self::sample::RunningSamples;
pub(crate) use self::sample_response::response as sample_response;
use crate::backends::Backends;
use crate::expiry::Expiry;
use crate::inference::Generations;
use crate::limits::ServerLimits;
use crate::metrics::EngineMetrics;
use crate::models::BaseModels;
use crate::operation::{EngineOperation, EngineQueue, EngineTraining};
use crate::options::ServerTimeouts;

/// Maximum time for which the worker sleeps before it checks for idle models again.
const MAX_SLEEP: Duration = Duration::from_secs(5);

/// Maximum time for which the worker sleeps before it checks again whether it can remove the
/// progress of a finished pass, whose outcome is being written.
const FILE_INTERVAL: Duration = Duration::from_millis(100);

/// Parts of the server's state that the worker uses.
pub(crate) struct WorkerContext {
    pub(crate) backend: BackendContext,
    pub(crate) backends: Arc<Backends>,
    pub(crate) models: Arc<BaseModels>,
    pub(crate) generations: Arc<Generations>,
    pub(crate) expiry: Arc<Expiry>,
    pub(crate) metrics: Arc<EngineMetrics>,
    /// Parent folder of all adapter folders.
    pub(crate) weights_dir: PathBuf,
    /// Folder of the progress of running passes.
    pub(crate) passes_dir: PathBuf,
    pub(crate) limits: ServerLimits,
    pub(crate) timeouts: ServerTimeouts,
    /// Value of [`ServerOptions::autosave_on_expiry`](crate::ServerOptions::autosave_on_expiry).
    pub(crate) autosave_on_expiry: bool,
    pub(crate) health: watch::Sender<ServerHealth>,
}

impl WorkerContext {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.backend.store.lock()
    }

    fn queue(&self) -> &EngineQueue {
        self.backends.engine()
    }

    fn clock(&self) -> &Clock {
        self.backend.clock()
    }
}

/// State of the worker.
pub(crate) struct Worker {
    context: WorkerContext,
    engines: Engines,
    /// Models in training that are in memory.
    models: HashMap<ModelId, LiveModel>,
    passes: RunningPasses,
    pass_files: PassFiles,
    crashes: CrashRecord,
    samples: RunningSamples,
    suspects: CrashSuspectSamples,
    autosave_retries: AutosaveRetries,
    fault_retries: FaultRetries,
}

impl Worker {
    /// Starts the worker. The worker ends after
    /// [`RequestQueue::stop`](tinkex_backend::queue::RequestQueue::stop) and returns the number of
    /// models that it saved.
    ///
    /// The worker catches a panic inside an operation and fails only that operation; a panic
    /// anywhere else ends the worker, and from then on the server rejects all requests.
    pub(crate) fn start(context: WorkerContext, engines: Engines) -> io::Result<LoopHandle<usize>> {
        let health = context.health.clone();
        let generations = Arc::clone(&context.generations);
        let executor = context.backend.executor.clone();
        let mut crashes = CrashRecord::open(&context.passes_dir);
        {
            let store = context.store();
            crashes.retain(|id| {
                store.requests.get(id).is_some_and(|entry| entry.finished_at().is_none())
            });
        }
        let worker = Self {
            pass_files: PassFiles::open(&context.passes_dir),
            crashes,
            context,
            engines,
            models: HashMap::new(),
            passes: RunningPasses::default(),
            samples: RunningSamples::default(),
            suspects: CrashSuspectSamples::default(),
            autosave_retries: AutosaveRetries::default(),
            fault_retries: FaultRetries::default(),
        };
        let on_panic = move || {
            tracing::error!(
                target: log::MODEL,
                "the worker thread panicked; restart the server to continue with the accepted \
                 requests"
            );
            health.send_replace(ServerHealth::Panicked);
            generations.fail_all(&ServerError::worker_panicked());
        };
        executor.start("worker", worker.run(), on_panic)
    }

    /// Executes requests until the server stops. Returns the number of models that it saved.
    async fn run(mut self) -> usize {
        let mut training_time = Duration::ZERO;
        let mut sampling_time = Duration::ZERO;
        loop {
            let sampling = !self.engines.is_idle();
            let may_train = !sampling || training_time <= sampling_time;
            let is_idle = !sampling && self.suspects.is_empty() && self.passes.is_empty();
            let wait = is_idle.then(|| self.max_sleep());
            self.remove_pass_files();
            let dispatch = self.context.queue().take(may_train, wait).await;
            self.begin_samples(dispatch.samples).await;
            for id in dispatch.cancelled {
                self.cancel_sample(&id);
            }
            for model in dispatch.dropped {
                self.models.remove(&model);
                self.fault_retries.forget(&model);
            }
            if !dispatch.silent.is_empty() {
                self.expire_sessions(dispatch.silent).await;
            }
            if dispatch.stopping {
                self.cancel_generations();
                self.persist_passes();
                return self.save_all();
            }
            let start = Instant::now();
            // A period without training requests does not give training a larger share later.
            if may_train && dispatch.model_request.is_none() && self.passes.is_empty() {
                training_time = training_time.max(sampling_time);
            }
            if let Some(mut request) = dispatch.model_request {
                self.prepare_restored(&mut request).await;
                self.execute(request);
            }
            // Samples that have just begun take a step before the next micro-batch.
            let sampling_begins = !sampling && !self.engines.is_idle();
            if may_train && !sampling_begins {
                self.step_pass();
            }
            training_time += start.elapsed();
            self.run_suspect_sample().await;
            if self.engines.is_idle() {
                sampling_time = training_time;
                self.unload_idle();
            } else {
                let start = Instant::now();
                self.step_samples();
                sampling_time += start.elapsed();
            }
            self.context.metrics.cache_pages.set(self.engines.pages_in_use());
            self.context.metrics.busy_micros.add(micros(start.elapsed()));
            // Has no effect on the worker's own thread. In a simulation, other tasks handle
            // requests between two steps.
            tokio::task::yield_now().await;
        }
    }

    /// Returns how long the worker may sleep until it must check for idle models.
    fn max_sleep(&self) -> Duration {
        let until = self.next_idle().map(|at| at.saturating_duration_since(Instant::now()));
        let max = if self.pass_files.is_empty() { MAX_SLEEP } else { FILE_INTERVAL };
        until.unwrap_or(max).min(max)
    }

    /// Ends silent sessions after saving the unsaved state of their models.
    async fn expire_sessions(&mut self, sessions: Vec<SessionId>) {
        let mut ended = Vec::new();
        self.autosave_retries.retain(&sessions);
        for id in sessions {
            // A request may have arrived after the session was reported.
            if !self.context.expiry.is_silent(&id) {
                self.autosave_retries.forget(&id);
            } else if !self.context.autosave_on_expiry || self.autosave_session(&id) {
                self.autosave_retries.forget(&id);
                ended.push((id, SessionEnd::Expired));
            }
        }
        let guard = self.context.backend.store.lock_changes().await;
        self.context.expiry.end_sessions(guard, ended, Box::new(|_| {}));
    }

    /// Saves the models of a silent session. Returns whether the session can end. A session whose
    /// models cannot be saved stays open and is reported again; the next attempt follows after a
    /// delay. The session ends when the last attempt has failed.
    fn autosave_session(&mut self, id: &SessionId) -> bool {
        let (models, last_used): (Vec<ModelId>, Duration) = {
            let store = self.context.store();
            let last_used = store.sessions.get(id).map(|entry| entry.last_used);
            let models = store.runs_of(id).map(|run| run.id.clone()).collect();
            (models, last_used.unwrap_or_default())
        };
        if !self.autosave_retries.is_due(id, last_used, Instant::now()) {
            return false;
        }
        if models.iter().all(|model| self.autosave(model)) {
            return true;
        }
        match self.autosave_retries.failed(id, last_used, Instant::now()) {
            Some(delay) => {
                tracing::warn!(
                    target: log::MODEL,
                    session_id = %id,
                    retry_in_seconds = delay.as_secs(),
                    "cannot save the models of a silent session"
                );
                false
            }
            None => {
                tracing::error!(
                    target: log::MODEL,
                    session_id = %id,
                    "cannot save the models of a silent session; the session ends, and the \
                     training since the last checkpoint is lost"
                );
                true
            }
        }
    }

    /// Executes a request of a model and records its outcome, or begins the request if it is a
    /// training pass.
    fn execute(&mut self, request: QueuedOperation<EngineOperation>) {
        if let ModelOperation::Train(EngineTraining::Pass(_)) = &request.operation {
            return self.begin_pass(request);
        }
        let is_suspect = is_suspect(request.starts);
        if is_suspect {
            self.crashes.begin(&request.id, 0);
        }
        let start = Instant::now();
        let outcome = self.catching(&request.id, &request.model, |worker| {
            worker.run_operation(&request.id, &request.model, request.seq, &request.operation)
        });
        let outcome = outcome.unwrap_or_else(|failed| failed);
        if is_suspect {
            self.end_suspect(&request.id, &outcome);
        }
        self.complete(request, start.elapsed(), outcome);
    }

    /// Runs a part of a request in the span of the request.
    ///
    /// # Errors
    /// Returns a failed outcome if `work` panics. The partially modified model is then discarded
    /// and restored from disk on next use.
    fn catching<T>(
        &mut self,
        id: &RequestId,
        model: &ModelId,
        work: impl FnOnce(&mut Self) -> T,
    ) -> Result<T, Outcome> {
        let _entered = self.request_span(id, model).entered();
        catch_unwind(AssertUnwindSafe(|| work(self))).map_err(|_| {
            self.models.remove(model);
            Outcome::failed(
                FailureCategory::Server,
                "internal error: the operation panicked; the model was restored to its state \
                 before the request",
            )
        })
    }

    fn request_span(&self, id: &RequestId, model: &ModelId) -> tracing::Span {
        let session = self.context.store().runs.get(model).map(|run| run.row.session.clone());
        tracing::info_span!(
            target: log::REQUEST,
            "request",
            request_id = %id,
            model_id = %model,
            session_id = session.as_ref().map(tracing::field::display),
        )
    }

    /// Records the outcome of a request of a model whose execution took `elapsed`, or executes the
    /// request again later if it met a transient fault.
    fn complete(
        &mut self,
        request: QueuedOperation<EngineOperation>,
        elapsed: Duration,
        outcome: Outcome,
    ) {
        let _entered = self.request_span(&request.id, &request.model).entered();
        let id = request.id.clone();
        let model = request.model.clone();
        let seq = request.seq;
        let name = request.operation.name();
        let accumulates = self.accumulates_gradients(&request);
        // A model whose operation took longer than the idle timeout is not idle.
        self.touch(&model);
        if outcome.transient && self.retry_later(&model, request, &outcome) {
            return;
        }
        let fault = (self.fault_retries.forget(&model) && outcome.transient)
            .then(|| fault_retry::message(&outcome).to_owned());
        log_outcome(name, seq, elapsed, &outcome);
        let outcome = outcome.with_operation_history(name, elapsed);
        let outcome = if accumulates { self.check_pass(&model, seq, outcome) } else { outcome };
        let model_changed = outcome.model_changed;
        self.context.backend.outcomes.record_locking(&id, outcome);
        if let Some(error) = fault.filter(|_| !accumulates) {
            self.fail_successors(&model, seq, &error);
        }
        if model_changed {
            self.snapshot_if_due(&model, seq, elapsed);
        }
    }
}

/// Emits the event for a finished request of a model.
fn log_outcome(operation: &str, seq_id: u64, elapsed: Duration, outcome: &Outcome) {
    let seconds = elapsed.as_secs_f64();
    match &outcome.result {
        ResultKind::Failed { error, .. } => {
            tracing::info!(
                target: log::REQUEST,
                operation,
                seq_id,
                seconds,
                error,
                "request failed"
            );
        }
        ResultKind::Json | ResultKind::Proto => {
            let tokens: u64 = outcome.usage.iter().map(|(_, amount)| amount).sum();
            let is_pass = matches!(operation, "forward" | "forward_backward");
            let tokens = is_pass.then_some(tokens);
            #[expect(clippy::cast_precision_loss, reason = "a rate in a log event")]
            let tokens_per_second = tokens.map(|tokens| tokens as f64 / seconds.max(1e-9));
            tracing::info!(
                target: log::REQUEST,
                operation,
                seq_id,
                seconds,
                tokens,
                tokens_per_second,
                "request finished"
            );
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
