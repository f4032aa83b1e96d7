//! [`Training`]: the interface of a [`TrainingClient`], for programs that replace it in tests.

use std::sync::Arc;

use futures_util::future::FutureExt as _;
use tinkex_wire::{Datum, OptimParams, TinkerPath};

use crate::future::ApiFuture;
use crate::sampling::Sampling;

use super::{
    BatchOutput, LossSpec, OptimOutput, RestoreMode, SaveOptions, StepOptions, StepOutput,
    TrainingClient,
};

/// Trains one model: a [`TrainingClient`], or a replacement in a test.
///
/// A function that takes `&dyn Training` or `&impl Training` can be tested without a server. The
/// methods are those of [`TrainingClient`] with concrete argument types; their calls are executed in
/// call order, and [start at once](crate#calls). To test requests and retries too, use a
/// `TrainingClient` with `testing::FakeServer` (feature `testing`).
///
/// ```no_run
/// use tinkex::{AdamParams, Datum, LossFn, Training};
///
/// async fn epoch(model: &dyn Training, batches: Vec<Vec<Datum>>) -> tinkex::Result<f64> {
///     let adam = AdamParams::with_learning_rate(1e-4);
///     let mut loss = f64::INFINITY;
///     for batch in batches {
///         let step = model.step(batch, LossFn::CrossEntropy.into(), adam.into()).await?;
///         loss = step.mean_loss().unwrap_or(loss);
///     }
///     Ok(loss)
/// }
/// # async fn run(model: tinkex::TrainingClient) -> tinkex::Result<()> {
/// epoch(&model, Vec::new()).await?;
/// # Ok(()) }
/// ```
pub trait Training: Send + Sync {
    /// Accumulates the gradient of `loss` over `data`; see [`TrainingClient::forward_backward`].
    fn forward_backward(&self, data: Vec<Datum>, loss: LossSpec) -> ApiFuture<BatchOutput>;

    /// Computes `loss` over `data` without a gradient; see [`TrainingClient::forward`].
    fn forward(&self, data: Vec<Datum>, loss: LossSpec) -> ApiFuture<BatchOutput>;

    /// Updates the weights with the accumulated gradient; see [`TrainingClient::optim_step`].
    fn optim_step(&self, params: OptimParams) -> ApiFuture<OptimOutput>;

    /// Starts a pass and the optimizer step that applies its gradient; see
    /// [`TrainingClient::step`].
    fn step(&self, data: Vec<Datum>, loss: LossSpec, options: StepOptions)
    -> ApiFuture<StepOutput>;

    /// Saves the weights and the optimizer state; see [`TrainingClient::save_state`].
    fn save_state(&self, options: SaveOptions) -> ApiFuture<TinkerPath>;

    /// Loads a checkpoint; see [`TrainingClient::load_state`].
    fn load_state(&self, path: TinkerPath, restore: RestoreMode) -> ApiFuture<()>;

    /// Saves the weights without a name, and returns a sampler of them; see
    /// [`TrainingClient::save_weights_and_get_sampling_client`].
    fn save_weights_and_get_sampler(&self) -> ApiFuture<Arc<dyn Sampling>>;
}

impl Training for TrainingClient {
    fn forward_backward(&self, data: Vec<Datum>, loss: LossSpec) -> ApiFuture<BatchOutput> {
        Self::forward_backward(self, data, loss)
    }

    fn forward(&self, data: Vec<Datum>, loss: LossSpec) -> ApiFuture<BatchOutput> {
        Self::forward(self, data, loss)
    }

    fn optim_step(&self, params: OptimParams) -> ApiFuture<OptimOutput> {
        Self::optim_step(self, params)
    }

    fn step(
        &self,
        data: Vec<Datum>,
        loss: LossSpec,
        options: StepOptions,
    ) -> ApiFuture<StepOutput> {
        Self::step(self, data, loss, options)
    }

    fn save_state(&self, options: SaveOptions) -> ApiFuture<TinkerPath> {
        Self::save_state(self, options)
    }

    fn load_state(&self, path: TinkerPath, restore: RestoreMode) -> ApiFuture<()> {
        Self::load_state(self, path, restore)
    }

    fn save_weights_and_get_sampler(&self) -> ApiFuture<Arc<dyn Sampling>> {
        let saved = self.save_weights_and_get_sampling_client();
        let _entered = self.0.session.settings().enter_runtime();
        ApiFuture::start(
            saved.map(|saved| saved.map(|client| Arc::new(client) as Arc<dyn Sampling>)),
        )
    }
}

impl<T: Training + ?Sized> Training for Arc<T> {
    fn forward_backward(&self, data: Vec<Datum>, loss: LossSpec) -> ApiFuture<BatchOutput> {
        (**self).forward_backward(data, loss)
    }

    fn forward(&self, data: Vec<Datum>, loss: LossSpec) -> ApiFuture<BatchOutput> {
        (**self).forward(data, loss)
    }

    fn optim_step(&self, params: OptimParams) -> ApiFuture<OptimOutput> {
        (**self).optim_step(params)
    }

    fn step(
        &self,
        data: Vec<Datum>,
        loss: LossSpec,
        options: StepOptions,
    ) -> ApiFuture<StepOutput> {
        (**self).step(data, loss, options)
    }

    fn save_state(&self, options: SaveOptions) -> ApiFuture<TinkerPath> {
        (**self).save_state(options)
    }

    fn load_state(&self, path: TinkerPath, restore: RestoreMode) -> ApiFuture<()> {
        (**self).load_state(path, restore)
    }

    fn save_weights_and_get_sampler(&self) -> ApiFuture<Arc<dyn Sampling>> {
        (**self).save_weights_and_get_sampler()
    }
}
