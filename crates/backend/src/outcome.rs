//! Persists the outcome of a finished request, then publishes it to pollers.
//!
//! The order matters: a client may act on a result, for example delete its copy of the data, so the
//! result must survive a crash before any client can read it.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tinkex_store::clock::micros;
use tinkex_store::durable::SharedStore;
use tinkex_store::error::ServerError;
use tinkex_store::hidden_paths::HiddenPaths;
use tinkex_store::history::{
    HistoryRecord, HistoryRecorder, OperationHistory, RequestHistory, SampleHistory,
};
use tinkex_store::log;
use tinkex_store::record::{
    FailureCategory, Record, RequestRecord, ResultKind, ResultRecord, SequenceScope, UnixMicros,
    UsageKey,
};
use tinkex_store::store::Store;
use tinkex_wire::RequestId;

use crate::metrics::WorkMetrics;

/// Outcome of a request, with the changes that must be committed together with it.
#[derive(Debug)]
pub struct Outcome {
    pub result: ResultKind,
    /// Encoded result; empty for failures.
    pub payload: Bytes,
    /// Whether model weights, gradients or optimizer state changed. Makes the worker consider a
    /// snapshot.
    pub model_changed: bool,
    /// Whether the request failed because of a temporary fault, before it changed anything. The
    /// worker then executes the request again.
    pub transient: bool,
    /// Amounts to add to the hourly usage counters.
    pub usage: Box<[(UsageKey, u64)]>,
    /// Records to write in the same transaction, for example the checkpoint that a save created.
    pub records: Vec<Record>,
    /// History of the request for the dashboard.
    pub history: Option<Box<OutcomeHistory>>,
}

/// History of a request, to which [`Outcomes::record`] adds the times.
#[derive(Debug)]
pub enum OutcomeHistory {
    Operation(OperationHistory),
    Sample(Box<SampleHistory>),
}

impl Outcome {
    fn new(result: ResultKind, payload: Bytes) -> Self {
        Self {
            result,
            payload,
            model_changed: false,
            transient: false,
            usage: Box::default(),
            records: Vec::new(),
            history: None,
        }
    }

    /// Creates a successful outcome with a JSON result.
    pub fn json(value: &impl Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(payload) => Self::new(ResultKind::Json, payload.into()),
            Err(error) => Self::failed(
                FailureCategory::Server,
                format!("cannot encode the result as JSON: {error}"),
            ),
        }
    }

    /// Creates a successful outcome with an encoded protobuf result.
    pub fn proto(payload: Bytes) -> Self {
        Self::new(ResultKind::Proto, payload)
    }

    pub fn failed(category: FailureCategory, error: impl Into<String>) -> Self {
        Self::new(ResultKind::Failed { error: error.into(), category }, Bytes::new())
    }

    pub fn cancelled() -> Self {
        Self::failed(FailureCategory::User, "the client cancelled the request")
    }

    /// Marks the outcome as having modified model state, so that the worker considers a snapshot.
    #[must_use]
    pub fn with_model_changed(mut self) -> Self {
        self.model_changed = true;
        self
    }

    /// Sets whether the failure is temporary, so that the worker executes the request again.
    #[must_use]
    pub fn with_transient(mut self, transient: bool) -> Self {
        self.transient = transient;
        self
    }

    /// Adds a record to commit together with the result.
    #[must_use]
    pub fn with_record(mut self, record: Record) -> Self {
        self.records.push(record);
        self
    }

    /// Sets the history of the request for the dashboard.
    #[must_use]
    pub fn with_history(mut self, history: OutcomeHistory) -> Self {
        self.history = Some(Box::new(history));
        self
    }

    /// Completes the history of a model's request: sets the name of the operation, unless it is
    /// already set, and the duration of the execution.
    #[must_use]
    pub fn with_operation_history(mut self, kind: &'static str, computed: Duration) -> Self {
        let recorded = self.history.take().map(|history| *history);
        let mut operation = match recorded {
            Some(OutcomeHistory::Operation(operation)) => operation,
            Some(OutcomeHistory::Sample(_)) | None => OperationHistory::default(),
        };
        if operation.kind.is_empty() {
            operation.kind = kind;
        }
        operation.computed = computed;
        self.with_history(OutcomeHistory::Operation(operation))
    }

    /// Sets the usage to add to the hourly counters.
    #[must_use]
    pub fn with_usage(mut self, usage: Vec<(UsageKey, u64)>) -> Self {
        self.usage = usage.into_boxed_slice();
        self
    }

    /// Removes paths of the server from the message of a failure, and logs the whole message.
    #[must_use]
    pub fn hide_paths(mut self, paths: &HiddenPaths, id: &RequestId) -> Self {
        if let ResultKind::Failed { error, .. } = &mut self.result
            && let Cow::Owned(hidden) = paths.hide(error)
        {
            tracing::warn!(target: log::REQUEST, request_id = %id, error, "request failed");
            *error = hidden;
        }
        self
    }

    /// Returns the message of a failed outcome.
    pub fn error(&self) -> Option<&str> {
        match &self.result {
            ResultKind::Failed { error, .. } => Some(error),
            ResultKind::Json | ResultKind::Proto => None,
        }
    }

    /// Converts a failed outcome to the error of a request whose outcome is not stored.
    pub fn into_error(self) -> ServerError {
        match self.result {
            ResultKind::Failed { error, category } => match category {
                FailureCategory::User | FailureCategory::Conflict => ServerError::Invalid(error),
                FailureCategory::Server => ServerError::Internal(error),
            },
            ResultKind::Json | ResultKind::Proto => {
                ServerError::Internal("the request did not fail".to_owned())
            }
        }
    }

    /// Replaces a result of more than `limit` bytes by a failure. The outcome keeps its usage, its
    /// records and `model_changed`, because the request has already been executed.
    fn limited_to(self, limit: usize) -> Self {
        let size = self.payload.len();
        if size <= limit {
            return self;
        }
        let error = format!(
            "result is {} MiB, the limit is {} MiB; request fewer samples or tokens at once",
            size.div_ceil(1 << 20),
            limit >> 20
        );
        let result = ResultKind::Failed { error, category: FailureCategory::User };
        Self { result, payload: Bytes::new(), ..self }
    }
}

impl OutcomeHistory {
    /// Returns the record of a request that finished at the time `at`.
    fn into_record(
        self,
        request: &RequestRecord,
        at: UnixMicros,
        result: &ResultKind,
    ) -> Option<Record> {
        let error = match result {
            ResultKind::Failed { error, .. } => Some(error.clone()),
            ResultKind::Json | ResultKind::Proto => None,
        };
        let record = match self {
            Self::Operation(operation) => {
                let SequenceScope::Model(run) = &request.scope else { return None };
                let queued =
                    at.saturating_sub(request.at).saturating_sub(micros(operation.computed));
                HistoryRecord::Request(RequestHistory {
                    run: run.clone(),
                    seq: request.seq,
                    finished_at: at,
                    queued: queued.max(0),
                    operation,
                    error,
                })
            }
            Self::Sample(mut sample) => {
                let queued = at.saturating_sub(request.at).saturating_sub(sample.computed);
                sample.finished_at = at;
                sample.queued = queued.max(0);
                sample.error = error;
                HistoryRecord::Sample(sample)
            }
        };
        Some(record.into_record())
    }
}

/// Maximum size of a result in bytes: 512 MiB. The payload file accepts payloads of up to 1 GiB.
const MAX_RESULT_BYTES: usize = 512 << 20;

/// Persists outcomes and publishes them to pollers. Cheap to clone.
#[derive(Clone)]
pub struct Outcomes {
    store: SharedStore,
    history: Arc<HistoryRecorder>,
    metrics: Arc<WorkMetrics>,
}

impl Outcomes {
    pub(crate) fn new(
        store: SharedStore,
        history: Arc<HistoryRecorder>,
        metrics: Arc<WorkMetrics>,
    ) -> Self {
        Self { store, history, metrics }
    }

    /// Queues `outcome` for writing and publishes it once the transaction is durable. `store` is
    /// the locked store of this server.
    ///
    /// The write fails only while the server shuts down. The request then has no stored outcome and
    /// is executed again after the next start.
    pub fn record(&self, store: &mut Store, id: &RequestId, outcome: Outcome) {
        let Outcome { result, payload, model_changed, usage, mut records, history, transient: _ } =
            outcome.limited_to(MAX_RESULT_BYTES).hide_paths(&store.hidden_paths, id);
        self.metrics.count_request(!matches!(result, ResultKind::Failed { .. }));
        let Some(request) = store.requests.get(id).map(|entry| Arc::clone(&entry.row)) else {
            return;
        };
        let at = store.clock.now();
        let micros = u64::try_from(at.saturating_sub(request.at)).unwrap_or(0);
        self.metrics.request_seconds.observe(request.kind.name(), Duration::from_micros(micros));
        let history = history.filter(|_| self.history.is_enabled());
        let history = history.and_then(|history| history.into_record(&request, at, &result));
        let has_history = history.is_some();
        records.extend(history);
        let number = store.disk.next_payload_number();
        let record = ResultRecord {
            request,
            number,
            size: payload.len(),
            result: result.clone(),
            model_changed,
            at,
            usage: usage.into_vec(),
        };
        let this = self.clone();
        let id = id.clone();
        let published = payload.clone();
        let on_written = Box::new(move |written: std::io::Result<()>| {
            if let Err(error) = written {
                tracing::warn!(
                    target: log::STORAGE,
                    request_id = %id,
                    %error,
                    "result was not persisted"
                );
                return;
            }
            this.store.lock().publish(&id, result, published, number);
            if has_history {
                this.history.notify();
            }
        });
        store.record_result(record, records, payload, on_written);
    }

    /// Records the outcome of a request. Locks the store.
    pub fn record_locking(&self, id: &RequestId, outcome: Outcome) {
        self.record(&mut self.store.lock(), id, outcome);
    }

    /// Records the history of an inference request for the dashboard. Inference requests have no
    /// stored outcome.
    pub fn record_generation(&self, store: &mut Store, history: Option<Box<SampleHistory>>) {
        let Some(mut sample) = history else { return };
        sample.finished_at = store.clock.now();
        sample.error = sample.error.map(|error| store.hidden_paths.hide(&error).into_owned());
        let record = HistoryRecord::Sample(sample).into_record();
        let history = Arc::clone(&self.history);
        store.put(vec![record], Box::new(move |_| history.notify()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversized_result_fails_and_keeps_the_model_change() {
        let outcome = || Outcome::proto(Bytes::from_static(b"12345")).with_model_changed();
        assert_eq!(outcome().limited_to(5).payload, "12345");
        let failed = outcome().limited_to(4);
        assert!(matches!(
            &failed.result,
            ResultKind::Failed { category: FailureCategory::User, .. }
        ));
        assert!(failed.payload.is_empty() && failed.model_changed);
    }

    #[test]
    fn the_size_error_names_both_sizes() {
        let failed = Outcome::proto(vec![0; 3 << 20].into()).limited_to(1 << 20);
        let ResultKind::Failed { error, .. } = failed.result else { panic!("not limited") };
        assert_eq!(
            error,
            "result is 3 MiB, the limit is 1 MiB; request fewer samples or tokens at once"
        );
    }
}
