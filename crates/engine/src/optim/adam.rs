//! Adam with decoupled weight decay, as torch's AdamW.

use super::{Parameter, at_least_zero, check_clip, fraction};
use crate::{Error, Result};

/// The settings of an Adam step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamParams {
    /// How far a step goes.
    pub learning_rate: f64,
    /// How slowly the mean of gradients forgets.
    pub beta1: f64,
    /// How slowly the mean of their squares forgets.
    pub beta2: f64,
    /// Added to the root of that mean.
    pub eps: f64,
    /// Weights shrink by this times the learning rate, before the step.
    pub weight_decay: f64,
    /// The bound of the length of all gradients together; 0 or less for none.
    pub grad_clip_norm: f64,
}

impl Default for AdamParams {
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
        fraction("beta1", self.beta1)?;
        fraction("beta2", self.beta2)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        check_clip(self.grad_clip_norm)
    }
}

/// Means of gradients and of their squares, one number each per weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AdamState {
    pub(super) means: Vec<Vec<f32>>,
    pub(super) squares: Vec<Vec<f32>>,
}

/// The factors of one step, the same for every weight.
struct AdamFactors {
    scale: f32,
    beta1: f32,
    new1: f32,
    beta2: f32,
    new2: f32,
    shrink: f32,
    step: f32,
    root: f32,
    eps: f32,
}

impl AdamState {
    pub(super) fn new(lengths: &[usize]) -> Self {
        let zeros = || lengths.iter().map(|&length| vec![0.0; length]).collect();
        Self { means: zeros(), squares: zeros() }
    }

    pub(super) fn lengths(&self) -> impl ExactSizeIterator<Item = usize> {
        self.means.iter().map(Vec::len)
    }

    /// Step number `count`, from 1.
    pub(super) fn step(
        &mut self,
        params: &AdamParams,
        count: u64,
        tensors: &mut [Parameter<'_>],
        clip_scale: f64,
    ) -> Result<()> {
        let factors = AdamFactors::new(params, count, clip_scale);
        // Once to see whether every result is a number, once to write them: a pass over memory
        // costs little beside a forward pass, and a copy of everything would cost more.
        for ((tensor, means), squares) in tensors.iter().zip(&self.means).zip(&self.squares) {
            let mut fine = true;
            for (((&w, &g), &m), &v) in
                tensor.weights.iter().zip(tensor.gradient).zip(means).zip(squares)
            {
                let (w, _, v) = factors.update(w, g, m, v);
                fine &= w.is_finite() & v.is_finite();
            }
            if !fine {
                return Err(factors.fault(tensor, means, squares));
            }
        }
        for ((tensor, means), squares) in
            tensors.iter_mut().zip(&mut self.means).zip(&mut self.squares)
        {
            for (((w, &g), m), v) in
                tensor.weights.iter_mut().zip(tensor.gradient).zip(means).zip(squares)
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
        // A power beyond i32 is zero for every beta below 1 that f64 can tell from it.
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

    /// The new weight, mean and mean square.
    #[inline]
    fn update(&self, w: f32, g: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let g = g * self.scale;
        let m = self.beta1 * m + self.new1 * g;
        let v = self.beta2 * v + self.new2 * g * g;
        let w = w * self.shrink - self.step * (m / (v.sqrt() * self.root + self.eps));
        (w, m, v)
    }

    fn fault(&self, tensor: &Parameter<'_>, means: &[f32], squares: &[f32]) -> Error {
        let new = |i: usize| {
            let (w, _, v) =
                self.update(tensor.weights[i], tensor.gradient[i], means[i], squares[i]);
            if w.is_finite() { v } else { w }
        };
        let index = (0..tensor.weights.len()).find(|&i| !new(i).is_finite()).unwrap_or(0);
        Error::NonFiniteResult {
            what: format!("the new value of {}", tensor.name),
            index,
            value: f64::from(new(index)),
            hint: "no step was taken; lower the learning rate, or raise eps above 0",
        }
    }
}
