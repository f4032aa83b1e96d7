//! A pass over a batch: cut into requests, numbered, sent in reservation, answered beside each other.

use futures_util::future::{join_all, try_join_all};
use tinkex_wire::{
    ApiRequest as _, Datum, ForwardBackward, JsonForwardBackward, LossConfig, LossFn, PassMode,
};

use crate::error::{Error, ErrorKind, Result};
use crate::future::poll::Submitted;
use crate::transport::RequestOptions;

use super::call_order::Reservation;
use super::chunk::{self, BatchChunk, ChunkLimits};
use super::merge::{self, BatchOutput};
use super::{LossSource, LossSpec, TrainingShared};

/// The requests of one batch.
pub(super) struct BatchRequests(Vec<ChunkRequest>);

struct ChunkRequest {
    request: ForwardBackward,
    bytes: u64,
}

impl BatchRequests {
    /// Cuts data into requests. What cannot be sent is refused here, before it takes a reservation.
    pub(super) fn new(
        inner: &TrainingShared,
        mode: PassMode,
        data: Vec<Datum>,
        function: &LossFn,
        settings: &LossConfig,
    ) -> Result<Self> {
        if data.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "there is no data"));
        }
        let config = inner.session.config();
        let limits = ChunkLimits {
            datums: config.fwdbwd_max_chunk_len,
            bytes: config.fwdbwd_max_chunk_bytes_count,
        };
        let parts: Vec<ChunkRequest> = chunk::cut(data, limits)
            .into_iter()
            .map(|BatchChunk { data, bytes }| ChunkRequest {
                bytes,
                request: ForwardBackward {
                    loss_fn_config: settings.clone(),
                    mode,
                    ..ForwardBackward::new(inner.model_id.clone(), data, function.clone())
                },
            })
            .collect();
        let plain = inner.session.connection().is_first_protocol();
        parts.iter().try_for_each(|part| match plain {
            true => JsonForwardBackward(&part.request).validate(),
            false => part.request.validate(),
        })?;
        Ok(Self(parts))
    }

    /// The same for a loss that the server computes.
    pub(super) fn of_loss(
        inner: &TrainingShared,
        mode: PassMode,
        data: Vec<Datum>,
        loss: &LossSpec,
    ) -> Result<Self> {
        match &loss.0 {
            LossSource::Named(function, settings) => {
                Self::new(inner, mode, data, function, settings)
            }
            LossSource::Traced(traced) => {
                traced.check(&data)?;
                let settings = match traced.id_in(inner.session.id())? {
                    Some(id) => LossConfig::custom(id),
                    None => LossConfig::new(),
                };
                Self::new(inner, mode, data, &LossFn::Custom, &settings)
            }
        }
    }
}

impl TrainingShared {
    /// Sends all requests of a batch; it is their reservation. One that fails does not keep the others: a
    /// hole in the sequence would hold up the server.
    pub(super) async fn submit_batch(
        &self,
        reservation: &mut Reservation,
        batch: BatchRequests,
    ) -> Vec<Result<Submitted>> {
        let mut parts = batch.0;
        let numbers = reservation.assign(parts.len());
        for (part, number) in parts.iter_mut().zip(numbers) {
            part.request.seq_id = Some(number);
        }
        let Some((first, rest)) = parts.split_first() else { return Vec::new() };
        if self.session.config().parallel_fwdbwd_chunks {
            // The first goes last: the server starts at the lowest number, so by the time it
            // arrives the rest is queued and can run as one batch.
            let rest = join_all(rest.iter().map(|part| self.submit_part(part))).await;
            let first = self.submit_part(first).await;
            return std::iter::once(first).chain(rest).collect();
        }
        let mut taken = Vec::with_capacity(parts.len());
        for part in &parts {
            taken.push(self.submit_part(part).await);
        }
        taken
    }

    async fn submit_part(&self, part: &ChunkRequest) -> Result<Submitted> {
        let _room = self.session.upload_budget().acquire(part.bytes).await;
        if self.session.connection().is_first_protocol() {
            return self
                .submit(&JsonForwardBackward(&part.request), &RequestOptions::default())
                .await;
        }
        let compress = self.session.config().proto_compress_fwdbwd;
        self.submit(&part.request, &RequestOptions { compress, ..RequestOptions::default() }).await
    }

    /// Waits for the answers to all requests of a batch, or for the first failure: behind a request
    /// that was refused the server may wait for ever.
    pub(super) async fn batch_answer(&self, taken: Vec<Result<Submitted>>) -> Result<BatchOutput> {
        let taken: Vec<Submitted> = taken.into_iter().collect::<Result<_>>()?;
        let answers =
            taken.iter().map(async |taken| self.poller().result::<ForwardBackward>(taken).await);
        Ok(merge::merge(try_join_all(answers).await?))
    }
}
