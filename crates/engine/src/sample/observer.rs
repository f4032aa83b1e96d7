//! [`TokenObserver`]: receives the tokens of a request while it is sampled.

use super::request::{PromptScores, StopReason};

/// Receives the tokens of a request while [`Sampler::step`](super::Sampler::step) samples them.
///
/// The methods run on the thread that calls `step` and delay the whole batch, so they must not
/// block. Preemption of a sequence repeats no call. The output of the request contains the same
/// tokens again.
///
/// ```
/// use tinkex_engine::sample::{SampleRequest, SampledToken, TokenObserver};
/// use tinkex_engine::{Engine, EngineOptions};
///
/// /// Sends each token to another thread.
/// #[derive(Debug)]
/// struct Tokens(std::sync::mpsc::Sender<u32>);
///
/// impl TokenObserver for Tokens {
///     fn token(&mut self, sampled: SampledToken<'_>) {
///         // The receiver may have been dropped.
///         let _ = self.0.send(sampled.token);
///     }
/// }
///
/// let engine = Engine::builtin(EngineOptions::default())?;
/// let mut sampler = engine.sampler()?;
/// let (sender, tokens) = std::sync::mpsc::channel();
/// let request = SampleRequest::new(vec![1, 2, 3], 2);
/// sampler.add_observed(&engine.base_weights(), request, Box::new(Tokens(sender)))?;
/// sampler.step();
/// assert!(tokens.try_recv().is_ok(), "the first token is known before the request is finished");
/// # Ok::<_, tinkex_engine::Error>(())
/// ```
pub trait TokenObserver: std::fmt::Debug + Send {
    /// Receives the requested scores of the prompt and the number of prompt tokens that were found
    /// in the KV cache. Called once, before the first token.
    fn prompt(&mut self, _scores: &PromptScores, _cache_hits: usize) {}

    /// Receives the next token of a completion.
    fn token(&mut self, sampled: SampledToken<'_>);
}

/// A token that was sampled in the current step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledToken<'a> {
    /// Index of the completion in its request.
    pub completion: usize,
    /// The token.
    pub token: u32,
    /// Log-probability of the token.
    pub logprob: f32,
    /// Most probable tokens at this position, in descending order of probability; empty if
    /// [`SampleRequest::top_k`](super::SampleRequest::top_k) is 0. Entries without a token have
    /// token 0 and log-probability -99999.
    pub top_tokens: &'a [u32],
    /// Log-probabilities of `top_tokens`.
    pub top_logprobs: &'a [f32],
    /// Reason why the completion ends with this token; `None` if it continues.
    pub stop: Option<StopReason>,
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::super::kv_cache::KvCache;
    use super::super::{SampleRequest, SampledCompletion, TopK};
    use super::*;
    use crate::engine::{Engine, EngineOptions};
    use crate::kernel::paged_attention::HeadLayout;
    use crate::train::golden::folder;

    /// Collects everything that is observed about one request.
    #[derive(Clone, Debug, Default)]
    struct Collected(Arc<Mutex<Observations>>);

    #[derive(Debug, Default)]
    struct Observations {
        prompts: Vec<(PromptScores, usize)>,
        completions: Vec<SampledCompletion>,
    }

    impl TokenObserver for Collected {
        fn prompt(&mut self, scores: &PromptScores, cache_hits: usize) {
            self.0.lock().unwrap().prompts.push((scores.clone(), cache_hits));
        }

        fn token(&mut self, sampled: SampledToken<'_>) {
            let mut collected = self.0.lock().unwrap();
            assert_eq!(collected.prompts.len(), 1, "the prompt comes first, and once");
            let completions = &mut collected.completions;
            while completions.len() <= sampled.completion {
                completions.push(SampledCompletion {
                    tokens: Vec::new(),
                    logprobs: Vec::new(),
                    reason: StopReason::Length,
                    top_k: Some(TopK { k: 2, ..TopK::default() }),
                });
            }
            let completion = &mut completions[sampled.completion];
            completion.tokens.push(sampled.token);
            completion.logprobs.push(sampled.logprob);
            let table = completion.top_k.as_mut().unwrap();
            table.tokens.extend(sampled.top_tokens);
            table.logprobs.extend(sampled.top_logprobs);
            assert_eq!(sampled.stop.is_some(), completion.tokens.len() == 40, "{sampled:?}");
        }
    }

    /// The cache has pages for two of the six completions, so that the others are preempted.
    #[test]
    fn observed_tokens_equal_the_output_in_spite_of_preemption() {
        let heads = HeadLayout { query_heads: 4, kv_heads: 2, head_dim: 16 };
        let cache_memory = 9 * KvCache::page_bytes(heads, 2);
        let options = EngineOptions { threads: 1, cache_memory, ..EngineOptions::default() };
        let engine = Engine::open(folder("qwen3"), options).unwrap();
        let mut sampler = engine.sampler().unwrap();
        let mut observed = Vec::new();
        for seed in 0..2 {
            let mut request = SampleRequest::new((3..40).collect(), 40);
            request.samples = 3;
            request.seed = seed;
            request.top_k = 2;
            request.scoring.logprobs = true;
            let collected = Collected::default();
            let observer = Box::new(collected.clone());
            let id = sampler.add_observed(&engine.base_weights(), request, observer).unwrap();
            observed.push((id, collected));
        }
        let mut outputs = Vec::new();
        while !sampler.is_idle() {
            outputs.extend(sampler.step());
        }
        assert_eq!(outputs.len(), 2);
        for (id, output) in outputs {
            let output = output.unwrap();
            let (_, collected) = observed.iter().find(|(other, _)| *other == id).unwrap();
            let collected = collected.0.lock().unwrap();
            assert_eq!(collected.completions, output.samples);
            let (scores, cache_hits) = &collected.prompts[0];
            assert_eq!(*cache_hits, output.cache_hits);
            let bits = |scores: &PromptScores| -> Vec<u32> {
                scores.logprobs.as_ref().unwrap().iter().map(|x| x.to_bits()).collect()
            };
            assert_eq!(bits(scores), bits(&output.prompt));
        }
    }
}
