//! Sends a batch as one or more chunks and merges their results.

use std::ops::Range;

use futures_util::future::join_all;
use tinkex_wire::{
    Datum, ForwardBackward, ForwardBackwardOutput, LossConfig, LossFn, PassMode, Seq,
};

use crate::connection::PassEncoding;
use crate::error::{Error, ErrorKind, Result};
use crate::future::Submitted;
use crate::loss::CustomLoss;
use crate::transport::request::sent_flag::SentFlag;
use crate::validated::Validated;

use super::call_order::{AssignedSeq, Reservation};
use super::chunk::{self, BatchChunk, ChunkLimits};
use super::datum_index::DatumIndices as _;
use super::merge::{self, BatchOutput};
use super::{TrainingShared, finite, pass_encoding};

/// Batch whose requests were sent. The server may have refused some of them.
pub(super) struct SubmittedBatch {
    mode: PassMode,
    chunks: Vec<SubmittedChunk>,
    /// Sum of the weights of all target tokens of the data that the caller passed.
    pub(super) weight: f64,
}

/// Chunk whose request was sent.
struct SubmittedChunk {
    /// Indices of the datums of this chunk in the batch.
    datums: Range<usize>,
    /// Sequence number of the request; `None` if it was not sent.
    seq: Option<Seq>,
    /// The accepted request, or the error with which the server refused the chunk.
    outcome: Result<Submitted>,
}

impl SubmittedBatch {
    /// Returns the error of the batch if the server refused one of its chunks. The error lists the
    /// datums of the accepted chunks, whose gradients the server accumulates.
    pub(super) fn refusal(&self) -> Option<Error> {
        let outcomes = self.chunks.iter().map(|chunk| (&chunk.datums, chunk.outcome.as_ref()));
        first_error(self.mode, outcomes)
    }

    /// Returns the sequence number of the first chunk, which identifies the pass in
    /// [`UnappliedPasses`](super::unapplied::UnappliedPasses).
    pub(super) fn first_seq(&self) -> Option<Seq> {
        self.chunks.first()?.seq
    }
}

/// Returns the first error of a batch's chunks. For a pass that computes gradients, the error lists
/// the datums of the successful chunks.
fn first_error<'a, T: 'a>(
    mode: PassMode,
    outcomes: impl Iterator<Item = (&'a Range<usize>, std::result::Result<T, &'a Error>)> + Clone,
) -> Option<Error> {
    let error = outcomes.clone().find_map(|(_, outcome)| outcome.err())?.clone();
    if mode == PassMode::Forward {
        return Some(error);
    }
    let accumulated =
        outcomes.filter(|(_, outcome)| outcome.is_ok()).map(|(datums, _)| datums.clone());
    Some(error.with_accumulated(accumulated))
}

/// Validated requests of one batch, without sequence numbers.
pub(super) struct BatchRequests {
    mode: PassMode,
    chunks: Vec<ChunkRequest>,
    /// Sum of the weights of all target tokens.
    weight: f64,
}

/// Request for one chunk of a batch.
pub(super) struct ChunkRequest {
    pub(super) request: Validated<ForwardBackward>,
    /// Indices of the datums of this chunk in the batch.
    pub(super) datums: Range<usize>,
    /// Estimated size in bytes.
    pub(super) bytes: u64,
    /// Whether the server may have read the request under its sequence number.
    pub(super) sent: SentFlag,
}

impl BatchRequests {
    /// Splits `data` into requests and validates them.
    ///
    /// Runs before the call reserves its position, so that an invalid batch is not queued.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `data` is empty, an input of a built-in loss is not finite,
    /// or a datum cannot be encoded for this server.
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
        if *loss_fn != LossFn::Custom {
            finite::check(&data)?;
        }
        let weight = merge::total_weight(&data);
        let config = model.session.config();
        let limits = ChunkLimits {
            datums: config.fwdbwd_max_chunk_len,
            bytes: config.fwdbwd_max_chunk_bytes_count,
        };
        let mut start = 0;
        let chunks: Result<Vec<ChunkRequest>> = chunk::split(data, limits)
            .into_iter()
            .map(|BatchChunk { data, bytes }| {
                let datums = start..start + data.len();
                start = datums.end;
                let pass = ForwardBackward::new(model.model_id.clone(), data, loss_fn.clone())
                    .loss_fn_config(loss_fn_config.clone())
                    .mode(mode);
                let request =
                    Validated::new(pass).map_err(|error| Error::from(error).in_datums(&datums))?;
                Ok(ChunkRequest { request, datums, bytes, sent: SentFlag::default() })
            })
            .collect();
        let chunks = chunks?;
        if model.session.connection().pass_encoding() == Some(PassEncoding::Json) {
            pass_encoding::validate_json(&chunks)?;
        }
        Ok(Self { mode, chunks, weight })
    }

    /// Creates the requests for a traced loss that the server computes.
    ///
    /// # Errors
    /// In addition to the errors of [`new`](Self::new), fails if `data` lacks an input of the loss,
    /// or if the loss was registered in another session.
    pub(super) fn with_traced_loss(
        model: &TrainingShared,
        mode: PassMode,
        data: Vec<Datum>,
        traced: &CustomLoss,
    ) -> Result<Self> {
        traced.check(&data)?;
        let config = match traced.id_in(model.session.id())? {
            Some(id) => LossConfig::custom(id),
            None => LossConfig::new(),
        };
        Self::new(model, mode, data, &LossFn::Custom, &config)
    }
}

impl TrainingShared {
    /// Assigns sequence numbers to all requests of a batch and sends them.
    ///
    /// Sends the remaining requests even if one fails: the server would wait for their sequence
    /// numbers before it executes later requests of the model.
    pub(super) async fn submit_batch(
        &self,
        reservation: &mut Reservation,
        batch: BatchRequests,
    ) -> SubmittedBatch {
        let BatchRequests { mode, mut chunks, weight } = batch;
        if let Err(error) = self.choose_pass_encoding(&chunks).await {
            let datums = 0..chunks.last().map_or(0, |chunk| chunk.datums.end);
            let chunks = vec![SubmittedChunk { datums, seq: None, outcome: Err(error) }];
            return SubmittedBatch { mode, chunks, weight };
        }
        let assigned = reservation.assign(chunks.len());
        let numbers: Vec<Seq> = assigned.iter().map(|assigned| assigned.seq).collect();
        for (chunk, AssignedSeq { seq, sent }) in chunks.iter_mut().zip(assigned) {
            chunk.request.set_seq(*seq);
            chunk.sent = sent.clone();
        }
        let outcomes = match chunks.split_first() {
            // Send the first chunk last: the server starts at the lowest sequence number, so all
            // chunks are queued by then and can be executed as one batch.
            Some((first, rest)) if self.session.config().parallel_fwdbwd_chunks => {
                let rest =
                    join_all(rest.iter().map(|chunk| self.submit_chunk(chunk, &chunks))).await;
                let first = self.submit_chunk(first, &chunks).await;
                std::iter::once(first).chain(rest).collect()
            }
            _ => {
                let mut outcomes = Vec::with_capacity(chunks.len());
                for chunk in &chunks {
                    outcomes.push(self.submit_chunk(chunk, &chunks).await);
                }
                outcomes
            }
        };
        let chunks: Vec<SubmittedChunk> = chunks
            .into_iter()
            .zip(numbers)
            .zip(outcomes)
            .map(|((chunk, seq), outcome)| SubmittedChunk {
                datums: chunk.datums,
                seq: Some(seq),
                outcome,
            })
            .collect();
        let batch = SubmittedBatch { mode, chunks, weight };
        if let (PassMode::ForwardBackward, Some(pass)) = (mode, batch.first_seq()) {
            for chunk in batch.chunks.iter().filter(|chunk| chunk.outcome.is_ok()) {
                if let Some(seq) = chunk.seq {
                    self.unapplied.add(seq, pass, chunk.datums.clone());
                }
            }
        }
        batch
    }

    /// Polls for the results of all chunks concurrently and merges them.
    ///
    /// If the server refused a chunk, fails without waiting for the others: the server may never
    /// execute the chunks after a refused one. Otherwise waits for all results, so that the error
    /// lists every datum whose gradient the server accumulated.
    pub(super) async fn poll_batch(&self, batch: SubmittedBatch) -> Result<BatchOutput> {
        if let Some(error) = batch.refusal() {
            return Err(error);
        }
        let results = join_all(batch.chunks.iter().map(|chunk| self.poll_chunk(chunk))).await;
        let outcomes = batch.chunks.iter().map(|chunk| &chunk.datums);
        let outcomes = outcomes.zip(results.iter().map(|result| result.as_ref()));
        if let Some(error) = first_error(batch.mode, outcomes) {
            return Err(error);
        }
        Ok(merge::merge(results.into_iter().flatten().collect(), batch.weight))
    }

    async fn poll_chunk(&self, chunk: &SubmittedChunk) -> Result<ForwardBackwardOutput> {
        let submitted = chunk.outcome.as_ref().map_err(Error::clone)?;
        let result = self.poller().result::<ForwardBackward>(submitted).await;
        result.map_err(|error| {
            // After any other error, the server may have executed the request.
            if let (ErrorKind::WorkFailed, Some(seq)) = (error.kind(), chunk.seq) {
                self.unapplied.remove(seq);
            }
            error.in_datums(&chunk.datums)
        })
    }
}
