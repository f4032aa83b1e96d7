//! The client under test.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tinkex::{
    AdamParams, Datum, LoraOptions, LossFn, RequestFuture, SampleResponse, SamplingClient,
    ServiceClient, ServiceClientBuilder, TrainingClient,
};
use tokio::task::JoinSet;

use crate::Outcome;
use crate::usage::Stopwatch;
use crate::work::{DATUMS, Kind, MODEL, SAMPLED_TOKENS, Work, batch, params, prompt};

pub(crate) async fn run(work: &Work) -> Outcome<()> {
    let watch = Stopwatch::start();
    if work.kind == Kind::Services {
        services(work).await?;
        watch.report(work.count);
        return Ok(());
    }
    let service = builder(&work.url)?.build()?;
    match work.kind {
        Kind::Services => {}
        Kind::Steps => return steps(work, &service).await,
        Kind::Start => {
            let sampler = service.create_sampling_client(MODEL).await?;
            check(7, &sample(&sampler, 7).await?)?;
        }
        Kind::Samples => return samples(work, &service).await,
        Kind::Burst => {
            let sampler = service.create_sampling_client(MODEL).await?;
            let all: Vec<_> = (0..work.count).map(|n| sample(&sampler, n)).collect();
            for (n, response) in (0..).zip(all) {
                check(n, &response.await?)?;
            }
        }
    }
    watch.report(work.count);
    Ok(())
}

/// Starts all samples at once, divided among service clients that were built separately.
async fn services(work: &Work) -> Outcome<()> {
    let mut samplers = Vec::new();
    for _ in 0..work.concurrent {
        let service = builder(&work.url)?.build()?;
        samplers.push(service.create_sampling_client(MODEL).await?);
    }
    let start = |n: u32| (n, sample(&samplers[n as usize % samplers.len()], n));
    let all: Vec<_> = (0..work.count).map(start).collect();
    for (n, response) in all {
        check(n, &response.await?)?;
    }
    Ok(())
}

async fn samples(work: &Work, service: &ServiceClient) -> Outcome<()> {
    let sampler = service.create_sampling_client(MODEL).await?;
    let warm_up = u32::try_from(work.concurrent)? * 2;
    sample_many(&sampler, warm_up, work.concurrent).await?;
    let watch = Stopwatch::start();
    sample_many(&sampler, work.count, work.concurrent).await?;
    watch.report(work.count);
    Ok(())
}

/// Samples `count` times with `concurrent` workers, each of which samples sequentially.
async fn sample_many(sampler: &SamplingClient, count: u32, concurrent: usize) -> Outcome<()> {
    let next = Arc::new(AtomicU32::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..concurrent {
        let sampler = sampler.clone();
        let next = Arc::clone(&next);
        workers.spawn(async move {
            let mut completed = 0;
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= count {
                    return Ok::<_, String>(completed);
                }
                let response = sample(&sampler, n).await.map_err(|error| error.to_string())?;
                check(n, &response)?;
                completed += 1;
            }
        });
    }
    let mut completed = 0;
    while let Some(worker) = workers.join_next().await {
        completed += worker??;
    }
    if completed == count {
        return Ok(());
    }
    Err(format!("{completed} of {count} samples completed").into())
}

async fn steps(work: &Work, service: &ServiceClient) -> Outcome<()> {
    let model = service.create_lora_training_client(LoraOptions::new(MODEL).rank(32)).await?;
    let batch = batch()?;
    step(&model, batch.clone()).await?;
    let watch = Stopwatch::start();
    for _ in 0..work.count {
        step(&model, batch.clone()).await?;
    }
    watch.report(work.count);
    Ok(())
}

/// Trains one step and checks that it returns an output for every datum.
pub(crate) async fn step(model: &TrainingClient, batch: Vec<Datum>) -> Outcome<()> {
    let adam = AdamParams::with_learning_rate(1e-4);
    let output = model.step(batch, LossFn::ImportanceSampling, adam).await?;
    let outputs = output.pass.outputs.len();
    if outputs == DATUMS {
        return Ok(());
    }
    Err(format!("a pass returned {outputs} outputs, expected {DATUMS}").into())
}

/// Creates a client with a dummy key and without environment variables.
pub(crate) fn builder(url: &str) -> Outcome<ServiceClientBuilder> {
    let env = tinkex::Env::from_pairs([("TINKER_TELEMETRY", "0")]);
    Ok(ServiceClient::builder().base_url(url).api_key("tml-bench").env(env))
}

/// Starts sample `n`.
pub(crate) fn sample(sampler: &SamplingClient, n: u32) -> RequestFuture<SampleResponse> {
    sampler.sample(prompt(n), params())
}

/// Checks that a result belongs to prompt `n` and is complete.
fn check(n: u32, response: &SampleResponse) -> Result<(), String> {
    let tokens = &response.sequences.first().ok_or("response without a sequence")?.tokens;
    if tokens.first() == Some(&n) && tokens.len() == SAMPLED_TOKENS as usize {
        return Ok(());
    }
    Err(format!("sample {n} has the result of {:?}", tokens.first()))
}
