//! [`Sampler`]: requests in, finished continuations out.
//!
//! Every step runs one batch: a token of each continuation that is being written, and as much of
//! the waiting prompts as fits beside them. When pages run out the youngest sequence gives its
//! pages up and is computed again later; because a row's bits depend on nothing but what stands
//! before it, that changes no result.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::kv_cache::KvCache;
use super::request::{SampleOutput, SampleRequest, SampleRequestId, SamplingWeights};
use super::sequence::RunningSequence;
use super::state::ActiveRequest;
use crate::kernel::paged_attention::PAGE_POSITIONS;
use crate::model::{LayerActivations, Model, Workspace};
use crate::{Error, Result};

/// PromptRows of prompts that are computed in one step.
const PROMPT_ROWS: usize = 512;

/// Samples from one model and any number of adapters.
#[derive(Debug)]
pub struct Sampler {
    pub(super) model: Arc<Model>,
    pub(super) cache: KvCache,
    pub(super) work: Workspace,
    pub(super) activations: LayerActivations,
    /// PromptRows of logits, kept from step to step.
    pub(super) logits: Vec<f32>,
    pub(super) requests: BTreeMap<SampleRequestId, ActiveRequest>,
    waiting: VecDeque<SampleRequestId>,
    /// Oldest first.
    pub(super) running: Vec<RunningSequence>,
    next: u64,
}

/// PromptRows of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScheduledRows {
    pub(super) sequence: usize,
    pub(super) rows: usize,
}

impl Sampler {
    pub(crate) fn new(model: Arc<Model>, cache_bytes: usize) -> Result<Self> {
        let layers = model.layers.len();
        let cache = KvCache::new(model.heads(), layers, cache_bytes)?;
        if cache.count() == 0 {
            return Err(Error::Memory {
                what: "one page of the cache",
                needed: KvCache::page_bytes(model.heads(), layers) as u64,
                available: cache_bytes as u64,
                hint: "allow the cache more memory",
            });
        }
        Ok(Self {
            model,
            cache,
            work: Workspace::default(),
            activations: LayerActivations::default(),
            logits: Vec::new(),
            requests: BTreeMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            next: 0,
        })
    }

    /// Takes in a request; its answer comes out of a later [`step`](Self::step).
    ///
    /// # Errors
    /// If the request makes no sense for this model, or could never fit the cache. Nothing has
    /// changed then.
    pub fn add(
        &mut self,
        weights: &SamplingWeights,
        request: SampleRequest,
    ) -> Result<SampleRequestId> {
        let limit = request.check(&self.model.config)?;
        let pages = (request.prompt.len() + limit).div_ceil(PAGE_POSITIONS);
        if pages > self.cache.count() {
            let page = KvCache::page_bytes(self.model.heads(), self.model.layers.len());
            return Err(Error::Memory {
                what: "the keys and values of one continuation",
                needed: pages.saturating_mul(page) as u64,
                available: (self.cache.count() * page) as u64,
                hint: "ask for fewer tokens, or allow the cache more memory",
            });
        }
        self.next += 1;
        let id = SampleRequestId(self.next);
        self.requests.insert(id, ActiveRequest::new(weights.clone(), request, limit));
        self.waiting.push_back(id);
        Ok(id)
    }

    /// Drops a request at whatever point it is. Says whether there was one.
    pub fn cancel(&mut self, id: SampleRequestId) -> bool {
        if self.requests.remove(&id).is_none() {
            return false;
        }
        self.waiting.retain(|waiting| *waiting != id);
        let (gone, kept) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|s: &RunningSequence| s.request == id);
        self.running = kept;
        for mut sequence in gone {
            sequence.give_up(&mut self.cache);
        }
        true
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Computes one batch; returns the requests that are answered now.
    ///
    /// A request whose weights no longer compute numbers is answered with
    /// [`Error::NonFiniteResult`]; the others go on.
    pub fn step(&mut self) -> Vec<(SampleRequestId, Result<SampleOutput>)> {
        self.admit();
        let shares = self.plan();
        self.run(&shares);
        self.finished()
    }

    /// Starts waiting requests as long as their prompts fit beside what runs already.
    fn admit(&mut self) {
        while let Some(&id) = self.waiting.front() {
            let Some(request) = self.requests.get_mut(&id) else {
                self.waiting.pop_front();
                continue;
            };
            let needed = request.asked.prompt.len() / PAGE_POSITIONS + 1;
            if self.cache.available() < needed && !self.running.is_empty() {
                break;
            }
            self.waiting.pop_front();
            let mut sequence = RunningSequence::prompt(id, request);
            request.hits = sequence.find(&mut self.cache, request.weights.id(), request.reusable());
            self.running.push(sequence);
        }
    }

    /// Decides how many rows of which sequence are computed, and gets them pages.
    fn plan(&mut self) -> Vec<ScheduledRows> {
        let mut left = PROMPT_ROWS;
        let mut shares = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            self.find_again(index);
            let pending = self.running[index].pending();
            let rows = if pending == 1 { 1 } else { pending.min(left) };
            if rows > 0 && self.get_pages(index, rows) {
                if rows > 1 || pending > 1 {
                    left -= rows.min(left);
                }
                shares.push(ScheduledRows { sequence: index, rows });
            }
            index += 1;
        }
        shares
    }

    /// Looks for pages of a sequence that gave its own up.
    fn find_again(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        if !sequence.pages.is_empty() {
            return;
        }
        if let Some(request) = self.requests.get(&sequence.request) {
            let most = match sequence.writer {
                Some(_) => sequence.tokens.len() - 1,
                None => request.reusable(),
            };
            sequence.find(&mut self.cache, request.weights.id(), most);
        }
    }

    /// Makes room for `rows` more rows of a sequence, at the cost of younger ones.
    fn get_pages(&mut self, index: usize, rows: usize) -> bool {
        let needed = (self.running[index].computed + rows).div_ceil(PAGE_POSITIONS);
        while self.running[index].pages.len() < needed {
            if let Some(page) = self.cache.take() {
                self.running[index].pages.push(page);
                continue;
            }
            let younger = (index + 1..self.running.len())
                .rev()
                .find(|younger| !self.running[*younger].pages.is_empty());
            match younger {
                Some(younger) => {
                    let sequence = &mut self.running[younger];
                    sequence.give_up(&mut self.cache);
                    let Some(request) = self.requests.get(&sequence.request) else { continue };
                    sequence.restart(request.weights.id());
                }
                None => return false,
            }
        }
        true
    }

    /// Takes out the requests of which every continuation is there.
    fn finished(&mut self) -> Vec<(SampleRequestId, Result<SampleOutput>)> {
        let done: Vec<SampleRequestId> = self
            .requests
            .iter()
            .filter(|(_, request)| request.is_done())
            .map(|(id, _)| *id)
            .collect();
        let mut answers = Vec::with_capacity(done.len());
        for id in done {
            if let Some(request) = self.requests.remove(&id) {
                if request.failed() {
                    self.drop_sequences(id);
                }
                answers.push((id, request.into_answer()));
            }
        }
        answers
    }

    fn drop_sequences(&mut self, id: SampleRequestId) {
        for sequence in self.running.iter_mut().filter(|sequence| sequence.request == id) {
            sequence.give_up(&mut self.cache);
        }
        self.running.retain(|sequence| sequence.request != id);
    }
}
