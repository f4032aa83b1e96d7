//! From one row of logits to a token, and when to stop.
//!
//! Nothing here knows a model, a batch or a cache. The same logits, settings and random number give
//! the same token, whatever else is going on; scratch memory is the caller's and used again.

mod histogram;
mod rng;
mod sampler;
mod select;
mod stop;

pub use rng::SampleRng;
pub use sampler::{DecodingParams, TokenSampler, log_normalizer, logprob};
pub use stop::{StopConditions, StopMatcher};

/// What stands in a list of top tokens where there is none: token 0 with this log-probability.
pub const NO_LOGPROB: f32 = -99999.0;
