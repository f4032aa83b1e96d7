//! [`Sampler`]: continuous batching of sampling requests.
//!
//! Every step computes one batch: the next token of running completions, and a chunk of prompts.
//! When the KV cache is full, a sequence of the user with the most pages is preempted: it releases
//! its pages and is computed again later. Neither chunks nor preemption change the result, because
//! the bits of a row depend only on the preceding tokens.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use tinkex_fairness::{FairShares, ShareId};

use super::kv_cache::KvCache;
use super::observer::TokenObserver;
use super::request::{ModelWeights, SampleOutput, SampleRequest, SampleRequestId};
use super::sequence::RunningSequence;
use super::state::ActiveRequest;
use crate::decode::TokenSampler;
use crate::kernel::ActivationBuffer;
use crate::kernel::paged_attention::PAGE_POSITIONS;
use crate::model::{LayerActivations, Model, Workspace};
use crate::{Error, Result};

/// Samples completions from one model with any number of adapters.
///
/// Requests are added with [`add`](Self::add) and computed together by [`step`](Self::step).
#[derive(Debug)]
pub struct Sampler {
    pub(super) model: Arc<Model>,
    pub(super) cache: KvCache,
    pub(super) work: Workspace,
    pub(super) activations: LayerActivations,
    /// Buffer for logits, reused between steps.
    pub(super) logits: ActivationBuffer,
    /// Buffers of token sampling, shared by all completions: they are as large as the vocabulary.
    pub(super) sampler: TokenSampler,
    pub(super) requests: BTreeMap<SampleRequestId, ActiveRequest>,
    /// Cost of the work done for each user and session, in rows.
    pub(super) shares: FairShares,
    /// Requests of each share that have not been admitted, oldest first.
    waiting: BTreeMap<ShareId, VecDeque<SampleRequestId>>,
    /// Sequences of the admitted requests, oldest first. Preempted ones have no pages.
    pub(super) running: Vec<RunningSequence>,
    last_id: u64,
    /// Number of rows that were computed so far.
    #[cfg(test)]
    pub(super) computed_rows: usize,
}

/// Number of rows that a step computes for one running sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScheduledRows {
    /// Index in [`Sampler::running`].
    pub(super) sequence: usize,
    pub(super) rows: usize,
}

impl Sampler {
    pub(crate) fn new(model: Arc<Model>, cache_bytes: usize) -> Result<Self> {
        let layers = model.layers.len();
        let cache = KvCache::new(model.heads(), layers, cache_bytes)?;
        if cache.capacity() == 0 {
            return Err(Error::Memory {
                what: "one page of the KV cache",
                needed: KvCache::page_bytes(model.heads(), layers) as u64,
                available: cache_bytes as u64,
                hint: "raise the memory limit of the cache",
            });
        }
        Ok(Self {
            model,
            cache,
            work: Workspace::default(),
            activations: LayerActivations::default(),
            logits: ActivationBuffer::default(),
            sampler: TokenSampler::default(),
            requests: BTreeMap::new(),
            shares: FairShares::default(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            last_id: 0,
            #[cfg(test)]
            computed_rows: 0,
        })
    }

    /// Adds a request. A later [`step`](Self::step) returns its output.
    ///
    /// # Errors
    /// - [`Error::Invalid`], [`Error::Length`] or [`Error::TokenOutOfRange`] if the request is not
    ///   valid for this model.
    /// - [`Error::Memory`] if one completion cannot fit into the KV cache.
    pub fn add(
        &mut self,
        weights: &ModelWeights,
        request: SampleRequest,
    ) -> Result<SampleRequestId> {
        self.add_request(weights, request, None)
    }

    /// Adds a request whose tokens `observer` receives while they are sampled. A later
    /// [`step`](Self::step) returns its output.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn add_observed(
        &mut self,
        weights: &ModelWeights,
        request: SampleRequest,
        observer: Box<dyn TokenObserver>,
    ) -> Result<SampleRequestId> {
        self.add_request(weights, request, Some(observer))
    }

    fn add_request(
        &mut self,
        weights: &ModelWeights,
        request: SampleRequest,
        observer: Option<Box<dyn TokenObserver>>,
    ) -> Result<SampleRequestId> {
        let mut limit = request.check(&self.model.config)?;
        // The last sampled token is not computed.
        let max_len = self.cache.capacity() * PAGE_POSITIONS + 1;
        if request.max_tokens.is_none() && request.prompt.len() < max_len {
            // The context of most models is larger than the cache.
            limit = limit.min(max_len - request.prompt.len());
        }
        let pages = (request.prompt.len() + limit - 1).div_ceil(PAGE_POSITIONS);
        if pages > self.cache.capacity() {
            let page = KvCache::page_bytes(self.model.heads(), self.model.layers.len());
            return Err(Error::Memory {
                what: "the KV cache of one completion",
                needed: pages.saturating_mul(page) as u64,
                available: (self.cache.capacity() * page) as u64,
                hint: "request fewer tokens, or raise the memory limit of the cache",
            });
        }
        self.last_id += 1;
        let id = SampleRequestId(self.last_id);
        let share = self.shares.enter(&request.fairness);
        let request = ActiveRequest::new(weights.clone(), share, request, limit, observer);
        self.requests.insert(id, request);
        self.waiting.entry(share).or_default().push_back(id);
        Ok(id)
    }

    /// Cancels a request and releases its pages. Returns what it has sampled so far, without the
    /// completions that have no token; `None` if the request does not exist or has failed.
    pub fn cancel(&mut self, id: SampleRequestId) -> Option<SampleOutput> {
        let mut request = self.remove_request(id)?;
        if let Entry::Occupied(mut queue) = self.waiting.entry(request.share) {
            queue.get_mut().retain(|waiting| *waiting != id);
            if queue.get().is_empty() {
                queue.remove();
            }
        }
        for sequence in self.running.iter_mut().filter(|sequence| sequence.request == id) {
            if let Some(writer) = sequence.writer.take() {
                request.complete(writer.sample(), writer.finish());
            }
        }
        self.drop_sequences(id);
        request.into_output().ok()
    }

    /// Returns whether there are no requests.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns the number of pages of the KV cache that hold running sequences. Pages that are only
    /// cached do not count.
    #[must_use]
    pub fn pages_in_use(&self) -> usize {
        self.cache.capacity() - self.cache.available()
    }

    /// Computes one batch and returns the outputs of the requests that it completed.
    ///
    /// A request fails with [`Error::NonFiniteResult`] if its weights produce logits that are not
    /// finite. Other requests are not affected.
    pub fn step(&mut self) -> Vec<(SampleRequestId, Result<SampleOutput>)> {
        self.admit();
        let scheduled = self.schedule();
        self.compute(&scheduled);
        self.take_finished()
    }

    /// Admits waiting requests while their prompts fit into the available pages, or into pages of
    /// sequences that rank lower. The next request is the oldest of the user, and of the user's
    /// session, whose running sequences need the fewest pages. If no sequence is running, a request
    /// is always admitted.
    fn admit(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let mut needed_by_user: HashMap<usize, usize> = HashMap::new();
        let mut needed_by_session: HashMap<ShareId, usize> = HashMap::new();
        for sequence in &self.running {
            let needed = sequence.needed_pages();
            *needed_by_user.entry(sequence.share.user()).or_default() += needed;
            *needed_by_session.entry(sequence.share).or_default() += needed;
        }
        loop {
            let next = self.waiting.iter().min_by_key(|(share, queue)| {
                let user = needed_by_user.get(&share.user()).copied().unwrap_or(0);
                let session = needed_by_session.get(share).copied().unwrap_or(0);
                (user, session, queue.front().copied())
            });
            let Some((share, queue)) = next else { break };
            let share = *share;
            let request = queue.front().and_then(|id| Some((*id, self.requests.get(id)?)));
            let Some((id, request)) = request else {
                self.pop_waiting(share);
                continue;
            };
            let needed = request.prompt.len() / PAGE_POSITIONS + 1;
            let is_only = self.running.is_empty();
            self.running.push(RunningSequence::prompt(id, request));
            if self.cache.available() < needed && !is_only && !self.can_preempt_for_last(needed) {
                self.running.pop();
                break;
            }
            if let Some(request) = self.requests.get_mut(&id)
                && let Some(sequence) = self.running.last_mut()
            {
                request.cached_tokens = sequence.attach_prefix(
                    &mut self.cache,
                    request.weights.id(),
                    request.first_scored_row(),
                );
            }
            self.pop_waiting(share);
            *needed_by_user.entry(share.user()).or_default() += needed;
            *needed_by_session.entry(share).or_default() += needed;
        }
    }

    /// Returns whether the last running sequence gets `needed` pages if sequences that rank lower
    /// are preempted.
    fn can_preempt_for_last(&self, needed: usize) -> bool {
        let ranks = self.memory_ranks();
        let Some(rank) = ranks.last() else { return false };
        let lower = self.running.iter().zip(&ranks).filter(|(_, other)| *other > rank);
        let pages: usize = lower.map(|(sequence, _)| sequence.pages.len()).sum();
        self.cache.available() + pages >= needed
    }

    /// Removes the oldest waiting request of a share.
    fn pop_waiting(&mut self, share: ShareId) {
        if let Entry::Occupied(mut queue) = self.waiting.entry(share) {
            queue.get_mut().pop_front();
            if queue.get().is_empty() {
                queue.remove();
            }
        }
    }

    /// Removes completed and failed requests and returns their outputs.
    fn take_finished(&mut self) -> Vec<(SampleRequestId, Result<SampleOutput>)> {
        let done: Vec<SampleRequestId> = self
            .requests
            .iter()
            .filter(|(_, request)| request.is_done())
            .map(|(id, _)| *id)
            .collect();
        let mut outputs = Vec::with_capacity(done.len());
        for id in done {
            if let Some(request) = self.remove_request(id) {
                if request.failed() {
                    self.drop_sequences(id);
                }
                outputs.push((id, request.into_output()));
            }
        }
        outputs
    }

    /// Removes a request, and ends its share.
    fn remove_request(&mut self, id: SampleRequestId) -> Option<ActiveRequest> {
        let request = self.requests.remove(&id)?;
        self.shares.leave(request.share);
        Some(request)
    }

    /// Removes the sequences of a request and releases their pages.
    fn drop_sequences(&mut self, id: SampleRequestId) {
        for sequence in self.running.iter_mut().filter(|sequence| sequence.request == id) {
            sequence.release_pages(&mut self.cache);
        }
        self.running.retain(|sequence| sequence.request != id);
    }
}
