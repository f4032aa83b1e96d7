//! Samples on an upstream. A sample changes no state on the upstream, so the gateway repeats a
//! sample if it is not known whether the upstream has executed it. A repeated sample has the same
//! seed, and therefore the same result.

mod clients;
mod history;
mod tasks;

use std::sync::Arc;

use tinkex::SampleResponse;
use tinkex_backend::outcome::{Outcome, OutcomeHistory};
use tinkex_backend::upstream::RelayedSample;
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_store::record::{FailureCategory, Record, UsageKey, UsageMeter};
use tinkex_wire::{RequestId, SampleRequest};
use tokio::time::Instant;

pub(super) use self::clients::{SamplerKey, SamplerPool};
pub(super) use self::tasks::SampleTasks;
use super::Upstream;
use super::fault::{BACKOFF, Fault, MAX_UNEXPECTED};

/// Maximum number of samples in flight per upstream.
pub(super) const MAX_IN_FLIGHT: u32 = 2_000;

/// Draws a sample, and records its outcome or passes it to the sink of an inference request.
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
                session_id = %sample.account.session,
                upstream = %upstream.handle.name,
                tokens,
                seconds = start.elapsed().as_secs_f64(),
                "request finished"
            );
        }
        Err(fault) => tracing::info!(
            target: log::REQUEST,
            operation = "sample",
            request_id = %id,
            session_id = %sample.account.session,
            upstream = %upstream.handle.name,
            error = fault.reason(),
            "request failed"
        ),
    }
    let usage = match &result {
        Ok(response) => upstream.count_tokens(&sample, response),
        Err(_) => Vec::new(),
    };
    let context = &upstream.context;
    let outcome = match result {
        Ok(response) => Ok(response),
        Err(Fault::Failed(category, message)) => Err(Outcome::failed(category, message)),
        Err(Fault::Unexpected(reason)) => {
            let name = &upstream.handle.name;
            let message =
                format!("upstream {name} did not sample in {MAX_UNEXPECTED} attempts: {reason}");
            Err(Outcome::failed(FailureCategory::Server, message))
        }
        Err(fault) => {
            let seconds = upstream.settings.timeout.as_secs();
            let reason = fault.reason();
            let message = format!(
                "upstream {} has not sampled for {seconds} s: {reason}",
                upstream.handle.name
            );
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
            context.outcomes.record_locking(&id, outcome);
        }
        Some(sink) => {
            context.metrics.count_request(outcome.is_ok());
            if !usage.is_empty() {
                context.store.lock().put_unconfirmed(Record::Usage(usage));
            }
            context.outcomes.record_generation(&mut context.store.lock(), history);
            sink.finish(outcome.map_err(|failed| match failed.into_error() {
                ServerError::Internal(message) => ServerError::Unavailable(message),
                other => other,
            }));
        }
    }
}

impl Upstream {
    /// Draws a sample. Repeats failed attempts until the upstream timeout has passed or
    /// [`MAX_UNEXPECTED`] responses were unexpected.
    async fn sample(&self, sample: &RelayedSample) -> Result<SampleResponse, Fault> {
        let limit = self.settings.timeout;
        let start = Instant::now();
        let mut backoff = BACKOFF;
        let mut unexpected = 0;
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
            self.context.metrics.retries.add(1);
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// Makes one attempt to draw a sample.
    async fn try_sample(
        &self,
        key: &SamplerKey,
        request: &SampleRequest,
    ) -> Result<SampleResponse, Fault> {
        // Boxed, because the future that creates a sampling client has several kilobytes, and each of
        // up to ten thousand waiting samples would reserve them.
        let cell = Box::pin(self.sampler(key)).await?;
        let Some(sampler) = cell.get() else {
            return Err(Fault::Unavailable("the weights are not loaded".to_owned()));
        };
        let response = sampler.draw(request.clone()).await;
        if matches!(response, Err(Fault::Lost(_))) {
            self.samplers.forget(key, &cell);
        }
        response
    }

    /// Adds the tokens of a sample to the metrics. Returns the usage to record for the sample.
    fn count_tokens(
        &self,
        sample: &RelayedSample,
        response: &SampleResponse,
    ) -> Vec<(UsageKey, u64)> {
        let to_u64 = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let prompt = to_u64(sample.request.prompt.token_count().unwrap_or(0));
        let sampled = to_u64(response.sequences.iter().map(|s| s.tokens.len()).sum());
        self.context.metrics.prompt_tokens.add(prompt);
        self.context.metrics.sampled_tokens.add(sampled);
        let cached = u64::from(response.prompt_cache_hit_tokens).min(prompt);
        let hour = self.context.clock().hour();
        let key = |meter| UsageKey::new(hour, &sample.account, &sample.base_model, meter);
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
