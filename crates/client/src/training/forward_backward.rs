//! Sends a batch as chunks and collects their results.

use futures_util::future::{join_all, try_join_all};
use tinkex_wire::{Datum, ForwardBackward, LossConfig, LossFn, PassMode};

use crate::connection::PassEncoding;
use crate::error::{Error, ErrorKind, Result};
use crate::future::poll::Submitted;
use crate::validated::Validated;

use super::call_order::Reservation;
use super::chunk::{self, BatchChunk, ChunkLimits};
use super::merge::{self, BatchOutput};
use super::{LossSource, LossSpec, TrainingShared, pass_encoding};

/// Validated requests of one batch, without sequence numbers.
pub(super) struct BatchRequests(Vec<QueuedChunk>);

pub(super) struct QueuedChunk {
    pub(super) request: Validated<ForwardBackward>,
    /// Estimated size in bytes.
    pub(super) bytes: u64,
}

impl BatchRequests {
    /// Splits `data` into requests and validates them.
    ///
    /// Runs before the call reserves its position, so that an invalid batch is not queued.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `data` is empty or an example cannot be encoded for this
    /// server.
    pub(super) fn new(
        model: &TrainingShared,
        mode: PassMode,
        data: Vec<Datum>,
        loss_fn: &LossFn,
        loss_fn_config: &LossConfig,
    ) -> Result<Self> {
        if data.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "invalid batch: it has no examples"));
        }
        let config = model.session.config();
        let limits = ChunkLimits {
            datums: config.fwdbwd_max_chunk_len,
            bytes: config.fwdbwd_max_chunk_bytes_count,
        };
        let chunks: Result<Vec<QueuedChunk>> = chunk::split(data, limits)
            .into_iter()
            .map(|BatchChunk { data, bytes }| {
                let pass = ForwardBackward::new(model.model_id.clone(), data, loss_fn.clone())
                    .loss_fn_config(loss_fn_config.clone())
                    .mode(mode);
                Ok(QueuedChunk { request: Validated::new(pass)?, bytes })
            })
            .collect();
        let chunks = chunks?;
        if model.session.connection().pass_encoding() == Some(PassEncoding::Json) {
            pass_encoding::validate_json(&chunks)?;
        }
        Ok(Self(chunks))
    }

    /// Creates the requests for a loss that the server computes.
    ///
    /// # Errors
    /// In addition to the errors of [`new`](Self::new), fails if `data` lacks an input of the loss,
    /// or if the loss was registered in another session.
    pub(super) fn with_loss(
        model: &TrainingShared,
        mode: PassMode,
        data: Vec<Datum>,
        loss: &LossSpec,
    ) -> Result<Self> {
        match &loss.0 {
            LossSource::BuiltIn(loss_fn, config) => Self::new(model, mode, data, loss_fn, config),
            LossSource::Traced(traced) => {
                traced.check(&data)?;
                let config = match traced.id_in(model.session.id())? {
                    Some(id) => LossConfig::custom(id),
                    None => LossConfig::new(),
                };
                Self::new(model, mode, data, &LossFn::Custom, &config)
            }
        }
    }
}

impl TrainingShared {
    /// Assigns sequence numbers to all requests of a batch and sends them.
    ///
    /// Sends the remaining requests even if one fails: a gap in the sequence numbers would block
    /// the model on the server.
    pub(super) async fn submit_batch(
        &self,
        reservation: &mut Reservation,
        batch: BatchRequests,
    ) -> Vec<Result<Submitted>> {
        let mut chunks = batch.0;
        if let Err(error) = self.choose_pass_encoding(&chunks).await {
            return vec![Err(error)];
        }
        let numbers = reservation.assign(chunks.len());
        for (chunk, number) in chunks.iter_mut().zip(numbers) {
            chunk.request.set_seq(number);
        }
        let Some((first, rest)) = chunks.split_first() else { return Vec::new() };
        if self.session.config().parallel_fwdbwd_chunks {
            // Send the first chunk last: the server starts at the lowest sequence number, so all
            // chunks are queued by then and can be executed as one batch.
            let rest = join_all(rest.iter().map(|chunk| self.submit_chunk(chunk, &chunks))).await;
            let first = self.submit_chunk(first, &chunks).await;
            return std::iter::once(first).chain(rest).collect();
        }
        let mut submitted = Vec::with_capacity(chunks.len());
        for chunk in &chunks {
            submitted.push(self.submit_chunk(chunk, &chunks).await);
        }
        submitted
    }

    /// Polls the results of all chunks concurrently and merges them.
    ///
    /// Fails with the first error without waiting for the other chunks: the server may never
    /// execute the chunks behind a rejected one.
    pub(super) async fn poll_batch(
        &self,
        submitted: Vec<Result<Submitted>>,
    ) -> Result<BatchOutput> {
        let submitted: Vec<Submitted> = submitted.into_iter().collect::<Result<_>>()?;
        let results = submitted
            .iter()
            .map(async |chunk| self.poller().result::<ForwardBackward>(chunk).await);
        Ok(merge::merge(try_join_all(results).await?))
    }
}
