//! Samples on an upstream. They change nothing, so a sample is drawn again if it is not known
//! whether the upstream has drawn it; its seed makes the result the same.

mod clients;
mod history;
mod tasks;

use std::sync::Arc;

use tinkex::{SampleResponse, StopReason};
use tinkex_engine::sample::{
    PromptScores, SampledToken, StopReason as EngineStopReason, TokenObserver as _,
};
use tinkex_wire::{RequestId, SampleRequest};
use tokio::time::Instant;

pub(super) use self::clients::{SamplerKey, SamplerPool};
pub(super) use self::tasks::SampleTasks;
use super::Upstream;
use super::fault::{FIRST_DELAY, Fault, MAX_DELAY, MAX_UNEXPECTED};
use crate::error::ServerError;
use crate::inference::TokenSink;
use crate::log;
use crate::operation::RelayedSample;
use crate::outcome::{Outcome, OutcomeHistory, record_generation, record_outcome};
use crate::store::{FailureCategory, Record, UsageKey, UsageMeter};

/// Maximum number of samples in flight per upstream.
pub(super) const MAX_IN_FLIGHT: u32 = 2_000;

/// Draws a sample and delivers its result.
pub(super) async fn run(upstream: Arc<Upstream>, id: RequestId, sample: RelayedSample) {
    let start = Instant::now();
    let result = upstream.sample(&sample).await;
    let Some(running) = upstream.samples.end(&upstream, &id) else { return };
    match &result {
        Ok(response) => {
            let tokens: usize = response.sequences.iter().map(|s| s.tokens.len()).sum();
            tracing::info!(
                target: log::REQUEST,
                operation = "sample",
                request_id = %id,
                session_id = %sample.session,
                upstream = %upstream.name,
                tokens,
                seconds = start.elapsed().as_secs_f64(),
                "request finished"
            );
        }
        Err(fault) => tracing::info!(
            target: log::REQUEST,
            operation = "sample",
            request_id = %id,
            session_id = %sample.session,
            upstream = %upstream.name,
            error = fault.reason(),
            "request failed"
        ),
    }
    let usage = match &result {
        Ok(response) => upstream.count_tokens(&sample, response),
        Err(_) => Vec::new(),
    };
    let state = &upstream.state;
    let outcome = match result {
        Ok(response) => Ok(response),
        Err(Fault::Failed(category, message)) => Err(Outcome::failed(category, message)),
        Err(Fault::Unexpected(reason)) => {
            let name = &upstream.name;
            let message =
                format!("upstream {name} did not sample in {MAX_UNEXPECTED} attempts: {reason}");
            Err(Outcome::failed(FailureCategory::Server, message))
        }
        Err(fault) => {
            let seconds = state.options.timeouts.upstream.as_secs();
            let reason = fault.reason();
            let message =
                format!("upstream {} has not sampled for {seconds} s: {reason}", upstream.name);
            Err(Outcome::failed(FailureCategory::Server, message))
        }
    };
    let history = history::sample_history(&upstream, &sample, start.elapsed(), &outcome);
    match running.sink {
        None => {
            let mut outcome = outcome
                .map(|response| Outcome::proto(response.to_proto()).with_usage(usage))
                .unwrap_or_else(|failed| failed);
            outcome.history = history.map(OutcomeHistory::Sample).map(Box::new);
            record_outcome(state, &mut state.store(), &id, outcome);
        }
        Some(mut sink) => {
            state.metrics.count_request(outcome.is_ok());
            if !usage.is_empty() {
                state.store().put_unconfirmed(Record::Usage(usage));
            }
            record_generation(state, &mut state.store(), history);
            let end = outcome.map(|response| deliver(&mut sink, &response));
            sink.finish(end.map_err(|failed| match failed.into_error() {
                ServerError::Internal(message) => ServerError::Unavailable(message),
                other => other,
            }));
        }
    }
}

/// Hands all tokens of a response to an inference request.
fn deliver(sink: &mut TokenSink, response: &SampleResponse) {
    let logprobs = response.prompt_logprobs.as_ref();
    let logprobs =
        logprobs.map(|all| all.iter().map(|logprob| logprob.unwrap_or(f32::NAN)).collect());
    let scores = PromptScores { logprobs, ..PromptScores::default() };
    let cached = usize::try_from(response.prompt_cache_hit_tokens).unwrap_or(0);
    sink.prompt(&scores, cached);
    for (completion, sequence) in response.sequences.iter().enumerate() {
        for (i, token) in sequence.tokens.iter().enumerate() {
            let logprob = sequence.logprobs.as_ref().and_then(|logprobs| logprobs.get(i));
            let is_last = i + 1 == sequence.tokens.len();
            let reason = match sequence.stop_reason {
                StopReason::Length => EngineStopReason::Length,
                _ => EngineStopReason::Stop,
            };
            sink.token(SampledToken {
                completion,
                token: *token,
                logprob: logprob.unwrap_or(f32::NAN),
                top_tokens: &[],
                top_logprobs: &[],
                stop: is_last.then_some(reason),
            });
        }
    }
}

impl Upstream {
    /// Draws a sample; waits while the upstream does not respond.
    async fn sample(&self, sample: &RelayedSample) -> Result<SampleResponse, Fault> {
        let limit = self.state.options.timeouts.upstream;
        let (start, mut delay, mut unexpected) = (Instant::now(), FIRST_DELAY, 0);
        let key = (sample.base_model.clone(), sample.path.clone());
        loop {
            let fault = match self.try_sample(&key, &sample.request).await {
                Ok(response) => return Ok(response),
                Err(fault @ Fault::Failed(..)) => return Err(fault),
                Err(fault) => fault,
            };
            unexpected += u32::from(matches!(fault, Fault::Unexpected(_)));
            if unexpected >= MAX_UNEXPECTED {
                return Err(Fault::Unexpected(fault.reason().to_owned()));
            }
            if start.elapsed() >= limit {
                return Err(fault);
            }
            self.state.metrics.retries.add(1);
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_DELAY);
        }
    }

    /// Draws a sample; makes one attempt.
    async fn try_sample(
        &self,
        key: &SamplerKey,
        request: &SampleRequest,
    ) -> Result<SampleResponse, Fault> {
        let cell = self.sampler(key).await?;
        let Some(sampler) = cell.get() else {
            return Err(Fault::Unavailable("the weights are not loaded".to_owned()));
        };
        let response = sampler.draw(request.clone()).await;
        if matches!(response, Err(Fault::Lost(_))) {
            self.samplers.forget(key, &cell);
        }
        response
    }

    /// Adds the tokens of a sample to the metrics. Returns its usage.
    fn count_tokens(
        &self,
        sample: &RelayedSample,
        response: &SampleResponse,
    ) -> Vec<(UsageKey, u64)> {
        let to_u64 = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let prompt = to_u64(sample.request.prompt.token_count().unwrap_or(0));
        let sampled = to_u64(response.sequences.iter().map(|s| s.tokens.len()).sum());
        self.state.metrics.prompt_tokens.add(prompt);
        self.state.metrics.sampled_tokens.add(sampled);
        let cached = u64::from(response.prompt_cache_hit_tokens).min(prompt);
        let key = |meter| UsageKey {
            hour: self.state.clock.hour(),
            session: sample.session.clone(),
            base_model: sample.base_model.clone(),
            meter,
        };
        [
            (UsageMeter::Prefill, prompt - cached),
            (UsageMeter::CachedPrefill, cached),
            (UsageMeter::Sampled, sampled),
        ]
        .into_iter()
        .filter(|(_, n)| *n > 0)
        .map(|(meter, n)| (key(meter), n))
        .collect()
    }
}
