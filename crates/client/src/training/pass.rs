//! A pass over a batch: cut into requests, numbered, sent in turn, answered beside each other.

use futures_util::future::{join_all, try_join_all};
use tinkex_wire::{Call as _, Datum, ForwardBackward, LossConfig, LossFn, Mode, PlainPass};

use crate::error::{Error, ErrorKind, Result};
use crate::future::poll::Submitted;
use crate::transport::RequestOptions;

use super::chunk::{self, Chunk, Limits};
use super::merge::{self, PassOutput};
use super::turn::Turn;
use super::{Inner, Loss, LossKind};

/// The requests of one batch.
pub(super) struct Batch(Vec<Part>);

struct Part {
    request: ForwardBackward,
    bytes: u64,
}

impl Batch {
    /// Cuts data into requests. What cannot be sent is refused here, before it takes a turn.
    pub(super) fn new(
        inner: &Inner,
        mode: Mode,
        data: Vec<Datum>,
        function: &LossFn,
        settings: &LossConfig,
    ) -> Result<Self> {
        if data.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "there is no data"));
        }
        let config = inner.session.config();
        let limits = Limits {
            datums: config.fwdbwd_max_chunk_len,
            bytes: config.fwdbwd_max_chunk_bytes_count,
        };
        let parts: Vec<Part> = chunk::cut(data, limits)
            .into_iter()
            .map(|Chunk { data, bytes }| Part {
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
            true => PlainPass(&part.request).check(),
            false => part.request.check(),
        })?;
        Ok(Self(parts))
    }

    /// The same for a loss that the server computes.
    pub(super) fn of_loss(
        inner: &Inner,
        mode: Mode,
        data: Vec<Datum>,
        loss: &Loss,
    ) -> Result<Self> {
        match &loss.0 {
            LossKind::Named(function, settings) => Self::new(inner, mode, data, function, settings),
            LossKind::Traced(traced) => {
                traced.check(&data)?;
                let settings = match traced.id_in(inner.session.id())? {
                    Some(id) => LossConfig::uploaded(id),
                    None => LossConfig::new(),
                };
                Self::new(inner, mode, data, &LossFn::Custom, &settings)
            }
        }
    }
}

impl Inner {
    /// Sends all requests of a batch; it is their turn. One that fails does not keep the others: a
    /// hole in the sequence would hold up the server.
    pub(super) async fn submit_batch(
        &self,
        turn: &mut Turn,
        batch: Batch,
    ) -> Vec<Result<Submitted>> {
        let mut parts = batch.0;
        let numbers = turn.numbers(parts.len());
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

    async fn submit_part(&self, part: &Part) -> Result<Submitted> {
        let _room = self.session.upload_budget().take(part.bytes).await;
        if self.session.connection().is_first_protocol() {
            return self.submit(&PlainPass(&part.request), &RequestOptions::default()).await;
        }
        let compress = self.session.config().proto_compress_fwdbwd;
        self.submit(&part.request, &RequestOptions { compress, ..RequestOptions::default() }).await
    }

    /// Waits for the answers to all requests of a batch, or for the first failure: behind a request
    /// that was refused the server may wait for ever.
    pub(super) async fn batch_answer(&self, taken: Vec<Result<Submitted>>) -> Result<PassOutput> {
        let taken: Vec<Submitted> = taken.into_iter().collect::<Result<_>>()?;
        let answers =
            taken.iter().map(async |taken| self.poller().result::<ForwardBackward>(taken).await);
        Ok(merge::merge(try_join_all(answers).await?))
    }
}
