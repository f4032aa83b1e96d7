//! [`Sampler`]: continuous batching of sampling requests.
//!
//! Every step computes one batch: the next token of each running completion, and up to
//! [`PROMPT_ROWS`] tokens of prompts. When the KV cache is full, the youngest sequence is
//! preempted: it releases its pages and is computed again later. Preemption does not change the
//! result, because the bits of a row depend only on the preceding tokens.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

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

/// Maximum number of prompt tokens per step.
const PROMPT_ROWS: usize = 512;

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
    /// Requests that have not been admitted, oldest first.
    waiting: VecDeque<SampleRequestId>,
    /// Sequences of the admitted requests, oldest first. Preempted ones have no pages.
    pub(super) running: Vec<RunningSequence>,
    last_id: u64,
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
            waiting: VecDeque::new(),
            running: Vec::new(),
            last_id: 0,
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
        let request = ActiveRequest::new(weights.clone(), request, limit, observer);
        self.requests.insert(id, request);
        self.waiting.push_back(id);
        Ok(id)
    }

    /// Cancels a request and releases its pages. Returns what it has sampled so far, without the
    /// completions that have no token; `None` if the request does not exist or has failed.
    pub fn cancel(&mut self, id: SampleRequestId) -> Option<SampleOutput> {
        let mut request = self.requests.remove(&id)?;
        self.waiting.retain(|waiting| *waiting != id);
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

    /// Admits waiting requests in order of arrival while their prompts fit into the available
    /// pages. If no sequence is running, the first request is always admitted.
    fn admit(&mut self) {
        while let Some(&id) = self.waiting.front() {
            let Some(request) = self.requests.get_mut(&id) else {
                self.waiting.pop_front();
                continue;
            };
            let needed = request.prompt.len() / PAGE_POSITIONS + 1;
            if self.cache.available() < needed && !self.running.is_empty() {
                break;
            }
            self.waiting.pop_front();
            let mut sequence = RunningSequence::prompt(id, request);
            request.cached_tokens = sequence.attach_prefix(
                &mut self.cache,
                request.weights.id(),
                request.first_scored_row(),
            );
            self.running.push(sequence);
        }
    }

    /// Decides how many rows of each sequence to compute, and allocates their pages. A sequence
    /// with one pending token gets one row; all others share [`PROMPT_ROWS`].
    fn schedule(&mut self) -> Vec<ScheduledRows> {
        let mut prompt_rows_left = PROMPT_ROWS;
        let mut scheduled = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            self.reattach_prefix(index);
            let pending = self.running[index].pending();
            let rows = if pending == 1 { 1 } else { pending.min(prompt_rows_left) };
            if rows > 0 && self.allocate_pages(index, rows) {
                if pending > 1 {
                    prompt_rows_left -= rows;
                }
                scheduled.push(ScheduledRows { sequence: index, rows });
            }
            index += 1;
        }
        scheduled
    }

    /// Attaches the cached prefix of a sequence that has no pages, for example after preemption.
    fn reattach_prefix(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        if !sequence.pages.is_empty() {
            return;
        }
        if let Some(request) = self.requests.get(&sequence.request) {
            let max_tokens = match sequence.writer {
                Some(_) => sequence.len() - 1,
                None => request.first_scored_row(),
            };
            sequence.attach_prefix(&mut self.cache, request.weights.id(), max_tokens);
        }
    }

    /// Allocates pages for `rows` more rows of a sequence, preempting younger sequences if
    /// necessary. Returns whether all pages could be allocated.
    fn allocate_pages(&mut self, index: usize, rows: usize) -> bool {
        let needed = (self.running[index].computed + rows).div_ceil(PAGE_POSITIONS);
        while self.running[index].pages.len() < needed {
            if let Some(page) = self.cache.allocate() {
                self.running[index].pages.push(page);
                continue;
            }
            let victim = (index + 1..self.running.len())
                .rev()
                .find(|victim| !self.running[*victim].pages.is_empty());
            match victim {
                Some(victim) => {
                    let sequence = &mut self.running[victim];
                    sequence.release_pages(&mut self.cache);
                    let Some(request) = self.requests.get(&sequence.request) else { continue };
                    sequence.reset(request.weights.id());
                }
                None => return false,
            }
        }
        true
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
            if let Some(request) = self.requests.remove(&id) {
                if request.failed() {
                    self.drop_sequences(id);
                }
                outputs.push((id, request.into_output()));
            }
        }
        outputs
    }

    /// Removes the sequences of a request and releases their pages.
    fn drop_sequences(&mut self, id: SampleRequestId) {
        for sequence in self.running.iter_mut().filter(|sequence| sequence.request == id) {
            sequence.release_pages(&mut self.cache);
        }
        self.running.retain(|sequence| sequence.request != id);
    }
}
