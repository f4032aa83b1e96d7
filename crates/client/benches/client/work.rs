//! The measured work. It is the same for every contender: the Python SDK, the floor and the client.

use tinkex::{Datum, SamplingParams};

use crate::Outcome;

const PROMPT_TOKENS: u32 = 512;
pub(crate) const SAMPLED_TOKENS: u32 = 256;
pub(crate) const DATUMS: usize = 128;
pub(crate) const DATUM_TOKENS: usize = 1024;
pub(crate) const MODEL: &str = "bench/model";

/// Work for one process.
pub(crate) struct Work {
    pub(crate) kind: Kind,
    pub(crate) url: String,
    pub(crate) count: u32,
    /// Number of samples in progress at the same time, or of service clients
    /// ([`Kind::Services`]).
    pub(crate) concurrent: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Samples with limited concurrency.
    Samples,
    /// Sequential training steps.
    Steps,
    /// The first sample of a process.
    Start,
    /// All samples at once.
    Burst,
    /// All samples at once, divided among several service clients.
    Services,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Steps => "steps",
            Self::Start => "start",
            Self::Burst => "burst",
            Self::Services => "services",
        }
    }
}

impl Work {
    /// Parses the output of [`Work::arguments`].
    pub(crate) fn parse(arguments: &[&str]) -> Outcome<Self> {
        let [kind, url, count, concurrent] = arguments else {
            return Err("expected: KIND URL COUNT CONCURRENT".into());
        };
        let kinds = [Kind::Samples, Kind::Steps, Kind::Start, Kind::Burst, Kind::Services];
        let kind = kinds.into_iter().find(|known| known.name() == *kind);
        Ok(Self {
            kind: kind.ok_or("unknown kind of work")?,
            url: (*url).to_owned(),
            count: count.parse()?,
            concurrent: concurrent.parse()?,
        })
    }

    pub(crate) fn arguments(&self) -> [String; 4] {
        let Self { kind, url, count, concurrent } = self;
        [kind.name().to_owned(), url.clone(), count.to_string(), concurrent.to_string()]
    }
}

/// Returns the prompt of sample `n`. The first token of the prompt and of the result is `n`.
pub(crate) fn prompt(n: u32) -> Vec<u32> {
    let rest = (1..PROMPT_TOKENS).map(|i| 1_000 + i * 37 % 100_000);
    std::iter::once(n).chain(rest).collect()
}

pub(crate) fn params() -> SamplingParams {
    SamplingParams::new().max_tokens(SAMPLED_TOKENS)
}

/// Returns the rollouts to train on; half of each is prompt.
pub(crate) fn batch() -> Outcome<Vec<Datum>> {
    let mut rng = fastrand::Rng::with_seed(1);
    let half = DATUM_TOKENS / 2;
    let mut tokens = |n: usize| -> Vec<u32> { (0..n).map(|_| rng.u32(..150_000)).collect() };
    let datum = |_| Datum::rollout(tokens(half), tokens(half + 1), vec![-0.5; half + 1], 0.5);
    Ok((0..DATUMS).map(datum).collect::<Result<_, _>>()?)
}
