//! Outcomes of requests that an upstream has executed.

use bytes::Bytes;
use tinkex_backend::context::BackendContext;
use tinkex_backend::model_outcome::usage_key;
use tinkex_backend::outcome::{Outcome, OutcomeHistory};
use tinkex_store::history::{OperationHistory, sequence_hash};
use tinkex_store::record::{ModelRunRecord, Record, UsageMeter};
use tinkex_store::store::Store;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::codec::json;
use tinkex_wire::{
    Datum, ForwardBackward, ForwardBackwardOutput, OptimParams, OptimStep, OptimStepOutput,
    PassMode, TensorData, loss_input,
};

/// Returns the outcome of the training pass `body`, and adds its tokens to the metrics and to the
/// usage of the outcome.
pub(super) fn pass_outcome(
    context: &BackendContext,
    run: &ModelRunRecord,
    body: &Bytes,
    output: &ForwardBackwardOutput,
) -> Outcome {
    let pass = ForwardBackward::from_proto(body).ok();
    let tokens: usize = pass.as_ref().map_or(0, |pass| {
        pass.data.iter().map(|datum| datum.model_input().token_count().unwrap_or(0)).sum()
    });
    let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
    context.metrics.trained_tokens.add(tokens);
    let usage = vec![(usage_key(context.clock(), run, UsageMeter::Training), tokens)];
    let kind = match pass.as_ref().map(|pass| pass.mode) {
        Some(PassMode::Forward) => "forward",
        _ => "forward_backward",
    };
    let metrics = output.metrics.iter().map(|(name, value)| (name.clone(), *value)).collect();
    let advantages = pass.as_ref().map(advantages).unwrap_or_default();
    let history = OperationHistory { kind, tokens, metrics, advantages, ..Default::default() };
    let outcome = Outcome::proto(output.to_proto()).with_usage(usage);
    let outcome = outcome.with_history(OutcomeHistory::Operation(history));
    let changed =
        pass.is_some_and(|pass| pass.mode == PassMode::ForwardBackward && !pass.data.is_empty());
    if changed { outcome.with_model_changed() } else { outcome }
}

/// Returns the hash and the advantage of each sequence that has advantages: the last advantage of
/// the sequence that is not 0, or 0 if all are 0.
fn advantages(pass: &ForwardBackward) -> Vec<(i64, f32)> {
    let advantage = |datum: &Datum| {
        let advantages = datum.loss_input(loss_input::ADVANTAGES)?.as_f32()?;
        let last = advantages.iter().rposition(|advantage| *advantage != 0.0);
        let advantage = *advantages.get(last.unwrap_or(advantages.len().checked_sub(1)?))?;
        let targets = datum.loss_input(loss_input::TARGET_TOKENS).and_then(TensorData::as_i64);
        let target = targets.and_then(<[i64]>::last).and_then(|last| u32::try_from(*last).ok());
        let tokens = datum.model_input().to_tokens()?;
        Some((sequence_hash(tokens.iter().copied().chain(target)), advantage))
    };
    pass.data.iter().filter_map(advantage).collect()
}

/// Returns the outcome of the optimizer step `body`.
pub(super) fn step_outcome(body: &Bytes, output: &OptimStepOutput) -> Outcome {
    let metrics = output.metrics.iter().flatten().map(|(name, value)| (name.clone(), *value));
    let mut metrics: Vec<(String, f64)> = metrics.collect();
    let rate = match json::decode::<OptimStep>(body).map(|step| step.params) {
        Ok(OptimParams::Adam(adam)) => Some(adam.learning_rate),
        Ok(OptimParams::Dimuon(dimuon)) => Some(dimuon.learning_rate),
        _ => None,
    };
    metrics.extend(rate.map(|rate| ("learning_rate".to_owned(), rate)));
    let history = OperationHistory { kind: "optim_step", metrics, ..Default::default() };
    let outcome = Outcome::json(output).with_model_changed();
    outcome.with_history(OutcomeHistory::Operation(history))
}

/// Returns the weights that `records` replace: the weights of an overwritten checkpoint or of an
/// earlier snapshot.
pub(super) fn replaced_weights(store: &Store, records: &[Record]) -> Vec<WeightsLocation> {
    let replaced = |record: &Record| match record {
        Record::Checkpoint(row) => {
            let old = store.checkpoint(&row.path)?.row.weights.clone();
            (old != row.weights).then_some(old)
        }
        Record::Run(row) => {
            let old = store.runs.get(&row.id)?.row.snapshot.as_ref()?.weights.clone();
            let new = row.snapshot.as_ref().map(|snapshot| &snapshot.weights);
            (new != Some(&old)).then_some(old)
        }
        _ => None,
    };
    records.iter().filter_map(replaced).collect()
}
