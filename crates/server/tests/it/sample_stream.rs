//! `SamplingClient::sample_stream` on this server.

use futures_util::{StreamExt as _, TryStreamExt as _};
use tinkex::{SampledSequence, SamplingParams, StopCondition, StopReason, StreamedToken};
use tinkex_server::BUILT_IN;

use crate::harness::{MODEL, TestServer, train, training_client};

/// Returns a streamed completion in the form of a sample, and its text.
fn join(tokens: &[StreamedToken]) -> (SampledSequence, String) {
    let logprobs: Vec<f32> = tokens.iter().map(|token| token.logprob.unwrap()).collect();
    let (last, others) = tokens.split_last().unwrap();
    assert!(others.iter().all(|token| token.stop_reason.is_none()));
    let sequence = SampledSequence::default()
        .tokens(tokens.iter().map(|token| token.token).collect::<Vec<_>>())
        .logprobs(Some(logprobs.into()))
        .stop_reason(last.stop_reason.unwrap());
    (sequence, tokens.iter().map(|token| token.text.as_str()).collect())
}

/// Compares tokens, the bits of log-probabilities and stop reasons.
fn assert_same(streamed: &SampledSequence, sampled: &SampledSequence, about: &str) {
    assert_eq!(streamed.tokens, sampled.tokens, "{about}");
    let bits = |one: &SampledSequence| {
        let logprobs = one.logprobs.as_ref().unwrap().as_slice();
        logprobs.iter().map(|logprob| logprob.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(bits(streamed), bits(sampled), "{about}");
    assert_eq!(streamed.stop_reason, sampled.stop_reason, "{about}");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_have_the_bits_of_samples() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model = training_client(&service).await;
    train(&model, 2).await;
    let base = service.create_sampling_client(MODEL).await.unwrap();
    let trained = model.save_weights_and_get_sampling_client().await.unwrap();
    let params = || SamplingParams::new().max_tokens(20).seed(7);
    let greedy = base.sample([3, 4, 5], params().temperature(0.0)).await.unwrap();
    let stop = greedy.sequences[0].tokens[3];
    let before = test_server.http().metrics().await;
    for (about, params) in [
        ("greedy", params().temperature(0.0)),
        ("seed", params()),
        ("top k and p", params().top_k(9).top_p(0.9).temperature(0.7)),
        ("stop token", params().temperature(0.0).stop([stop])),
        ("never", params().stop(StopCondition::NEVER)),
        ("until the end of the context", {
            let mut unlimited = params();
            unlimited.max_tokens = None;
            unlimited
        }),
    ] {
        for sampler in [&base, &trained] {
            let sampled = sampler.sample([3, 4, 5], params.clone()).await.unwrap();
            let stream = || sampler.sample_stream([3, 4, 5], params.clone());
            let streams = (0..4).map(|_| stream().try_collect::<Vec<_>>());
            for tokens in futures_util::future::join_all(streams).await {
                assert_same(&join(&tokens.unwrap()).0, &sampled.sequences[0], about);
            }
        }
    }
    // One request for each sample and each stream: without the endpoint, a stream would be sampled
    // in pieces, with several requests.
    let after = test_server.http().metrics().await;
    assert_eq!(after["requests_total"] - before["requests_total"], 6 * 2 * (1 + 4));
    assert_eq!(after["failed_requests_total"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_have_the_text_of_the_completion() {
    let test_server = TestServer::new().await;
    let sampler = test_server.client().create_sampling_client(BUILT_IN).await.unwrap();
    let prompt: Vec<u32> = (40..60).collect();
    let params = SamplingParams::new().max_tokens(40).temperature(0.0);
    let stream = sampler.sample_stream(prompt.clone(), params.clone());
    let tokens: Vec<StreamedToken> = stream.try_collect().await.unwrap();
    let (whole, text) = join(&tokens);
    assert!(text.len() > 10, "{text:?}");
    let middle: String = text.chars().skip(4).take(3).collect();
    let stream = sampler.sample_stream(prompt.clone(), params.clone().stop(middle.as_str()));
    let tokens: Vec<StreamedToken> = stream.try_collect().await.unwrap();
    let (stopped, stopped_text) = join(&tokens);
    assert_eq!(stopped_text, text[..text.find(&middle).unwrap()]);
    assert_eq!(stopped.stop_reason, StopReason::Stop);
    assert_eq!(stopped.tokens[..], whole.tokens[..stopped.tokens.len()]);
    let sampled = sampler.sample(prompt, params.stop(middle.as_str())).await.unwrap();
    assert_same(&stopped, &sampled.sequences[0], "stop string");
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_stream_cancels_its_sample() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let service = test_server.client();
    let sampler = service.create_sampling_client(MODEL).await.unwrap();
    let params = SamplingParams::new().max_tokens(240).stop(StopCondition::NEVER);
    let streams: Vec<_> = (0..32).map(|_| sampler.sample_stream([5, 6], params.clone())).collect();
    let mut streams = futures_util::stream::select_all(streams);
    streams.next().await.unwrap().unwrap();
    drop(streams);
    loop {
        let metrics = http.metrics().await;
        if metrics["queued"] == 0 && metrics["cache_pages"] == 0 {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert!(http.metrics().await["failed_requests_total"] > 0);
}
