//! [`RunningSequence`]: a token sequence with its pages in the KV cache.

use std::sync::Arc;

use tinkex_fairness::ShareId;

use super::kv_cache::{KvCache, PageKey, PagePrefix};
use super::request::SampleRequestId;
use super::state::{ActiveRequest, CompletionWriter};
use crate::kernel::paged_attention::{PAGE_POSITIONS, PageRef, SequenceChunk};

/// A prompt, or a prompt with one completion, and the part of it that is computed.
#[derive(Debug)]
pub(super) struct RunningSequence {
    pub(super) request: SampleRequestId,
    /// Share of the request.
    pub(super) share: ShareId,
    /// The prompt, which all sequences of a request share. The sampled tokens that follow it are in
    /// `writer`.
    prompt: Arc<[u32]>,
    /// Samples the completion. `None` while the prompt is computed; then the sequence is forked
    /// into one sequence per completion.
    pub(super) writer: Option<Box<CompletionWriter>>,
    pub(super) pages: Vec<usize>,
    /// Number of tokens whose keys and values are in pages.
    pub(super) computed: usize,
    /// Number of pages that are published in the cache.
    published: usize,
    /// Prefix of the first page that is not published.
    prefix: PagePrefix,
    /// Whether the completion is finished, so that the sequence can be removed.
    pub(super) finished: bool,
}

impl RunningSequence {
    /// Creates the sequence of a request's prompt.
    pub(super) fn prompt(id: SampleRequestId, request: &ActiveRequest) -> Self {
        Self {
            request: id,
            share: request.share,
            prompt: Arc::clone(&request.prompt),
            writer: None,
            pages: Vec::new(),
            computed: 0,
            published: 0,
            prefix: PagePrefix::Weights(request.weights.id()),
            finished: false,
        }
    }

    fn sampled(&self) -> &[u32] {
        self.writer.as_ref().map_or(&[], |writer| writer.tokens())
    }

    /// Returns the number of tokens: the prompt and the sampled ones.
    pub(super) fn len(&self) -> usize {
        self.prompt.len() + self.sampled().len()
    }

    /// Returns the token at position `at`.
    fn token(&self, at: usize) -> u32 {
        match at.checked_sub(self.prompt.len()) {
            None => self.prompt[at],
            Some(at) => self.sampled()[at],
        }
    }

    /// Appends the next `rows` tokens that are not computed yet to `tokens`.
    pub(super) fn append_next_tokens(&self, rows: usize, tokens: &mut Vec<u32>) {
        tokens.extend((self.computed..self.computed + rows).map(|at| self.token(at)));
    }

    /// Returns the number of tokens that are not computed yet.
    pub(super) fn pending(&self) -> usize {
        self.len() - self.computed
    }

    /// Attaches the cached pages of the first `max_tokens` tokens. Returns the number of tokens
    /// that they cover.
    pub(super) fn attach_prefix(
        &mut self,
        cache: &mut KvCache,
        weights: u64,
        max_tokens: usize,
    ) -> usize {
        let count = max_tokens.min(self.len());
        let (pages, prefix) = match self.prompt.get(..count) {
            Some(tokens) => cache.find_prefix(weights, tokens),
            None => {
                let tokens: Vec<u32> = (0..count).map(|at| self.token(at)).collect();
                cache.find_prefix(weights, &tokens)
            }
        };
        self.computed = pages.len() * PAGE_POSITIONS;
        self.published = pages.len();
        self.pages = pages;
        self.prefix = prefix;
        self.computed
    }

    /// Returns the key of the next page, if its tokens are known, none of them is computed, and the
    /// page is within the first `max_tokens` tokens.
    pub(super) fn next_page(&self, max_tokens: usize) -> Option<PageKey> {
        let first = self.computed;
        let is_next =
            first == self.published * PAGE_POSITIONS && first == self.pages.len() * PAGE_POSITIONS;
        let fits = first + PAGE_POSITIONS <= max_tokens.min(self.len());
        (is_next && fits).then(|| PageKey {
            prefix: self.prefix,
            tokens: std::array::from_fn(|i| self.token(first + i)),
        })
    }

    /// Attaches the cached pages that follow the computed tokens, within the first `max_tokens`
    /// tokens.
    pub(super) fn extend_prefix(&mut self, cache: &mut KvCache, max_tokens: usize) {
        while let Some(key) = self.next_page(max_tokens)
            && let Some((page, prefix)) = cache.find_page(&key)
        {
            self.pages.push(page);
            self.prefix = prefix;
            self.published += 1;
            self.computed += PAGE_POSITIONS;
        }
    }

    /// Returns the number of pages that the sequence needs, of which it may have none. The pages of
    /// a prompt count for the first of its completions.
    pub(super) fn needed_pages(&self) -> usize {
        let is_fork = self.writer.as_ref().is_some_and(|writer| writer.sample() > 0);
        let shared = if is_fork { self.prompt.len() / PAGE_POSITIONS } else { 0 };
        self.len().div_ceil(PAGE_POSITIONS) - shared
    }

    /// Returns the next `rows` tokens as a chunk that starts at row `first` of a batch.
    pub(super) fn next_chunk(&self, first: usize, rows: usize) -> SequenceChunk {
        let end = self.computed + rows;
        let block_table = self.pages[..end.div_ceil(PAGE_POSITIONS)]
            .iter()
            .enumerate()
            .map(|(i, page)| PageRef {
                page: *page,
                len: PAGE_POSITIONS.min(end - i * PAGE_POSITIONS),
            })
            .collect();
        SequenceChunk { rows: first..first + rows, start: self.computed, block_table }
    }

    /// Marks `rows` more rows as computed and publishes the pages that became full.
    pub(super) fn advance(&mut self, cache: &mut KvCache, rows: usize) {
        self.computed += rows;
        while (self.published + 1) * PAGE_POSITIONS <= self.computed {
            let first = self.published * PAGE_POSITIONS;
            let tokens = std::array::from_fn(|i| self.token(first + i));
            self.prefix = cache.publish(self.pages[self.published], self.prefix, tokens);
            self.published += 1;
        }
    }

    /// Creates another sequence of the same prompt that shares the full pages. The partial last
    /// page is copied; if no page is available for the copy, its tokens are computed again.
    pub(super) fn fork(&self, cache: &mut KvCache, writer: Box<CompletionWriter>) -> Self {
        let full = self.computed / PAGE_POSITIONS;
        let mut pages: Vec<usize> = self.pages[..full].to_vec();
        pages.iter().for_each(|page| cache.retain(*page));
        let mut computed = full * PAGE_POSITIONS;
        if computed < self.computed
            && let Some(page) = cache.allocate_copy(self.pages[full])
        {
            pages.push(page);
            computed = self.computed;
        }
        Self {
            request: self.request,
            share: self.share,
            prompt: Arc::clone(&self.prompt),
            writer: Some(writer),
            pages,
            computed,
            published: self.published,
            prefix: self.prefix,
            finished: false,
        }
    }

    /// Releases all pages.
    pub(super) fn release_pages(&mut self, cache: &mut KvCache) {
        // Release the last page first: pages are evicted in the order of their release, and a page
        // cannot be found without the pages before it.
        for page in self.pages.drain(..).rev() {
            cache.release(page);
        }
    }

    /// Marks all tokens as not computed, after [`release_pages`](Self::release_pages).
    pub(super) fn reset(&mut self, weights: u64) {
        self.computed = 0;
        self.published = 0;
        self.prefix = PagePrefix::Weights(weights);
    }
}
