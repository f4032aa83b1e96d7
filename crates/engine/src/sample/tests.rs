//! Sampler: comparison with torch and with training, and independence of results from batching.

use std::sync::Arc;

use serde_json::Value;

use tinkex_fairness::FairnessKey;

use super::*;
use crate::decode::{DecodingParams, StopConditions};
use crate::engine::{Engine, EngineOptions};
use crate::kernel::paged_attention::PAGE_POSITIONS;
use crate::optim::OptimizerKind;
use crate::tokenizer::Vocabulary;
use crate::train::golden::{MODELS, folder};
use crate::train::{Datum, TrainingObjective};
use crate::{Error, LoraConfig};

pub(super) fn engine(name: &str, threads: usize) -> Engine {
    Engine::open(
        folder(name),
        EngineOptions { threads, cache_memory: 8 << 20, ..EngineOptions::default() },
    )
    .unwrap()
}

/// Runs steps until all requests are finished. Returns their outputs in order of submission.
pub(super) fn run(sampler: &mut Sampler) -> Vec<(SampleRequestId, crate::Result<SampleOutput>)> {
    let mut all = Vec::new();
    while !sampler.is_idle() {
        all.extend(sampler.step());
    }
    all.sort_by_key(|(id, _)| *id);
    all
}

/// Adds one request and returns its output.
pub(super) fn one(
    sampler: &mut Sampler,
    weights: &ModelWeights,
    request: SampleRequest,
) -> SampleOutput {
    sampler.add(weights, request).unwrap();
    run(sampler).pop().unwrap().1.unwrap()
}

#[test]
fn greedy_tokens_match_torch() {
    for name in MODELS {
        let engine = engine(name, 2);
        let text = std::fs::read(folder(name).join("expected.json")).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        let adapter = engine.load_weights(folder(name).join("adapter")).unwrap();
        for (weights, key) in [(engine.base_weights(), "greedy_base"), (adapter, "greedy_adapter")]
        {
            let list = |field: &str| json[key][field].as_array().unwrap().clone();
            let ids = |field: &str| -> Vec<u32> {
                list(field).iter().map(|x| u32::try_from(x.as_u64().unwrap()).unwrap()).collect()
            };
            let mut request = SampleRequest::new(ids("prompt"), 12);
            request.decoding.temperature = 0.0;
            let output = one(&mut engine.sampler().unwrap(), &weights, request);
            assert_eq!(output.samples[0].tokens, ids("tokens"), "{name} {key}");
            for (got, want) in output.samples[0].logprobs.iter().zip(list("logprobs")) {
                assert!((f64::from(*got) - want.as_f64().unwrap()).abs() < 2e-5, "{name} {key}");
            }
        }
    }
}

pub(super) fn prompt(len: usize, salt: u32) -> Vec<u32> {
    (0_u32..).take(len).map(|i| (i * 31 + salt * 17 + 3) % 97).collect()
}

#[test]
fn sampler_and_trainer_report_the_same_bits() {
    for name in MODELS {
        let engine = engine(name, 2);
        let trainer =
            engine.load_trainer(folder(name).join("adapter"), OptimizerKind::Adam).unwrap();
        let weights = engine.snapshot(&trainer);
        let mut sampler = engine.sampler().unwrap();
        let mut request = SampleRequest::new(prompt(37, 1), 40);
        request.scoring.logprobs = true;
        request.samples = 3;
        let output = one(&mut sampler, &weights, request.clone());
        for sample in &output.samples {
            let tokens = [&request.prompt[..], &sample.tokens].concat();
            let datum = Datum {
                tokens: &tokens[..tokens.len() - 1],
                targets: &tokens[1..],
                ..Datum::default()
            };
            let objective = TrainingObjective::Loss(crate::loss::Loss::CrossEntropy);
            let trained = trainer.forward(&objective, &[datum]).unwrap();
            let sampled =
                [&output.prompt.logprobs.as_ref().unwrap()[1..], &sample.logprobs].concat();
            assert_eq!(trained.logprobs[0], sampled, "{name}");
        }
    }
}

/// Compares requests computed one by one with the same requests in one batch, on one and several
/// threads, with and without cached pages, and with so few pages that sequences are preempted. The
/// requests belong to several users and sessions.
#[test]
fn results_do_not_depend_on_the_batch_threads_or_cache() {
    let requests = |seed: u64| -> Vec<SampleRequest> {
        (0..9)
            .map(|i| {
                let mut request =
                    SampleRequest::new(prompt(5 + 13 * (i % 4), u32::try_from(i / 4).unwrap()), 30);
                request.seed = seed + i as u64;
                request.samples = 1 + i % 3;
                request.fairness =
                    FairnessKey::new(["ana", "ben"][i % 2], ["first", "second"][i / 2 % 2]);
                request.decoding = DecodingParams { temperature: 0.8, top_k: 20, top_p: 0.95 };
                request
            })
            .collect()
    };
    let engine = engine("qwen3", 1);
    let adapter = engine.load_weights(folder("qwen3").join("adapter")).unwrap();
    let pick = |i: usize| if i.is_multiple_of(2) { engine.base_weights() } else { adapter.clone() };
    let alone: Vec<Vec<SampledCompletion>> = requests(5)
        .into_iter()
        .enumerate()
        .map(|(i, request)| one(&mut engine.sampler().unwrap(), &pick(i), request).samples)
        .collect();
    for (threads, pages) in [(1, 1000), (3, 1000), (2, 9)] {
        let heads = crate::kernel::paged_attention::HeadLayout {
            query_heads: 4,
            kv_heads: 2,
            head_dim: 16,
        };
        let cache_memory = pages * kv_cache::KvCache::page_bytes(heads, 2);
        let options = EngineOptions { threads, cache_memory, ..EngineOptions::default() };
        let engine = Engine::open(folder("qwen3"), options).unwrap();
        let adapter = engine.load_weights(folder("qwen3").join("adapter")).unwrap();
        let mut sampler = engine.sampler().unwrap();
        for round in 0..2 {
            for (i, request) in requests(5).into_iter().enumerate() {
                let weights =
                    if i.is_multiple_of(2) { engine.base_weights() } else { adapter.clone() };
                sampler.add(&weights, request).unwrap();
            }
            let together = run(&mut sampler);
            let mut cached_tokens = 0;
            for ((_, output), alone) in together.into_iter().zip(&alone) {
                let output = output.unwrap();
                cached_tokens += output.cache_hits;
                assert_eq!(output.samples, *alone, "{threads} threads, {pages} pages");
            }
            if round == 1 && pages > 100 {
                assert!(
                    cached_tokens >= 3 * PAGE_POSITIONS,
                    "the second round finds pages of the first: {cached_tokens}"
                );
            }
        }
    }
}

/// The first step computes only a part of the third prompt. When the first completion needs another
/// page, the third sequence is preempted, and later its prompt is scored again.
#[test]
fn alternatives_do_not_depend_on_preemption() {
    let heads =
        crate::kernel::paged_attention::HeadLayout { query_heads: 4, kv_heads: 2, head_dim: 16 };
    // 13 pages for each of two prompts and 7 pages for a part of the third.
    let cache_memory = 33 * kv_cache::KvCache::page_bytes(heads, 2);
    let options = EngineOptions { threads: 1, cache_memory, ..EngineOptions::default() };
    let engine = Engine::open(folder("qwen3"), options).unwrap();
    let base = engine.base_weights();
    let mut scored = SampleRequest::new(prompt(200, 3), 20);
    scored.scoring.alternatives = 2;
    let alone = one(&mut engine.sampler().unwrap(), &base, scored.clone());
    let mut sampler = engine.sampler().unwrap();
    for salt in [1, 2] {
        sampler.add(&base, SampleRequest::new(prompt(200, salt), 20)).unwrap();
    }
    sampler.add(&base, scored).unwrap();
    assert_eq!(run(&mut sampler).pop().unwrap().1.unwrap(), alone);
}

#[test]
fn all_scores_of_a_prompt_are_consistent() {
    let engine = engine("llama", 1);
    let mut sampler = engine.sampler().unwrap();
    let mut request = SampleRequest::new(prompt(21, 2), 1);
    request.scoring = PromptScoring {
        logprobs: true,
        last: None,
        top_k: 4,
        targets: Some((0..20).flat_map(|i| [i64::from(prompt(21, 2)[i + 1]), -1]).collect()),
        alternatives: 2,
    };
    let output = one(&mut sampler, &engine.base_weights(), request.clone());
    let logprobs = output.prompt.logprobs.unwrap();
    assert!(logprobs[0].is_nan() && logprobs[1..].iter().all(|x| *x < 0.0));
    let top = output.prompt.top_k.unwrap();
    assert_eq!((top.tokens[0], top.logprobs[0]), (0, -99999.0));
    for (i, row) in top.logprobs.chunks_exact(4).enumerate().skip(1) {
        assert!(row.is_sorted_by(|a, b| a >= b));
        assert!(row[0] >= logprobs[i]);
    }
    let targets = output.prompt.targets.unwrap();
    for (i, pair) in targets.chunks_exact(2).enumerate() {
        assert_eq!(pair, [logprobs[i + 1], 0.0]);
    }
    assert_eq!(output.prompt.alternatives.unwrap().tokens.len(), 40);

    request.scoring = PromptScoring { logprobs: true, last: Some(3), ..PromptScoring::default() };
    let tail = one(&mut sampler, &engine.base_weights(), request);
    assert_eq!(tail.cache_hits, PAGE_POSITIONS, "rows before the last three need no work");
    let tail = tail.prompt.logprobs.unwrap();
    assert!(tail[..18].iter().all(|x| x.is_nan()));
    assert_eq!(tail[18..], logprobs[18..]);
}

#[test]
fn a_longer_completion_starts_with_a_shorter_one_and_completions_differ() {
    let engine = engine("qwen2", 1);
    let mut sampler = engine.sampler().unwrap();
    let mut request = SampleRequest::new(prompt(4, 0), 5);
    request.samples = 4;
    let short = one(&mut sampler, &engine.base_weights(), request.clone());
    request.max_tokens = Some(20);
    request.samples = 8;
    let long = one(&mut sampler, &engine.base_weights(), request);
    for (short, long) in short.samples.iter().zip(&long.samples) {
        assert_eq!(short.tokens[..], long.tokens[..5]);
    }
    assert_ne!(long.samples[0].tokens, long.samples[1].tokens);
}

/// Returns a vocabulary in which every token is a letter.
fn letters() -> Arc<Vocabulary> {
    Arc::new(Vocabulary::new((0..97_u8).map(|token| vec![b'a' + token % 26]).collect()))
}

#[test]
fn stop_conditions_end_a_completion_and_are_part_of_it() {
    let engine = engine("qwen2", 1);
    let mut sampler = engine.sampler().unwrap();
    let mut request = SampleRequest::new(prompt(4, 0), 30);
    let unstopped = one(&mut sampler, &engine.base_weights(), request.clone()).samples.remove(0);
    assert_eq!((unstopped.tokens.len(), unstopped.reason), (30, StopReason::Length));
    let stop_token = unstopped.tokens[7];
    let at = unstopped.tokens.iter().position(|token| *token == stop_token).unwrap();
    request.stop = StopConditions::new([stop_token], [] as [&str; 0]).unwrap();
    let stopped = one(&mut sampler, &engine.base_weights(), request.clone()).samples.remove(0);
    assert_eq!((&stopped.tokens[..], stopped.reason), (&unstopped.tokens[..=at], StopReason::Stop));
    let text: Vec<u8> =
        unstopped.tokens[9..12].iter().flat_map(|t| letters().bytes(*t).to_vec()).collect();
    request.stop = StopConditions::new([], [text]).unwrap();
    let refused = sampler.add(&engine.base_weights(), request.clone()).unwrap_err();
    assert!(refused.to_string().contains("vocabulary"), "{refused}");
    request.vocabulary = Some(letters());
    let stopped = one(&mut sampler, &engine.base_weights(), request).samples.remove(0);
    assert_eq!(stopped.reason, StopReason::Stop);
    assert_eq!(stopped.tokens[..], unstopped.tokens[..stopped.tokens.len()]);
    assert!(stopped.tokens.len() <= 12);
}

#[test]
fn a_cancelled_request_releases_its_pages() {
    let engine = engine("qwen3", 1);
    let mut sampler = engine.sampler().unwrap();
    let mut request = SampleRequest::new(prompt(40, 0), 50);
    request.samples = 3;
    let first = sampler.add(&engine.base_weights(), request.clone()).unwrap();
    let second = sampler.add(&engine.base_weights(), request.clone()).unwrap();
    for _ in 0..5 {
        assert!(sampler.step().is_empty());
    }
    let partial = sampler.cancel(first).unwrap();
    assert!(sampler.cancel(first).is_none());
    let rest = run(&mut sampler);
    assert_eq!(rest.len(), 1);
    assert_eq!(rest[0].0, second);
    // The cancelled request has the same first tokens as the request that runs to its end.
    let complete = rest[0].1.as_ref().unwrap();
    assert_eq!(partial.samples.len(), 3);
    for (part, whole) in partial.samples.iter().zip(&complete.samples) {
        assert!((1..=5).contains(&part.tokens.len()), "{}", part.tokens.len());
        assert!(whole.tokens.starts_with(&part.tokens));
        assert!(whole.logprobs.starts_with(&part.logprobs));
    }
    assert_eq!(sampler.cache.available(), sampler.cache.capacity());
}

#[test]
fn invalid_requests_are_refused_with_a_reason() {
    let engine = engine("qwen3", 1);
    let mut sampler = engine.sampler().unwrap();
    let base = engine.base_weights();
    let mut error_of = |change: fn(&mut SampleRequest)| {
        let mut request = SampleRequest::new(prompt(8, 0), 4);
        change(&mut request);
        sampler.add(&base, request).unwrap_err().to_string()
    };
    assert!(error_of(|r| r.prompt.clear()).contains("empty"));
    assert!(error_of(|r| r.prompt[3] = 113).contains("prompt[3] is token 113"));
    assert!(error_of(|r| r.samples = 0).contains("num_samples"));
    assert!(error_of(|r| r.max_tokens = Some(0)).contains("max_tokens"));
    assert!(error_of(|r| r.max_tokens = Some(249)).contains("8 + 249 > 256"));
    assert!(error_of(|r| r.decoding.temperature = -1.0).contains("temperature"));
    assert!(error_of(|r| r.scoring.last = Some(3)).contains("last_n"));
    assert!(error_of(|r| r.scoring.targets = Some(vec![1; 6])).contains("target_prompt_logprobs"));
    assert!(error_of(|r| r.scoring.targets = Some(vec![113; 7])).contains("token 113"));
    assert!(sampler.is_idle());

    let tiny = EngineOptions { cache_memory: 40_000, ..EngineOptions::default() };
    let engine = Engine::open(folder("qwen3"), tiny).unwrap();
    let mut sampler = engine.sampler().unwrap();
    let refused =
        sampler.add(&engine.base_weights(), SampleRequest::new(prompt(30, 0), 200)).unwrap_err();
    assert!(matches!(refused, Error::Memory { .. }), "{refused}");
    let nothing = EngineOptions { cache_memory: 10, ..EngineOptions::default() };
    let engine = Engine::open(folder("qwen3"), nothing).unwrap();
    assert!(matches!(engine.sampler(), Err(Error::Memory { .. })));
}

#[test]
fn a_request_without_a_limit_is_accepted_if_the_context_exceeds_the_cache() {
    let options = EngineOptions { cache_memory: 40_000, ..EngineOptions::default() };
    let engine = Engine::open(folder("qwen3"), options).unwrap();
    let mut sampler = engine.sampler().unwrap();
    let mut request = SampleRequest::new(prompt(30, 0), 1);
    request.max_tokens = None;
    let output = one(&mut sampler, &engine.base_weights(), request);
    let positions = sampler.cache.capacity() * PAGE_POSITIONS;
    assert_eq!(output.samples[0].tokens.len(), positions + 1 - 30);
    assert_eq!(output.samples[0].reason, StopReason::Length);
}

#[test]
fn an_adapter_with_nan_weights_fails_only_its_own_requests() {
    let engine = engine("qwen3", 1);
    let mut trainer = engine
        .create_trainer(LoraConfig { rank: 4, ..LoraConfig::default() }, OptimizerKind::Adam)
        .unwrap();
    trainer.fill_b_with_nan();
    let mut sampler = engine.sampler().unwrap();
    let bad =
        sampler.add(&engine.snapshot(&trainer), SampleRequest::new(prompt(20, 0), 4)).unwrap();
    let good = sampler.add(&engine.base_weights(), SampleRequest::new(prompt(20, 0), 4)).unwrap();
    for (id, output) in run(&mut sampler) {
        assert_eq!(output.is_ok(), id == good, "{output:?}");
        assert!(id == good || id == bad);
    }
}
