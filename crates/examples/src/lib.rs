//! A library on the client SDK, tested with [`tinkex::testing::FakeServer`]: [`majority`] asks a
//! model the same question several times and returns the most frequent answer.
//!
//! The programs of this package are in `src/bin`; `docs/client.md` lists them.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use tinkex::{Error, ErrorKind, ModelInput, SampleOptions, SamplingClient, SamplingParams, Tokens};

/// Answer of [`majority`].
#[derive(Clone, Debug, PartialEq)]
pub struct Majority {
    /// The most frequent answer.
    pub answer: Tokens,
    /// Number of samples that gave the answer.
    pub votes: u32,
}

/// Samples `samples` answers to `prompt` and returns the most frequent one; of several, the one that
/// was sampled first. If the server rejects the request, retries with half the number of samples.
///
/// # Errors
/// [`ErrorKind::Decode`] if the server returns no answer; otherwise fails like a sample.
pub async fn majority(
    sampler: &SamplingClient,
    prompt: impl Into<ModelInput>,
    params: &SamplingParams,
    samples: u32,
) -> tinkex::Result<Majority> {
    let prompt = prompt.into();
    let mut samples = samples;
    let response = loop {
        let options = SampleOptions::from(params).num_samples(samples);
        match sampler.sample(&prompt, options).await {
            Err(error) if error.kind() == ErrorKind::Rejected && samples > 1 => samples /= 2,
            sampled => break sampled?,
        }
    };
    let mut votes: HashMap<&Tokens, u32> = HashMap::new();
    for sequence in &response.sequences {
        *votes.entry(&sequence.tokens).or_default() += 1;
    }
    let answers = response.sequences.iter().map(|sequence| &sequence.tokens);
    // `max_by_key` returns the last of several, so start with the last.
    let answer = answers.rev().max_by_key(|answer| votes[answer]);
    let answer = answer.ok_or_else(|| Error::new(ErrorKind::Decode, "no answer was sampled"))?;
    Ok(Majority { answer: answer.clone(), votes: votes[answer] })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tinkex::testing::{FakeServer, Reply, Route};
    use tinkex::{SampleResponse, SampledSequence};

    use super::*;

    fn reply(answers: &[[u32; 2]]) -> Reply {
        let sequence = |tokens: &[u32; 2]| SampledSequence::default().tokens(tokens);
        let sequences = answers.iter().map(sequence).collect();
        Reply::sample(&SampleResponse::default().sequences(sequences))
    }

    async fn ask(server: &FakeServer, samples: u32) -> tinkex::Result<Majority> {
        let service = server.builder().build()?;
        let sampler = service.create_sampling_client("any-model").await?;
        majority(&sampler, [1, 2, 3], &SamplingParams::new().max_tokens(2), samples).await
    }

    #[tokio::test(start_paused = true)]
    async fn the_most_frequent_answer_wins_and_the_first_of_several() {
        for (answers, answer, votes) in
            [(&[[1, 1], [2, 2], [2, 2]][..], [2, 2], 2), (&[[3, 3], [4, 4]], [3, 3], 1)]
        {
            let server = FakeServer::new().on(Route::Sample, reply(answers));
            let samples = u32::try_from(answers.len()).unwrap();
            let majority = ask(&server, samples).await.unwrap();
            assert_eq!(majority, Majority { answer: answer.into(), votes });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_rejected_request_is_repeated_with_fewer_samples() {
        let rejected = Reply::status(400).text("too many samples");
        let server = FakeServer::new()
            .on(Route::Sample, rejected.clone())
            .on(Route::Sample, rejected.clone())
            .on(Route::Sample, reply(&[[5, 5]]));
        assert_eq!(ask(&server, 4).await.unwrap().votes, 1);
        let sent = server.calls_to(Route::Sample);
        let samples: Vec<_> = sent.iter().map(|call| call.json()["num_samples"].clone()).collect();
        assert_eq!(samples, [4, 2, 1]);

        let server = FakeServer::new().on(Route::Sample, rejected.always());
        let error = ask(&server, 4).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Rejected);
        assert_eq!(error.body(), Some("too many samples"));
    }

    /// The clock is paused: the wait takes no real time.
    #[tokio::test(start_paused = true)]
    async fn a_busy_server_is_asked_again_when_it_says() {
        let busy = Reply::status(429).retry_after(Duration::from_secs(30));
        let server = FakeServer::new().on(Route::Sample, busy).on(Route::Sample, reply(&[[7, 7]]));
        assert_eq!(ask(&server, 1).await.unwrap().answer, [7, 7]);
        let calls = server.calls_to(Route::Sample);
        assert!(calls[1].at - calls[0].at >= Duration::from_secs(30));
    }
}
