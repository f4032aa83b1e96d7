//! Sampling: lengths, seeds, stop conditions, log-probabilities.

use std::time::Duration;

use tinkex::{
    Datum, ErrorKind, LossFn, SampleOptions, SampleStreamOptions, SamplingParams, SaveOptions,
    StopCondition, StopReason,
};

use super::Subject;
use super::training::{model, train};

fn params(tokens: u32) -> SamplingParams {
    SamplingParams::new().max_tokens(tokens).stop(StopCondition::NEVER)
}

pub(super) async fn samples_have_the_requested_length_and_number(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    let result =
        sampler.sample([3, 4, 5], SampleOptions::new(params(6)).num_samples(3)).await.unwrap();
    assert_eq!(result.sequences.len(), 3);
    for sequence in &result.sequences {
        assert_eq!((sequence.tokens.len(), sequence.stop_reason), (6, StopReason::Length));
        let logprobs = sequence.logprobs.as_ref().unwrap();
        assert_eq!(logprobs.len(), 6, "one per token");
        assert!(logprobs.as_slice().iter().all(|p| *p <= 0.0), "{logprobs:?}");
    }
    assert!(result.prompt_logprobs.is_none(), "not requested");
}

pub(super) async fn equal_seeds_repeat_and_samples_differ(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    let draw = async |seed| {
        let result = sampler
            .sample([3, 4, 5], SampleOptions::new(params(16).seed(seed)).num_samples(2))
            .await;
        result.unwrap().sequences.into_iter().map(|s| s.tokens.to_vec()).collect::<Vec<_>>()
    };
    let one = draw(7).await;
    let again = draw(7).await;
    let other = draw(8).await;
    assert_eq!(one, again);
    assert_ne!(one, other);
    assert_ne!(one[0], one[1]);
    let greedy = async || {
        let result = sampler.sample([3, 4, 5], params(8).temperature(0.0)).await.unwrap();
        result.sequences[0].tokens.to_vec()
    };
    assert_eq!(greedy().await, greedy().await);
}

/// Servers without the endpoint for streams are sampled in pieces.
pub(super) async fn a_stream_has_the_tokens_of_a_sample(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    let greedy = params(12).temperature(0.0);
    let whole = sampler.sample([3, 4, 5], greedy.clone()).await.unwrap();
    let options = SampleStreamOptions::new(greedy).without_text();
    let mut stream = sampler.sample_stream([3, 4, 5], options);
    let mut tokens = Vec::new();
    let mut reasons = Vec::new();
    while let Some(token) = stream.next().await {
        let token = token.unwrap();
        tokens.push(token.token);
        reasons.extend(token.stop_reason);
    }
    assert_eq!(whole.sequences[0].tokens, tokens);
    assert_eq!(reasons, [StopReason::Length]);
}

pub(super) async fn a_stop_token_ends_a_sample_and_is_included(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    let free = sampler.sample([3, 4, 5], params(8).temperature(0.0)).await.unwrap();
    let tokens = free.sequences[0].tokens.to_vec();
    let stopped = SamplingParams::new().max_tokens(8).temperature(0.0).stop(vec![tokens[2]]);
    let result = sampler.sample([3, 4, 5], stopped).await.unwrap();
    let first = tokens.iter().position(|token| *token == tokens[2]).unwrap();
    assert_eq!(result.sequences[0].tokens.to_vec(), tokens[..=first]);
    assert_eq!(result.sequences[0].stop_reason, StopReason::Stop);
}

pub(super) async fn prompt_logprobs_equal_those_of_training(subject: Subject) {
    let model = model(&subject).await;
    train(&model, 1).await;
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    let scored = sampler.compute_logprobs([9, 8, 7, 6, 5]).await.unwrap();
    assert_eq!((scored.len(), scored.get(0)), (5, None));
    let datum = Datum::completion([9], [8, 7, 6, 5]).unwrap();
    let pass = model.forward(vec![datum], LossFn::CrossEntropy).await.unwrap();
    let trained = pass.outputs.get(0).unwrap().f32("logprobs").unwrap().to_vec();
    for (i, expected) in trained.iter().enumerate() {
        let given = scored.get(i + 1).unwrap();
        assert!((given - expected).abs() < 0.1, "position {}: {given} {expected}", i + 1);
    }
}

pub(super) async fn the_most_likely_tokens_are_reported(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    let result = sampler
        .sample(
            [9, 8, 7],
            SampleOptions::new(params(4).temperature(0.0))
                .topk_prompt_logprobs(3)
                .topk_sample_logprobs(2),
        )
        .await
        .unwrap();
    let prompt = result.topk_prompt_logprobs.unwrap();
    assert_eq!((prompt.len(), prompt.k()), (3, 3));
    assert!(prompt.row(0).is_none(), "the first token has no prediction");
    let sampled = result.sequences[0].topk_logprobs.as_ref().unwrap();
    assert_eq!((sampled.len(), sampled.k()), (4, 2));
    for (at, token) in result.sequences[0].tokens.iter().enumerate() {
        let row: Vec<(u32, f32)> = sampled.row(at).unwrap().collect();
        assert!(row[0].1 >= row[1].1, "{row:?}");
        assert_eq!(row[0].0, *token, "greedy decoding takes the most likely token");
    }
}

pub(super) async fn saved_weights_can_be_sampled(subject: Subject) {
    let model = model(&subject).await;
    train(&model, 4).await;
    let save = SaveOptions::new("contract-sampler").ttl(Duration::from_secs(3_600));
    let path = model.save_weights_for_sampler(save).await.unwrap();
    let ephemeral = model.save_weights_and_get_sampling_client().await.unwrap();
    train(&model, 4).await;
    let named = subject.service.create_sampling_client_from(&path).await.unwrap();
    let score = async |sampler: &tinkex::SamplingClient| {
        let scored = sampler.compute_logprobs([5, 6, 7, 8, 9, 10]).await.unwrap();
        scored.as_slice()[3..].iter().sum::<f32>()
    };
    let a = score(&named).await;
    let b = score(&ephemeral).await;
    assert!((a - b).abs() < 0.1, "later training must not change saved weights: {a} {b}");
    let later = score(&model.save_weights_and_get_sampling_client().await.unwrap()).await;
    assert!(later > a, "{later} {a}");
    subject.delete(&path).await;
}

pub(super) async fn dropped_samples_do_not_block_others(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    for _ in 0..8 {
        drop(sampler.sample([3, 4, 5], params(64)));
    }
    let result = sampler.sample([3, 4, 5], params(2)).await.unwrap();
    assert_eq!(result.sequences[0].tokens.len(), 2);
}

pub(super) async fn a_handle_restores_the_sampling_client(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    let other = subject.service.restore_sampling_client(&sampler.handle()).unwrap();
    let futures: Vec<_> = (0..20_u32)
        .map(|i| {
            let client = if i % 2 == 0 { &sampler } else { &other };
            client.sample([i + 1], params(3).seed(5))
        })
        .collect();
    for future in futures {
        assert_eq!(future.await.unwrap().sequences[0].tokens.len(), 3);
    }
    assert_eq!(sampler.sampler_id(), other.sampler_id());
    let shown = sampler.get_sampler().await.unwrap();
    assert_eq!(shown.base_model, subject.model);
}

pub(super) async fn invalid_samples_are_rejected(subject: Subject) {
    let sampler = subject.service.create_sampling_client(&*subject.model).await.unwrap();
    for result in [
        sampler.sample([3], params(u32::MAX / 2)).await,
        sampler.sample([u32::MAX - 1], params(1)).await,
    ] {
        let error = result.unwrap_err();
        let kinds = [ErrorKind::Rejected, ErrorKind::WorkFailed, ErrorKind::InvalidInput];
        assert!(kinds.contains(&error.kind()), "{error:?}");
    }
    assert_eq!(
        sampler.sample([3], params(1)).await.unwrap().sequences[0].tokens.len(),
        1,
        "the sampler still works"
    );
}
