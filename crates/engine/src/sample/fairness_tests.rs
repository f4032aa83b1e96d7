//! Fairness between users and sessions, and prompts in chunks beside completions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tinkex_fairness::FairnessKey;

use super::kv_cache::KvCache;
use super::tests::{engine, one, prompt};
use super::*;
use crate::engine::{Engine, EngineOptions};
use crate::kernel::paged_attention::{HeadLayout, PAGE_POSITIONS};
use crate::train::golden::folder;

/// Returns an engine whose KV cache has `pages` pages.
fn engine_with_pages(pages: usize) -> Engine {
    let heads = HeadLayout { query_heads: 4, kv_heads: 2, head_dim: 16 };
    let cache_memory = pages * KvCache::page_bytes(heads, 2);
    let options = EngineOptions { threads: 1, cache_memory, ..EngineOptions::default() };
    Engine::open(folder("qwen3"), options).unwrap()
}

fn request(user: &str, session: &str, prompt: Vec<u32>, tokens: usize) -> SampleRequest {
    let mut request = SampleRequest::new(prompt, tokens);
    request.fairness = FairnessKey::new(user, session);
    request
}

/// Runs steps until a request is finished. Returns its output, the number of steps, and the number
/// of other requests that finished.
fn run_until(sampler: &mut Sampler, id: SampleRequestId) -> (SampleOutput, usize, usize) {
    let mut others = 0;
    for steps in 1.. {
        assert!(!sampler.is_idle(), "the request does not exist");
        for (finished, output) in sampler.step() {
            if finished == id {
                return (output.unwrap(), steps, others);
            }
            others += 1;
        }
    }
    unreachable!("the loop has no end")
}

/// The cache has pages for three of the 60 samples.
#[test]
fn a_short_sample_is_not_delayed_by_the_queue_of_another_user_or_session() {
    let engine = engine_with_pages(16);
    let base = engine.base_weights();
    let short = |user: &str, session: &str| request(user, session, prompt(20, 99), 4);
    let alone = one(&mut engine.sampler().unwrap(), &base, short("ben", "chat"));
    for (user, session) in [("ben", "chat"), ("ana", "chat")] {
        let mut sampler = engine.sampler().unwrap();
        for salt in 0..60 {
            sampler.add(&base, request("ana", "batch", prompt(40, salt), 40)).unwrap();
        }
        for _ in 0..10 {
            sampler.step();
        }
        assert!(sampler.pages_in_use() > 12, "the batch holds the cache");
        let id = sampler.add(&base, short(user, session)).unwrap();
        let (output, steps, others) = run_until(&mut sampler, id);
        assert_eq!(output.samples, alone.samples);
        assert_eq!(steps, 4, "the prompt and the first token take one step");
        assert_eq!(others, 0, "no sample of the batch is finished");
        while !sampler.is_idle() {
            sampler.step();
        }
        assert_eq!(sampler.cache.available(), sampler.cache.capacity());
    }
}

#[test]
fn users_with_equal_demand_finish_together_however_many_sessions_they_have() {
    let engine = engine_with_pages(20);
    let base = engine.base_weights();
    let mut sampler = engine.sampler().unwrap();
    let mut ben = Vec::new();
    for salt in 0..20 {
        let session = format!("session {salt}");
        sampler.add(&base, request("ana", &session, prompt(40, salt), 30)).unwrap();
    }
    for salt in 20..40 {
        ben.push(sampler.add(&base, request("ben", "only", prompt(40, salt), 30)).unwrap());
    }
    let mut finished = [0, 0];
    while finished[1] < 10 {
        for (id, output) in sampler.step() {
            output.unwrap();
            finished[usize::from(ben.contains(&id))] += 1;
        }
    }
    assert!((8..=12).contains(&finished[0]), "ana has {finished:?} of ben's samples");
}

/// Counts the tokens of a request.
#[derive(Clone, Debug, Default)]
struct Count(Arc<AtomicUsize>);

impl TokenObserver for Count {
    fn token(&mut self, _: SampledToken<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_completions() {
    let engine = engine("qwen3", 1);
    let base = engine.base_weights();
    // Completions continue beside a prompt of another user, and of the same session.
    for (user, session) in [("ana", "batch"), ("ben", "chat")] {
        let long = request(user, session, prompt(240, 1), 2);
        let alone = one(&mut engine.sampler().unwrap(), &base, long.clone());
        let mut sampler = engine.sampler().unwrap();
        let tokens = Count::default();
        let stream = request("ben", "chat", prompt(5, 2), 30);
        sampler.add_observed(&base, stream, Box::new(tokens.clone())).unwrap();
        sampler.step();
        let id = sampler.add(&base, long).unwrap();
        let mut output = None;
        let mut steps = 0;
        while output.is_none() {
            let rows = sampler.computed_rows;
            let finished = sampler.step();
            steps += 1;
            assert_eq!(tokens.0.load(Ordering::Relaxed), 1 + steps, "each step continues it");
            let rows = sampler.computed_rows - rows;
            assert!(rows <= 1 + 64, "{rows} rows");
            output = finished.into_iter().find(|(finished, _)| *finished == id);
        }
        assert_eq!(steps, 5, "240 rows in chunks of 64, and one row for the second token");
        assert_eq!(output.unwrap().1.unwrap(), alone);
    }
}

/// A batch of short prompts has as many rows per step as without completions.
#[test]
fn short_prompts_of_one_session_are_computed_together_beside_completions() {
    let engine = engine("qwen3", 1);
    let base = engine.base_weights();
    let mut sampler = engine.sampler().unwrap();
    for salt in 0..16 {
        sampler.add(&base, request("ana", "batch", prompt(64, salt), 5)).unwrap();
    }
    sampler.step();
    assert_eq!(sampler.computed_rows, 512);
    sampler.step();
    assert_eq!(sampler.computed_rows, 1_024 + 8);
}

#[test]
fn a_cancelled_prompt_is_not_computed_further() {
    let engine = engine("qwen3", 1);
    let base = engine.base_weights();
    let mut sampler = engine.sampler().unwrap();
    let stream = sampler.add(&base, request("ben", "chat", prompt(5, 2), 30)).unwrap();
    sampler.step();
    let long = sampler.add(&base, request("ana", "batch", prompt(240, 1), 2)).unwrap();
    sampler.step();
    sampler.cancel(long);
    let rows = sampler.computed_rows;
    sampler.step();
    assert_eq!(sampler.computed_rows - rows, 1, "only the stream continues");
    sampler.cancel(stream);
    assert!(sampler.is_idle());
    assert_eq!(sampler.cache.available(), sampler.cache.capacity());
}

#[test]
fn prompts_of_several_users_advance_together() {
    let engine = engine("qwen3", 1);
    let base = engine.base_weights();
    let mut sampler = engine.sampler().unwrap();
    sampler.add(&base, request("eve", "chat", prompt(5, 2), 60)).unwrap();
    sampler.step();
    for salt in 1..4 {
        sampler.add(&base, request("ana", "batch", prompt(240, salt), 2)).unwrap();
    }
    let short = sampler.add(&base, request("ben", "chat", prompt(60, 9), 2)).unwrap();
    let (_, steps, others) = run_until(&mut sampler, short);
    assert!(steps <= 4, "{steps} steps: half of each chunk is for the short prompt");
    assert_eq!(others, 0);
}

/// Every completion needs a row per step; the step has fewer rows.
#[test]
fn many_completions_of_one_user_do_not_take_all_rows_of_a_step() {
    let engine = engine("qwen3", 1);
    let base = engine.base_weights();
    let mut sampler = engine.sampler().unwrap();
    let mut batch = request("ana", "batch", prompt(5, 1), 20);
    batch.samples = 600;
    sampler.add(&base, batch).unwrap();
    sampler.step();
    let rows = sampler.computed_rows;
    sampler.step();
    assert_eq!(sampler.computed_rows - rows, 512, "the rows of a step are limited");
    let short = sampler.add(&base, request("ben", "chat", prompt(5, 2), 4)).unwrap();
    let rows = sampler.computed_rows;
    let (_, steps, _) = run_until(&mut sampler, short);
    assert_eq!(steps, 4, "each step continues the completion of the other user");
    let rows = (sampler.computed_rows - rows) / steps;
    assert!(rows <= 128 + 5, "{rows} rows per step while two users share them");
}

/// Ben's completion needs a third page before Ana's, and Ana's older sample ranks higher.
#[test]
fn a_completion_that_waits_for_a_page_is_not_charged() {
    let engine = engine_with_pages(4);
    let base = engine.base_weights();
    let mut sampler = engine.sampler().unwrap();
    sampler.add(&base, request("ana", "chat", prompt(PAGE_POSITIONS + 2, 1), 20)).unwrap();
    sampler.add(&base, request("ben", "chat", prompt(2 * PAGE_POSITIONS - 2, 2), 20)).unwrap();
    while sampler.running.get(1).is_none_or(|ben| ben.computed < 2 * PAGE_POSITIONS) {
        assert_eq!(sampler.step().len(), 0, "both samples are running");
    }
    let computed = [0, 1].map(|index| sampler.running[index].computed);
    let charged = [0, 1].map(|index| sampler.shares.order(sampler.running[index].share));
    sampler.step();
    let [ana, ben] = [0, 1].map(|index| &sampler.running[index]);
    assert_eq!([ana.computed, ben.computed], [computed[0] + 1, computed[1]]);
    assert_eq!((ben.pages.len(), ben.pending()), (2, 1), "ben's completion waits");
    assert!(sampler.shares.order(ana.share) > charged[0]);
    assert_eq!(sampler.shares.order(ben.share), charged[1]);
}

#[test]
fn a_prefix_that_sessions_share_is_computed_once() {
    let engine = engine("qwen3", 1);
    let base = engine.base_weights();
    let mut sampler = engine.sampler().unwrap();
    let requests = ["ana", "ben", "eve"].map(|user| request(user, "chat", prompt(230, 1), 3));
    let alone = one(&mut engine.sampler().unwrap(), &base, requests[0].clone());
    for request in requests {
        sampler.add(&base, request).unwrap();
    }
    for (_, output) in super::tests::run(&mut sampler) {
        assert_eq!(output.unwrap().samples, alone.samples);
    }
    let full_pages = 230 / PAGE_POSITIONS * PAGE_POSITIONS;
    let own_rows = 3 * (230 - full_pages + 2);
    assert_eq!(sampler.computed_rows, full_pages + own_rows);
}
