//! [`RunningSequence`]: one line of tokens with its pages.

use super::kv_cache::{KvCache, PagePrefix};
use super::request::SampleRequestId;
use super::state::{ActiveRequest, CompletionWriter};
use crate::kernel::paged_attention::{PAGE_POSITIONS, PageRef, SequenceChunk};

/// Tokens, how many of them are computed, and where.
#[derive(Debug)]
pub(super) struct RunningSequence {
    pub(super) request: SampleRequestId,
    /// The prompt, and what was written after it.
    pub(super) tokens: Vec<u32>,
    /// `None` until the prompt is computed: then it splits up into the samples.
    pub(super) writer: Option<Box<CompletionWriter>>,
    pub(super) pages: Vec<usize>,
    /// Tokens whose keys and values are in pages.
    pub(super) computed: usize,
    /// Pages that others can find, and what stands before the next.
    published: usize,
    link: PagePrefix,
}

impl RunningSequence {
    /// The prompt of a request.
    pub(super) fn prompt(id: SampleRequestId, request: &ActiveRequest) -> Self {
        Self {
            request: id,
            tokens: request.asked.prompt.clone(),
            writer: None,
            pages: Vec::new(),
            computed: 0,
            published: 0,
            link: PagePrefix::SamplingWeights(request.weights.id()),
        }
    }

    /// Tokens that are not computed yet.
    pub(super) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Takes over what the cache has of the first `most` tokens. Returns how many that was.
    pub(super) fn find(&mut self, cache: &mut KvCache, weights: u64, most: usize) -> usize {
        let (pages, link) = cache.find(weights, &self.tokens[..most.min(self.tokens.len())]);
        self.computed = pages.len() * PAGE_POSITIONS;
        self.published = pages.len();
        (self.pages, self.link) = (pages, link);
        self.computed
    }

    /// Where the next `rows` rows stand, as rows `first` and on of a batch.
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

    /// Notes that `rows` more rows are computed, and lets others find pages that are full.
    pub(super) fn advance(&mut self, cache: &mut KvCache, rows: usize) {
        self.computed += rows;
        for tokens in self.tokens[self.published * PAGE_POSITIONS..self.computed]
            .as_chunks::<PAGE_POSITIONS>()
            .0
        {
            self.link = cache.publish(self.pages[self.published], self.link, *tokens);
            self.published += 1;
        }
    }

    /// Another sequence with the same tokens so far; full pages are shared. `None` if there is no
    /// page for a copy of the last one, which is then computed again.
    pub(super) fn split(&self, cache: &mut KvCache, writer: Box<CompletionWriter>) -> Self {
        let full = self.computed / PAGE_POSITIONS;
        let mut pages: Vec<usize> = self.pages[..full].to_vec();
        pages.iter().for_each(|page| cache.share(*page));
        let mut computed = full * PAGE_POSITIONS;
        if computed < self.computed
            && let Some(page) = cache.copy(self.pages[full])
        {
            pages.push(page);
            computed = self.computed;
        }
        Self {
            request: self.request,
            tokens: self.tokens.clone(),
            writer: Some(writer),
            pages,
            computed,
            published: self.published,
            link: self.link,
        }
    }

    /// Gives its pages back.
    pub(super) fn give_up(&mut self, cache: &mut KvCache) {
        // The last page first, so that a beginning survives longer than what follows.
        for page in self.pages.drain(..).rev() {
            cache.release(page);
        }
    }

    /// Begins anew after [`give_up`](Self::give_up).
    pub(super) fn restart(&mut self, weights: u64) {
        self.computed = 0;
        self.published = 0;
        self.link = PagePrefix::SamplingWeights(weights);
    }
}
