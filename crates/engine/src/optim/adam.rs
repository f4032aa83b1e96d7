//! Adam with decoupled weight decay, equal to torch's AdamW.

use super::{Parameter, at_least_zero, check_clip, decay_rate};
use crate::{Error, Result};

/// Parameters of an Adam step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamParams {
    /// Learning rate; at least 0. Defaults to 1e-4.
    pub learning_rate: f64,
    /// Decay rate of the first moment, in [0, 1). Defaults to 0.9.
    pub beta1: f64,
    /// Decay rate of the second moment, in [0, 1). Defaults to 0.95.
    pub beta2: f64,
    /// Added to the square root of the second moment; at least 0. Defaults to 1e-12.
    pub eps: f64,
    /// Weight decay; at least 0. Weights are multiplied by `1 - learning_rate * weight_decay`
    /// before the update. Defaults to 0.
    pub weight_decay: f64,
    /// Maximum norm of all gradients together; 0 (the default) or less disables clipping.
    pub grad_clip_norm: f64,
}

impl Default for AdamParams {
    /// Returns learning rate 1e-4, betas 0.9 and 0.95, and eps 1e-12, without weight decay and
    /// clipping.
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-12,
            weight_decay: 0.0,
            grad_clip_norm: 0.0,
        }
    }
}

impl AdamParams {
    pub(super) fn check(&self) -> Result<()> {
        at_least_zero("learning_rate", self.learning_rate)?;
        decay_rate("beta1", self.beta1)?;
        decay_rate("beta2", self.beta2)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        check_clip(self.grad_clip_norm)
    }
}

/// First and second moments of every weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AdamState {
    pub(super) first_moments: Vec<Vec<f32>>,
    pub(super) second_moments: Vec<Vec<f32>>,
}

/// Factors of one step, equal for all weights.
struct AdamFactors {
    /// Clipping factor of the gradient.
    scale: f32,
    beta1: f32,
    /// `1 - beta1`.
    new1: f32,
    beta2: f32,
    /// `1 - beta2`.
    new2: f32,
    /// `1 - learning_rate · weight_decay`.
    shrink: f32,
    /// Learning rate, divided by the bias correction of the first moment.
    step: f32,
    /// Factor of the square root of the second moment that corrects its bias.
    root: f32,
    eps: f32,
}

impl AdamState {
    pub(super) fn new(lengths: &[usize]) -> Self {
        let zeros = || lengths.iter().map(|&length| vec![0.0; length]).collect();
        Self { first_moments: zeros(), second_moments: zeros() }
    }

    pub(super) fn lengths(&self) -> impl ExactSizeIterator<Item = usize> {
        self.first_moments.iter().map(Vec::len)
    }

    /// Takes step number `count`, counted from 1.
    pub(super) fn step(
        &mut self,
        params: &AdamParams,
        count: u64,
        tensors: &mut [Parameter<'_>],
        clip_scale: f64,
    ) -> Result<()> {
        let factors = AdamFactors::new(params, count, clip_scale);
        // The first pass checks that every result is finite, the second writes the results. A
        // second pass over memory is cheap compared with a forward pass and needs no copy of the
        // state.
        for ((tensor, first_moments), second_moments) in
            tensors.iter().zip(&self.first_moments).zip(&self.second_moments)
        {
            let mut finite = true;
            for (((&w, &g), &m), &v) in
                tensor.weights.iter().zip(tensor.gradient).zip(first_moments).zip(second_moments)
            {
                let (w, _, v) = factors.update(w, g, m, v);
                finite &= w.is_finite() & v.is_finite();
            }
            if !finite {
                return Err(factors.non_finite_error(tensor, first_moments, second_moments));
            }
        }
        for ((tensor, first_moments), second_moments) in
            tensors.iter_mut().zip(&mut self.first_moments).zip(&mut self.second_moments)
        {
            for (((w, &g), m), v) in tensor
                .weights
                .iter_mut()
                .zip(tensor.gradient)
                .zip(first_moments)
                .zip(second_moments)
            {
                (*w, *m, *v) = factors.update(*w, g, *m, *v);
            }
        }
        Ok(())
    }
}

impl AdamFactors {
    #[expect(clippy::cast_possible_truncation, reason = "weights and their state are f32")]
    fn new(params: &AdamParams, count: u64, clip_scale: f64) -> Self {
        // From step 2³¹ on, the bias correction of step 2³¹ - 1 is used: the power of every beta in
        // use is 0 there.
        let count = i32::try_from(count).unwrap_or(i32::MAX);
        let bias1 = 1.0 - params.beta1.powi(count);
        let bias2 = 1.0 - params.beta2.powi(count);
        Self {
            scale: clip_scale as f32,
            beta1: params.beta1 as f32,
            new1: (1.0 - params.beta1) as f32,
            beta2: params.beta2 as f32,
            new2: (1.0 - params.beta2) as f32,
            shrink: (1.0 - params.learning_rate * params.weight_decay) as f32,
            step: (params.learning_rate / bias1) as f32,
            root: bias2.sqrt().recip() as f32,
            eps: params.eps as f32,
        }
    }

    /// Returns the new weight, first moment and second moment.
    #[inline]
    fn update(&self, w: f32, g: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let g = g * self.scale;
        let m = self.beta1 * m + self.new1 * g;
        let v = self.beta2 * v + self.new2 * g * g;
        let w = w * self.shrink - self.step * (m / (v.sqrt() * self.root + self.eps));
        (w, m, v)
    }

    /// Returns the error for the first weight of `tensor` whose new value is not finite.
    fn non_finite_error(
        &self,
        tensor: &Parameter<'_>,
        first_moments: &[f32],
        second_moments: &[f32],
    ) -> Error {
        let new = |i: usize| {
            let (w, _, v) = self.update(
                tensor.weights[i],
                tensor.gradient[i],
                first_moments[i],
                second_moments[i],
            );
            if w.is_finite() { v } else { w }
        };
        let index = (0..tensor.weights.len()).find(|&i| !new(i).is_finite()).unwrap_or(0);
        let gradient = tensor.gradient[index] * self.scale;
        let squared = self.new2 * gradient * gradient;
        // The square of the gradient overflows whatever the learning rate is.
        if !squared.is_finite() {
            return Error::NonFiniteResult {
                what: format!("the squared gradient of {}", tensor.name),
                index,
                value: f64::from(squared),
                hint: "no step was taken and the gradient is kept; discard the gradient, or repeat \
                       the step with grad_clip_norm",
            };
        }
        Error::NonFiniteResult {
            what: format!("the new value of {}", tensor.name),
            index,
            value: f64::from(new(index)),
            hint: "no step was taken; lower the learning rate, or raise eps above 0",
        }
    }
}
