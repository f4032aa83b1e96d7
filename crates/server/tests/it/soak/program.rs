//! Client program of the soak test: trains, saves, loads, samples, streams and deletes.

use futures_util::TryStreamExt as _;
use futures_util::future::{join_all, try_join_all};
use tinkex::{
    AdamParams, Datum, LoraOptions, LossFn, RestoreMode, SamplingClient, SamplingParams,
    ServiceClient, StreamedToken,
};

use crate::harness::{MODEL, client};

/// What a program has computed. Equal programs compute the same on every server.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Computed {
    /// Bits of the losses of all steps.
    losses: Vec<u64>,
    /// Tokens of all samples.
    samples: Vec<Vec<u32>>,
}

/// What happened to the streams of a program.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StreamCounts {
    pub(super) complete: u64,
    /// Streams that ended with an error, because the server was killed.
    pub(super) interrupted: u64,
}

/// Runs the program with this seed.
pub(super) async fn run(url: &str, seed: u64) -> tinkex::Result<(Computed, StreamCounts)> {
    let service = client(url);
    let result = program(&service, &mut fastrand::Rng::with_seed(seed)).await;
    match &result {
        Ok(_) => service.finish().await,
        Err(error) => service.finish_with_error(error).await,
    }
    result
}

async fn program(
    service: &ServiceClient,
    rng: &mut fastrand::Rng,
) -> tinkex::Result<(Computed, StreamCounts)> {
    let mut computed = Computed::default();
    let options = LoraOptions::new(MODEL).rank(4).seed(rng.u32(..).into());
    let mut model = service.create_lora_training_client(options).await?;
    let mut saved = Vec::new();
    for _ in 0..rng.usize(1..4) {
        let steps: Vec<_> = (0..rng.usize(1..5))
            .map(|_| {
                let batch = (0..rng.usize(1..4)).map(|_| datum(rng)).collect::<Vec<_>>();
                let adam = AdamParams::with_learning_rate(1e-2);
                model.step(batch, LossFn::CrossEntropy, adam)
            })
            .collect();
        let path = model.save_state(&*format!("state-{}", saved.len())).await?;
        for step in try_join_all(steps).await? {
            computed.losses.push(step.pass.metrics["loss:sum"].as_f64().to_bits());
        }
        // A later model continues from a checkpoint, as after an interruption of the program.
        if rng.bool() {
            let restore = RestoreMode::WithOptimizer;
            model = service.create_training_client_from(&path, restore).await?;
        }
        saved.push(path);
    }
    let weights = model.save_weights_for_sampler("sampler").await?;
    let sampler = service.create_sampling_client_from(&weights).await?;
    let samples = (0..rng.usize(1..40)).map(|_| {
        let params = SamplingParams::new().max_tokens(rng.u32(1..24)).seed(rng.u32(..).into());
        sampler.sample(vec![3, 4, rng.u32(5..20)], params)
    });
    // Submit all requests before awaiting the first.
    let samples: Vec<_> = samples.collect();
    for response in try_join_all(samples).await? {
        computed.samples.extend(response.sequences.iter().map(|one| one.tokens.to_vec()));
    }
    let streams = join_all((0..rng.usize(1..4)).map(|_| stream(&sampler, rng.u32(5..20)))).await;
    let complete = streams.iter().filter(|complete| **complete).count() as u64;
    let counts = StreamCounts { complete, interrupted: streams.len() as u64 - complete };
    saved.push(weights);
    for path in saved {
        service.rest().delete_checkpoint(path).await?;
    }
    Ok((computed, counts))
}

/// Streams a sample. Returns whether it was complete; panics if it differs from the sample.
async fn stream(sampler: &SamplingClient, token: u32) -> bool {
    let params = SamplingParams::new().max_tokens(200).temperature(0.0);
    let stream = sampler.sample_stream(vec![3, 4, token], params.clone());
    let Ok(streamed) = stream.try_collect::<Vec<StreamedToken>>().await else { return false };
    let sampled = sampler.sample(vec![3, 4, token], params).await.unwrap();
    let streamed: Vec<u32> = streamed.iter().map(|token| token.token).collect();
    assert_eq!(streamed, sampled.sequences[0].tokens.to_vec());
    true
}

fn datum(rng: &mut fastrand::Rng) -> Datum {
    let mut tokens = |count: std::ops::Range<usize>| -> Vec<u32> {
        (0..rng.usize(count)).map(|_| rng.u32(3..60)).collect()
    };
    let prompt = tokens(1..8);
    let completion = tokens(1..12);
    Datum::completion(prompt, completion).unwrap()
}
