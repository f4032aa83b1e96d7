//! Decoding: samples a token from a row of logits and detects stop conditions.
//!
//! The functions here depend on neither model, batch nor cache: equal logits, parameters and random
//! numbers give equal tokens.

mod histogram;
mod rng;
mod sampler;
mod select;
mod stop;

pub use rng::SampleRng;
pub use sampler::{DecodingParams, TokenSampler, log_normalizer, logprob};
pub use stop::{StopConditions, StopMatcher};

/// Log-probability of an empty entry in a table of top tokens, whose token is 0.
pub const NO_LOGPROB: f32 = -99999.0;
