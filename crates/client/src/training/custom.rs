//! Custom losses that the client computes.
//!
//! A forward pass returns the log-probabilities, [`LocalLoss`] computes the loss and its gradient,
//! and a second pass with the server's cross entropy accumulates the gradient.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use tinkex_loss::{LocalLoss, forward_data};
use tinkex_wire::{Datum, LossConfig, LossFn, PassMode, TensorData};

use crate::error::Result;
use crate::future::ApiFuture;
use crate::loss::{CustomLoss, LossValue};

use super::forward_backward::BatchRequests;
use super::merge::BatchOutput;
use super::pass::PreparedPass;
use super::{TrainingClient, TrainingShared};

/// Error returned by a caller's loss function.
pub(super) type LossError = Box<dyn StdError + Send + Sync>;

/// Loss that a function of the caller computes. The function can be called for several batches.
#[derive(Clone)]
pub(super) struct ComputedLoss(pub(super) Arc<SharedLossFunction>);

/// Loss function that can be called for several batches.
type SharedLossFunction =
    dyn Fn(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError> + Send + Sync;

/// Compares the identity of the functions.
impl PartialEq for ComputedLoss {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for ComputedLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ComputedLoss")
    }
}

impl TrainingClient {
    /// Accumulates the gradient of a loss that a Rust function computes from the log-probabilities
    /// of each datum's target tokens.
    ///
    /// The data is sent twice: for a forward pass, whose log-probabilities the function receives,
    /// and for the pass that accumulates the gradient. Later calls for the same model are sent
    /// after both. The function runs on tokio's blocking thread pool, so it may take long; it must
    /// not wait for another call of the same model, which would deadlock.
    ///
    /// ```no_run
    /// # async fn run(model: tinkex::TrainingClient, data: Vec<tinkex::Datum>) -> tinkex::Result<()> {
    /// use tinkex::loss::LossValue;
    ///
    /// let pass = model.forward_backward_custom(data, |_, logprobs| {
    ///     let mut value = LossValue::default();
    ///     for logprobs in logprobs.iter().filter_map(|tensor| tensor.as_f32()) {
    ///         value.loss -= logprobs.iter().map(|x| f64::from(*x)).sum::<f64>();
    ///         value.gradients.push(vec![-1.0; logprobs.len()]);
    ///     }
    ///     Ok(value)
    /// });
    /// println!("{:?}", pass.await?.metrics["loss:sum"]);
    /// # Ok(()) }
    /// ```
    ///
    /// For a traced loss ([`CustomLoss`]) the gradient is derived automatically; pass such a loss
    /// to [`TrainingClient::forward_backward`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if a datum has no
    /// `target_tokens`, or if the function fails, panics, or returns a value that is not finite or
    /// gradients of other lengths than the log-probabilities. No gradient is accumulated then.
    pub fn forward_backward_custom<F>(&self, data: Vec<Datum>, loss: F) -> ApiFuture<BatchOutput>
    where
        F: FnOnce(&[Datum], &[TensorData]) -> std::result::Result<LossValue, LossError>
            + Send
            + 'static,
    {
        let pass = self.0.prepare_local(PassMode::ForwardBackward, data, LocalLoss::new(loss));
        match pass {
            Ok(pass) => self.enqueue_pass(pass),
            Err(error) => ApiFuture::failed(error.during("forward_backward_custom")),
        }
    }
}

impl TrainingShared {
    /// Prepares a pass with a traced loss that the client computes.
    pub(super) fn prepare_traced(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: CustomLoss,
    ) -> Result<PreparedPass> {
        loss.check(&data)?;
        let loss = LocalLoss::new(move |data, logprobs| Ok(loss.evaluate(data, logprobs)?));
        self.prepare_local(mode, data, loss)
    }

    /// Prepares a pass with a loss that a function of the caller computes.
    pub(super) fn prepare_computed(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: &ComputedLoss,
    ) -> Result<PreparedPass> {
        let function = Arc::clone(&loss.0);
        self.prepare_local(
            mode,
            data,
            LocalLoss::new(move |data, logprobs| function(data, logprobs)),
        )
    }

    /// Prepares a pass with a loss that the client computes.
    fn prepare_local(
        &self,
        mode: PassMode,
        data: Vec<Datum>,
        loss: LocalLoss,
    ) -> Result<PreparedPass> {
        let forward = self.cross_entropy(PassMode::Forward, forward_data(&data)?)?;
        Ok(PreparedPass::OnClient { mode, forward, data, loss })
    }

    /// Prepares the requests of a cross-entropy pass.
    pub(super) fn cross_entropy(&self, mode: PassMode, data: Vec<Datum>) -> Result<BatchRequests> {
        BatchRequests::new(self, mode, data, &LossFn::CrossEntropy, &LossConfig::new())
    }
}
