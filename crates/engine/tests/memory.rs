//! Memory of sampling, measured with a counting allocator.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

use parking_lot::Mutex;
use peak_alloc::PeakAlloc;
use tinkex_engine::decode::{DecodingParams, StopConditions};
use tinkex_engine::sample::SampleRequest;
use tinkex_engine::{Engine, EngineOptions};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The allocator counts for the whole process: only one test may allocate at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const SAMPLES: usize = 2_000;

/// Draws [`SAMPLES`] samples of two tokens. Returns the number of bytes per sample at the peak.
fn bytes_per_sample(change: impl FnOnce(&mut SampleRequest)) -> usize {
    let _guard = ONE_AT_A_TIME.lock();
    let options = EngineOptions { threads: 1, cache_memory: 1 << 30, ..EngineOptions::default() };
    let engine = Engine::builtin(options).unwrap();
    let mut request = SampleRequest::new(vec![5; 4], 2);
    request.samples = SAMPLES;
    change(&mut request);
    // Measure a second request: the first one allocates pages and buffers that are reused.
    let mut sampler = engine.sampler().unwrap();
    let mut peak = 0;
    for _ in 0..2 {
        let request = request.clone();
        ALLOCATOR.reset_peak_usage();
        let before = ALLOCATOR.current_usage();
        sampler.add(&engine.base_weights(), request).unwrap();
        while !sampler.is_idle() {
            for (_, output) in sampler.step() {
                assert_eq!(output.unwrap().samples.len(), SAMPLES);
            }
        }
        peak = ALLOCATOR.peak_usage().saturating_sub(before);
    }
    peak / SAMPLES
}

#[test]
fn samples_share_the_memory_of_their_prompt() {
    let short = bytes_per_sample(|_| {});
    let long = bytes_per_sample(|request| request.prompt = vec![5; 400]);
    println!("bytes per sample: {short} for 4 tokens, {long} for 400 tokens");
    // A copy of the prompt has 1,600 bytes. The block table has 16 bytes per 16 tokens.
    assert!(long < short + 1_200, "{long} and {short} bytes");
}

#[test]
fn the_memory_of_a_sample_does_not_depend_on_the_number_of_stop_strings() {
    let tokenizer = tinkex_engine::builtin::tokenizer().unwrap();
    let vocabulary = std::sync::Arc::new(tokenizer.vocabulary().clone());
    let texts = |count: u32| (0..count).map(|i| format!("never {i}")).collect::<Vec<_>>();
    let with = |count: u32| {
        bytes_per_sample(|request| {
            request.stop = StopConditions::new([], texts(count)).unwrap();
            request.vocabulary = Some(vocabulary.clone());
        })
    };
    let one = with(1);
    let many = with(1_000);
    println!("bytes per sample: {one} for 1 stop string, {many} for 1,000");
    assert!(many < one + 1_000, "{many} and {one} bytes");
    let stop = StopConditions::new([], texts(1_000)).unwrap();
    assert!(stop.memory_bytes() < 1 << 20, "{} bytes", stop.memory_bytes());
}

#[test]
fn samples_have_no_buffers_as_large_as_the_vocabulary() {
    let plain = bytes_per_sample(|_| {});
    let filtered = bytes_per_sample(|request| {
        request.decoding = DecodingParams { top_k: 50, top_p: 0.9, ..DecodingParams::default() };
    });
    println!("bytes per sample: {plain} without top-p, {filtered} with");
    assert!(filtered < plain + 500, "{filtered} and {plain} bytes");
}
