//! Scheduling of a step: decides which rows a step computes, and whose pages are preempted.
//!
//! A step computes the next token of running completions and chunks of prompts. The chunks are small
//! while completions are running, so that a long prompt does not stop them. If the work of a step or
//! the pages of the KV cache do not suffice for all sequences, users get equal shares, and the
//! sessions of a user divide the user's share equally.

use std::collections::btree_map::{Entry, OccupiedEntry};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use tinkex_fairness::{FairShares, ShareId};

use super::kv_cache::PageKey;
use super::sampler::{Sampler, ScheduledRows};
use crate::kernel::paged_attention::PAGE_POSITIONS;

/// Maximum number of completions that a step continues. Bounds the time of a step, and with it the
/// time until a new request is considered.
const DECODE_ROWS: usize = 512;
/// Maximum number of completions that a step continues while several sessions have requests.
const SHARED_DECODE_ROWS: usize = 128;
/// Maximum work of a step on prompts, in rows at the first position.
const PROMPT_ROWS: usize = 512;
/// Maximum work of a step on one prompt beside running completions, and on all prompts while several
/// sessions have requests, in rows at the first position.
const CHUNK_ROWS: usize = 64;
/// Number of preceding positions whose attention needs about as much time as the rest of a row.
const ATTENTION_POSITIONS: usize = 4_096;

/// Rows that a step computes, while they are being chosen.
struct StepPlan {
    /// Number of rows of each running sequence.
    rows: Vec<usize>,
    /// Whether several sessions have requests.
    several_sessions: bool,
    /// Sequences that lost their pages in this step. They are not computed in it.
    preempted: Vec<bool>,
    /// Result of [`Sampler::memory_ranks`], once it is needed.
    ranks: Option<Vec<usize>>,
}

impl Sampler {
    /// Decides how many rows of each sequence to compute, and allocates their pages.
    pub(super) fn schedule(&mut self) -> Vec<ScheduledRows> {
        let count = self.running.len();
        let mut plan = StepPlan {
            rows: vec![0; count],
            several_sessions: self.shares.are_several_active(),
            preempted: vec![false; count],
            ranks: None,
        };
        for index in 0..count {
            self.reattach_prefix(index);
        }
        self.schedule_completions(&mut plan);
        self.schedule_prompts(&mut plan);
        let rows = plan.rows.into_iter().enumerate().filter(|(_, rows)| *rows > 0);
        rows.map(|(sequence, rows)| ScheduledRows { sequence, rows }).collect()
    }

    /// Schedules the sequences with one pending token, with one row each.
    fn schedule_completions(&mut self, plan: &mut StepPlan) {
        let ready: Vec<usize> =
            (0..self.running.len()).filter(|index| self.running[*index].pending() == 1).collect();
        let limit = if plan.several_sessions { SHARED_DECODE_ROWS } else { DECODE_ROWS };
        if ready.len() <= limit {
            for index in ready {
                self.schedule_completion(plan, index);
            }
            return;
        }
        // The oldest sequences of the shares that have received least.
        let mut groups = self.by_share(ready);
        let mut scheduled = 0;
        while scheduled < limit {
            let Some(mut group) = next_group(&self.shares, &mut groups) else { break };
            match group.get_mut().pop_front() {
                Some(index) => scheduled += usize::from(self.schedule_completion(plan, index)),
                None => {
                    group.remove();
                }
            }
        }
    }

    /// Schedules one row of a sequence and charges it. Returns false if the sequence has no page for
    /// the row.
    fn schedule_completion(&mut self, plan: &mut StepPlan, index: usize) -> bool {
        if plan.preempted[index] || !self.allocate_pages(plan, index, 1) {
            return false;
        }
        plan.rows[index] = 1;
        self.charge(index, 1, self.running[index].computed);
        true
    }

    /// Schedules the sequences with several pending tokens: prompts, and completions that were
    /// preempted. Each share gets one page of rows at a time.
    fn schedule_prompts(&mut self, plan: &mut StepPlan) {
        let beside_completions = plan.rows.iter().any(|rows| *rows > 0);
        let sequence_limit = if beside_completions { CHUNK_ROWS } else { PROMPT_ROWS };
        let limit = if plan.several_sessions { sequence_limit } else { PROMPT_ROWS };
        let mut work_of_sequences = vec![0; self.running.len()];
        let pending = (0..self.running.len()).filter(|index| self.running[*index].pending() > 1);
        let mut groups = self.by_share(pending.collect());
        // Pages that this step computes. A sequence that needs the same page attaches it in the next
        // step, so that a shared prefix is computed once.
        let mut new_pages = HashSet::new();
        let mut work = 0;
        while work < limit {
            let Some(mut group) = next_group(&self.shares, &mut groups) else { break };
            let Some(&index) = group.get().front() else {
                group.remove();
                continue;
            };
            if plan.rows[index] == 0 && !plan.preempted[index] {
                self.extend_prefix(index);
            }
            let sequence = &self.running[index];
            let pending = sequence.pending() - plan.rows[index];
            let first = sequence.computed + plan.rows[index];
            let rows = pending.min(PAGE_POSITIONS - first % PAGE_POSITIONS);
            let is_first = plan.rows[index] == 0;
            let page = if is_first { self.next_page(index) } else { None };
            let other_computes = page.as_ref().is_some_and(|page| new_pages.contains(page));
            if rows == 0
                || plan.preempted[index]
                || work_of_sequences[index] >= sequence_limit
                || other_computes
                || !self.allocate_pages(plan, index, plan.rows[index] + rows)
            {
                group.get_mut().pop_front();
                continue;
            }
            new_pages.extend(page);
            plan.rows[index] += rows;
            let rows_work = self.charge(index, rows, first);
            work_of_sequences[index] += rows_work;
            work += rows_work;
        }
    }

    /// Charges `rows` rows from position `first` on to the share of a sequence. Returns their work
    /// in rows at the first position.
    fn charge(&mut self, index: usize, rows: usize, first: usize) -> usize {
        let work = rows * (ATTENTION_POSITIONS + first) / ATTENTION_POSITIONS;
        self.shares.charge(self.running[index].share, u64::try_from(work).unwrap_or(u64::MAX));
        work
    }

    /// Groups sequences by their share, in the given order.
    fn by_share(&self, sequences: Vec<usize>) -> BTreeMap<ShareId, VecDeque<usize>> {
        let mut groups: BTreeMap<ShareId, VecDeque<usize>> = BTreeMap::new();
        for index in sequences {
            groups.entry(self.running[index].share).or_default().push_back(index);
        }
        groups
    }

    /// Attaches the cached prefix of a sequence that has no pages, for example after preemption.
    fn reattach_prefix(&mut self, index: usize) {
        if !self.running[index].pages.is_empty() {
            return;
        }
        if let Some(max_tokens) = self.max_cached_tokens(index)
            && let Some(request) = self.requests.get(&self.running[index].request)
        {
            let weights = request.weights.id();
            self.running[index].attach_prefix(&mut self.cache, weights, max_tokens);
        }
    }

    /// Attaches the pages that follow the computed tokens of a sequence, if another sequence has
    /// computed them since.
    fn extend_prefix(&mut self, index: usize) {
        if let Some(max_tokens) = self.max_cached_tokens(index) {
            self.running[index].extend_prefix(&mut self.cache, max_tokens);
        }
    }

    /// Returns what identifies the next page of a sequence, if another sequence could share it.
    fn next_page(&self, index: usize) -> Option<PageKey> {
        self.running[index].next_page(self.max_cached_tokens(index)?)
    }

    /// Returns the number of tokens of a sequence that may come from the cache.
    fn max_cached_tokens(&self, index: usize) -> Option<usize> {
        let sequence = &self.running[index];
        let request = self.requests.get(&sequence.request)?;
        Some(match sequence.writer {
            Some(_) => sequence.len() - 1,
            None => request.first_scored_row(),
        })
    }

    /// Allocates pages for `rows` more rows of a sequence, preempting sequences of a lower rank if
    /// necessary. Returns whether all pages could be allocated.
    fn allocate_pages(&mut self, plan: &mut StepPlan, index: usize, rows: usize) -> bool {
        let needed = (self.running[index].computed + rows).div_ceil(PAGE_POSITIONS);
        while self.running[index].pages.len() < needed {
            if let Some(page) = self.cache.allocate() {
                self.running[index].pages.push(page);
                continue;
            }
            let ranks = plan.ranks.get_or_insert_with(|| self.memory_ranks());
            let victim = (0..self.running.len())
                .filter(|other| ranks[*other] > ranks[index])
                .filter(|other| !self.running[*other].pages.is_empty())
                .max_by_key(|other| ranks[*other]);
            let Some(victim) = victim else { return false };
            plan.rows[victim] = 0;
            plan.preempted[victim] = true;
            let sequence = &mut self.running[victim];
            sequence.release_pages(&mut self.cache);
            if let Some(request) = self.requests.get(&sequence.request) {
                sequence.reset(request.weights.id());
            }
        }
        true
    }

    /// Returns the rank of each running sequence for the pages of the KV cache; 0 is the highest.
    ///
    /// A sequence ranks by the pages that the older sequences of its user need, so that users get
    /// equal numbers of pages if there are too few. The sequences of a user are ordered in the same
    /// way by session. The oldest sequence always has the highest rank: it can preempt all others,
    /// so that the sampler makes progress.
    pub(super) fn memory_ranks(&self) -> Vec<usize> {
        let mut needed_by_session: HashMap<ShareId, usize> = HashMap::new();
        let older_of_session: Vec<usize> = self
            .running
            .iter()
            .map(|sequence| {
                let needed = needed_by_session.entry(sequence.share).or_default();
                let older = *needed;
                *needed += sequence.needed_pages();
                older
            })
            .collect();
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        order.sort_by_key(|index| (older_of_session[*index], *index));
        let mut needed_by_user: HashMap<usize, usize> = HashMap::new();
        let mut before_of_user = vec![0; self.running.len()];
        for index in &order {
            let sequence = &self.running[*index];
            let needed = needed_by_user.entry(sequence.share.user()).or_default();
            before_of_user[*index] = *needed;
            *needed += sequence.needed_pages();
        }
        order.sort_by_key(|index| (before_of_user[*index], *index));
        let mut ranks = vec![0; order.len()];
        for (rank, index) in order.into_iter().enumerate() {
            ranks[index] = rank;
        }
        ranks
    }
}

/// Returns the group whose share is next.
fn next_group<'a>(
    shares: &FairShares,
    groups: &'a mut BTreeMap<ShareId, VecDeque<usize>>,
) -> Option<OccupiedEntry<'a, ShareId, VecDeque<usize>>> {
    let next = groups.keys().copied().min_by_key(|share| shares.order(*share))?;
    match groups.entry(next) {
        Entry::Occupied(group) => Some(group),
        Entry::Vacant(_) => None,
    }
}
