//! From one row of logits to a token, and when to stop.
//!
//! Nothing here knows a model, a batch or a cache. The same logits, settings and random number give
//! the same token, whatever else is going on; scratch memory is the caller's and used again.

mod bins;
mod draw;
mod select;
mod stop;
mod stream;

pub use draw::{Draw, Picker, log_mass, logprob};
pub use stop::{Stop, StopMatcher};
pub use stream::Stream;

/// What stands in a list of top tokens where there is none: token 0 with this log-probability.
pub const NO_LOGPROB: f32 = -99999.0;
