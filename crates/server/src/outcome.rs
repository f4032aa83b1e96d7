//! Persists the outcome of a finished request, then publishes it to pollers.
//!
//! The order matters: a client may act on a result, for example delete its copy of the data, so the
//! result must survive a crash before any client can read it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tinkex_engine::ErrorKind;
use tinkex_wire::RequestId;

use crate::clock::micros;
use crate::error::ServerError;
use crate::fault::is_transient_in_engine;
use crate::history::{
    self, History, HistoryRecord, OperationHistory, RequestHistory, SampleHistory,
};
use crate::log;
use crate::state::ServerState;
use crate::store::{
    FailureCategory, Record, RequestRecord, ResultKind, ResultRecord, SequenceScope, Store,
    UnixMicros, UsageKey,
};

/// Outcome of a request, with the changes that must be committed together with it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) result: ResultKind,
    /// Encoded result; empty for failures.
    pub(crate) payload: Bytes,
    /// Whether model weights, gradients or optimizer state changed. Makes the worker consider a
    /// snapshot.
    pub(crate) model_changed: bool,
    /// Whether the request failed because of a fault that may pass, before it changed anything.
    pub(crate) transient: bool,
    /// Amounts to add to the hourly usage counters.
    pub(crate) usage: Box<[(UsageKey, u64)]>,
    /// Records to write in the same transaction, for example the checkpoint that a save created.
    pub(crate) records: Vec<Record>,
    /// What the dashboard shows about the request.
    pub(crate) history: Option<Box<OutcomeHistory>>,
}

/// History of a request whose times [`record_outcome`] adds.
#[derive(Debug)]
pub(crate) enum OutcomeHistory {
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
    pub(crate) fn json(value: &impl Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(payload) => Self::new(ResultKind::Json, payload.into()),
            Err(error) => Self::failed(
                FailureCategory::Server,
                format!("cannot encode the result as JSON: {error}"),
            ),
        }
    }

    /// Creates a successful outcome with an encoded protobuf result.
    pub(crate) fn proto(payload: Bytes) -> Self {
        Self::new(ResultKind::Proto, payload)
    }

    pub(crate) fn failed(category: FailureCategory, error: impl Into<String>) -> Self {
        Self::new(ResultKind::Failed { error: error.into(), category }, Bytes::new())
    }

    pub(crate) fn cancelled() -> Self {
        Self::failed(FailureCategory::User, "the client cancelled the request")
    }

    /// Marks the outcome as having modified model state, so that the worker considers a snapshot.
    pub(crate) fn with_model_changed(mut self) -> Self {
        self.model_changed = true;
        self
    }

    /// Sets whether the failure may pass, so that the worker executes the request again.
    pub(crate) fn with_transient(mut self, transient: bool) -> Self {
        self.transient = transient;
        self
    }

    /// Adds a record to commit together with the result.
    pub(crate) fn with_record(mut self, record: Record) -> Self {
        self.records.push(record);
        self
    }

    /// Sets what the dashboard shows about the request.
    pub(crate) fn with_history(mut self, history: OutcomeHistory) -> Self {
        self.history = Some(Box::new(history));
        self
    }

    /// Completes the history of a request of a model: the name of its operation, unless it is set,
    /// and the time that its execution took.
    pub(crate) fn with_operation_history(
        mut self,
        history: &History,
        kind: &'static str,
        computed: Duration,
    ) -> Self {
        let recorded = self.history.take().map(|history| *history);
        if !history.is_enabled() {
            return self;
        }
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
    pub(crate) fn with_usage(mut self, usage: Vec<(UsageKey, u64)>) -> Self {
        self.usage = usage.into_boxed_slice();
        self
    }

    /// Returns the message of a failed outcome.
    pub(crate) fn error(&self) -> Option<&str> {
        match &self.result {
            ResultKind::Failed { error, .. } => Some(error),
            ResultKind::Json | ResultKind::Proto => None,
        }
    }

    /// Converts a failed outcome to the error of a request whose outcome is not stored.
    pub(crate) fn into_error(self) -> ServerError {
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

    /// Replaces a result of more than `limit` bytes by a failure. Changes to the model, usage and
    /// records are kept, because they have already happened.
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

impl From<tinkex_engine::Error> for Outcome {
    fn from(error: tinkex_engine::Error) -> Self {
        let category = match error.kind() {
            ErrorKind::Input | ErrorKind::Numeric => FailureCategory::User,
            // A request that exceeds a configured limit exceeds it again if it is repeated.
            _ if matches!(error, tinkex_engine::Error::Memory { .. }) => FailureCategory::User,
            _ => FailureCategory::Server,
        };
        let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
        let message = match &error {
            tinkex_engine::Error::File(_) => format!("{error}{}", source.unwrap_or_default()),
            // The messages of the other variants already contain their source.
            _ => error.to_string(),
        };
        Self::failed(category, message).with_transient(is_transient_in_engine(&error))
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
                let (run, seq, finished_at) = (run.clone(), request.seq, at);
                let queued = queued.max(0);
                HistoryRecord::Request(RequestHistory {
                    run,
                    seq,
                    finished_at,
                    queued,
                    operation,
                    error,
                })
            }
            Self::Sample(mut sample) => {
                let queued = at.saturating_sub(request.at).saturating_sub(sample.computed);
                (sample.finished_at, sample.queued, sample.error) = (at, queued.max(0), error);
                HistoryRecord::Sample(sample)
            }
        };
        Some(history::record(record))
    }
}

/// Maximum size of a result in bytes. The payload file accepts twice as much.
const MAX_RESULT_BYTES: usize = 512 << 20;

/// Queues `outcome` for writing and publishes it once the transaction is durable.
///
/// The write fails only while the server shuts down. The request then has no stored outcome and is
/// executed again after the next start.
pub(crate) fn record_outcome(
    state: &Arc<ServerState>,
    store: &mut Store,
    id: &RequestId,
    outcome: Outcome,
) {
    let Outcome { result, payload, model_changed, usage, mut records, history, transient: _ } =
        outcome.limited_to(MAX_RESULT_BYTES);
    state.metrics.count_request(!matches!(result, ResultKind::Failed { .. }));
    let Some(request) = store.requests.get(id).map(|entry| Arc::clone(&entry.row)) else { return };
    let (number, size, at) = (store.disk.next_payload_number(), payload.len(), store.clock.now());
    let history = history.filter(|_| state.history.is_enabled());
    let history = history.and_then(|history| history.into_record(&request, at, &result));
    let has_history = history.is_some();
    records.extend(history);
    let (result_kind, usage) = (result.clone(), usage.into_vec());
    let record =
        ResultRecord { request, number, size, result: result_kind, model_changed, at, usage };
    let (state, id, published) = (Arc::clone(state), id.clone(), payload.clone());
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
        state.store().publish(&id, result, published, number);
        if has_history {
            state.history.notify();
        }
    });
    store.record_result(record, records, payload, on_written);
}

/// Records what the dashboard shows about an inference request, which has no stored outcome.
pub(crate) fn record_generation(
    state: &Arc<ServerState>,
    store: &mut Store,
    history: Option<Box<SampleHistory>>,
) {
    let Some(mut sample) = history else { return };
    sample.finished_at = state.clock.now();
    let record = history::record(HistoryRecord::Sample(sample));
    let state = Arc::clone(state);
    store.put(vec![record], Box::new(move |_| state.history.notify()));
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
