//! History records of samples on an upstream, for the dashboard.

use std::time::Duration;

use tinkex::{SampleResponse, StopReason};
use tinkex_backend::outcome::Outcome;
use tinkex_backend::upstream::RelayedSample;
use tinkex_store::clock::micros;
use tinkex_store::history::{
    CompletionHistory, LoggedWeights, SampleHistory, SampleSource, sequence_hash,
};

use crate::Upstream;

/// Builds the history record of a sample that took `computed`; `None` if history is off.
/// [`Outcomes::record`](tinkex_backend::outcome::Outcomes::record) adds the time at which the
/// sample ended.
pub(super) fn sample_history(
    upstream: &Upstream,
    sample: &RelayedSample,
    computed: Duration,
    outcome: &Result<SampleResponse, Outcome>,
) -> Option<Box<SampleHistory>> {
    let request = &sample.request;
    let prompt_tokens = request.prompt.token_count().unwrap_or(0);
    let sequences = outcome.as_ref().map_or(&[][..], |response| &response.sequences);
    let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    let with_tokens = upstream.context.history.admit_sample((prompt_tokens + tokens) * 8)?;
    let prompt = request.prompt.to_tokens().filter(|_| with_tokens).map(|tokens| tokens.to_vec());
    let completions = prompt.iter().flat_map(|prompt| {
        sequences.iter().map(|sequence| CompletionHistory {
            tokens: sequence.tokens.to_vec(),
            logprobs: match &sequence.logprobs {
                Some(logprobs) => logprobs.iter().map(|logprob| logprob.unwrap_or(0.0)).collect(),
                None => Vec::new(),
            },
            top: sequence.topk_logprobs.as_ref().map(|top| {
                let rows = top.rows().map(|row| row.into_iter().flatten().collect::<Vec<_>>());
                // Every position has `k` entries in the log.
                let padded = rows.flat_map(|mut row| {
                    row.resize(top.k(), (0, f32::NEG_INFINITY));
                    row
                });
                (top.k(), padded.collect())
            }),
            stop: match sequence.stop_reason {
                StopReason::Length => "length",
                _ => "stop",
            },
            sequence_hash: sequence_hash(prompt.iter().chain(sequence.tokens.iter()).copied()),
        })
    });
    let completions = completions.collect();
    let folder = upstream.logged_name(&(sample.base_model.clone(), sample.path.clone()));
    Some(Box::new(SampleHistory {
        finished_at: 0,
        queued: 0,
        computed: micros(computed),
        weights: LoggedWeights { base_model: sample.base_model.clone(), folder },
        owner: sample.account.owner.clone(),
        session: sample.account.session.clone(),
        source: match sample.sink {
            None => SampleSource::Tinker,
            Some(_) => SampleSource::Inference,
        },
        prompt_tokens,
        prompt,
        completions,
        error: outcome.as_ref().err().and_then(Outcome::error).map(str::to_owned),
    }))
}
