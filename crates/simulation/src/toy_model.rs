//! [`ToyModel`]: a model whose "weights" are a hash of everything that has trained it, in order.
//!
//! Only equal sequences of requests give equal weights: a step that is applied twice, not at all or
//! in another order changes the results of all later passes.

use tinkex_wire::{ForwardBackward, OptimStep, PassMode};

/// State of a model without its gradients, which belong to the slot of the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ToyModel {
    pub(crate) weights: u64,
    pub(crate) moments: u64,
}

/// Returns a hash of two values.
fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns a hash of bytes.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |hash, byte| mix(hash, u64::from(*byte)))
}

/// Converts a hash to a number that `f64` represents without rounding.
#[expect(clippy::cast_precision_loss, reason = "24 bits")]
fn metric(value: u64) -> f64 {
    (value >> 40) as f64
}

impl ToyModel {
    /// Creates the initial model for a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self { weights: mix(seed, 1), moments: 0 }
    }

    /// Runs a pass. Returns its loss, and accumulates into `gradients` if it has a backward pass.
    pub(crate) fn pass(&self, pass: &ForwardBackward, gradients: &mut u64) -> f64 {
        // Hash neither model id nor sequence number: the gateway replaces both in the client's
        // request.
        let mut data = pass.clone();
        data.model_id = "".into();
        data.seq_id = None;
        let data = hash(&data.to_proto().unwrap_or_default());
        let result = mix(self.weights, data);
        if pass.mode == PassMode::ForwardBackward && !pass.data.is_empty() {
            *gradients = mix(*gradients, result);
        }
        metric(result)
    }

    /// Applies `gradients` and clears them. Returns the metric of the step.
    pub(crate) fn step(&mut self, step: &OptimStep, gradients: &mut u64) -> f64 {
        let rate = match &step.params {
            tinkex_wire::OptimParams::Adam(adam) => adam.learning_rate,
            _ => 0.0,
        };
        let applied = std::mem::take(gradients);
        self.moments = mix(self.moments, applied);
        if rate != 0.0 {
            self.weights = mix(mix(self.weights, self.moments), rate.to_bits());
        }
        metric(mix(applied, self.weights))
    }

    /// Returns a token that the model samples.
    pub(crate) fn token(&self, position: u64, seed: u64) -> u32 {
        u32::try_from(mix(mix(self.weights, position), seed) % 90 + 3).unwrap_or(3)
    }
}
