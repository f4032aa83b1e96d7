//! The worker: the thread that owns the engine and executes operations.
//!
//! Training and sampling alternate by the compute time they have used, so that neither starves the
//! other; if one of them has nothing to do, the other uses all the time. Samples of all sessions
//! run in one batch per base model.

mod autosave_retry;
mod engines;
mod fault_retry;
mod model;
mod restored;
mod sample;
mod sample_response;
mod train;
mod weights_cache;

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;
use tinkex_backend::context::BackendContext;
use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::QueuedOperation;
use tinkex_store::clock::Clock;
use tinkex_store::error::ServerError;
use tinkex_store::executor::LoopHandle;
use tinkex_store::log;
use tinkex_store::store::{FailureCategory, ResultKind, SessionEnd, Store};
use tinkex_wire::{ModelId, SessionId};
use tokio::sync::watch;
use tokio::time::Instant;

use self::autosave_retry::AutosaveRetries;
pub(crate) use self::engines::Engines;
use self::fault_retry::FaultRetries;
use self::model::LiveModel;
pub(crate) use self::model::{lora_config, optimizer_kind};
use self::restored::CrashSuspectSamples;
pub(crate) use self::restored::{KILLED_THE_PROCESS, MAX_STARTS};
use self::sample::RunningSamples;
use crate::backends::Backends;
use crate::expiry::Expiry;
use crate::inference::Generations;
use crate::limits::ServerLimits;
use crate::metrics::EngineMetrics;
use crate::models::BaseModels;
use crate::operation::{EngineOperation, EngineQueue};
use crate::options::ServerTimeouts;

/// Maximum time for which the worker sleeps before it checks for idle models again.
const MAX_SLEEP: Duration = Duration::from_secs(5);

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
    pub(crate) limits: ServerLimits,
    pub(crate) timeouts: ServerTimeouts,
    /// Value of [`ServerOptions::autosave_on_expiry`](crate::ServerOptions::autosave_on_expiry).
    pub(crate) autosave_on_expiry: bool,
    /// Becomes true when the worker thread has panicked.
    pub(crate) broken: watch::Sender<bool>,
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
        let broken = context.broken.clone();
        let generations = Arc::clone(&context.generations);
        let executor = context.backend.executor.clone();
        let worker = Self {
            context,
            engines,
            models: HashMap::new(),
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
            broken.send_replace(true);
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
            let wait = (!sampling && self.suspects.is_empty()).then(|| self.max_sleep());
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
                return self.save_all();
            }
            let start = Instant::now();
            match dispatch.model_request {
                Some(request) => {
                    self.prepare_restored(&request).await;
                    self.execute(request);
                    training_time += start.elapsed();
                }
                // A period without training requests does not give training a larger share later.
                None if may_train => training_time = training_time.max(sampling_time),
                None => {}
            }
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
        until.unwrap_or(MAX_SLEEP).min(MAX_SLEEP)
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

    /// Executes a request of a model and records its outcome.
    fn execute(&mut self, request: QueuedOperation<EngineOperation>) {
        let id = request.id.clone();
        let model = request.model.clone();
        let seq = request.seq;
        let operation = &request.operation;
        let name = operation.name();
        let session = self.context.store().runs.get(&model).map(|run| run.row.session.clone());
        let span = tracing::info_span!(
            target: log::REQUEST,
            "request",
            request_id = %id,
            model_id = %model,
            session_id = session.as_ref().map(tracing::field::display),
        );
        let _entered = span.enter();
        let start = Instant::now();
        let result =
            catch_unwind(AssertUnwindSafe(|| self.run_operation(&id, &model, seq, operation)));
        let outcome = result.unwrap_or_else(|_| {
            // Discard the partially modified model; it is restored from disk on next use.
            self.models.remove(&model);
            Outcome::failed(
                FailureCategory::Server,
                "internal error: the operation panicked; the model was restored to its state \
                 before the request",
            )
        });
        // A model whose operation took longer than the idle timeout is not idle.
        self.touch(&model);
        let elapsed = start.elapsed();
        if outcome.transient && self.retry_later(&model, request, &outcome) {
            return;
        }
        let fault = (self.fault_retries.forget(&model) && outcome.transient)
            .then(|| fault_retry::message(&outcome).to_owned());
        log_outcome(name, seq, elapsed, &outcome);
        let outcome = outcome.with_operation_history(name, elapsed);
        let model_changed = outcome.model_changed;
        self.context.backend.outcomes.record_locking(&id, outcome);
        if let Some(error) = fault {
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
