//! [`KvCache`]: pages of keys and values, shared where sequences begin alike.
//!
//! A page that is full and whose tokens are known stays after its last user is gone, until its
//! room is needed. Pages are found again by what they hold (weights, everything before, and their
//! own tokens), compared in full: a hash alone never decides.

use std::collections::{BTreeSet, HashMap};

use crate::Result;
use crate::kernel::paged_attention::{HeadLayout, PAGE_POSITIONS};
use crate::memory::reserve;

/// What a page holds: the page before it (or the weights, for a first one) and its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PageKey {
    before: PagePrefix,
    tokens: [u32; PAGE_POSITIONS],
}

/// What stands before a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PagePrefix {
    /// Nothing: it is a first page, computed with these weights.
    SamplingWeights(u64),
    /// A page, by a number that no other page ever has.
    Page(u64),
}

#[derive(Clone, Debug, Default)]
struct CachePage {
    users: usize,
    /// Its number and key once it can be found.
    known: Option<(u64, PageKey)>,
    used: u64,
}

/// All pages of a model.
#[derive(Debug)]
pub(crate) struct KvCache {
    heads: HeadLayout,
    /// One layer after the other; as long as the pages that were ever in use.
    data: Vec<Vec<f32>>,
    /// Those that were ever in use.
    pages: Vec<CachePage>,
    /// How many there may be.
    count: usize,
    /// Pages that were in use and are not.
    free: Vec<usize>,
    found: HashMap<PageKey, usize>,
    /// Pages without users that can still be found, least recently used first.
    idle: BTreeSet<(u64, usize)>,
    numbers: u64,
    clock: u64,
}

impl KvCache {
    /// At most `bytes` of memory: promised by the system now, taken as pages come into use.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system does not have them.
    pub(crate) fn new(heads: HeadLayout, layers: usize, bytes: usize) -> Result<Self> {
        let count = bytes / Self::page_bytes(heads, layers).max(1);
        let what = "the cache of keys and values";
        let data = (0..layers).map(|_| reserve(what, count * heads.page_floats()));
        Ok(Self {
            heads,
            data: data.collect::<Result<_>>()?,
            pages: Vec::new(),
            count,
            free: Vec::new(),
            found: HashMap::new(),
            idle: BTreeSet::new(),
            numbers: 0,
            clock: 0,
        })
    }

    /// Memory that one page takes.
    pub(crate) fn page_bytes(heads: HeadLayout, layers: usize) -> usize {
        heads.page_floats() * layers * 4
    }

    /// How many pages there are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// How many could be had.
    pub(crate) fn available(&self) -> usize {
        self.count - self.pages.len() + self.free.len() + self.idle.len()
    }

    /// One layer's pages.
    pub(crate) fn layer(&mut self, layer: usize) -> &mut [f32] {
        &mut self.data[layer]
    }

    /// The longest run of known pages that `tokens` begin with; the caller becomes a user of each.
    pub(crate) fn find(&mut self, weights: u64, tokens: &[u32]) -> (Vec<usize>, PagePrefix) {
        let mut link = PagePrefix::SamplingWeights(weights);
        let mut pages = Vec::new();
        for tokens in tokens.as_chunks::<PAGE_POSITIONS>().0 {
            let Some(&page) = self.found.get(&PageKey { before: link, tokens: *tokens }) else {
                break;
            };
            let Some((number, _)) = self.pages[page].known else { break };
            link = PagePrefix::Page(number);
            pages.push(page);
        }
        // The first page is touched last, so that a run is given up from its end.
        for page in pages.iter().rev() {
            self.share(*page);
        }
        (pages, link)
    }

    /// One more user of a page.
    pub(crate) fn share(&mut self, page: usize) {
        self.clock += 1;
        let entry = &mut self.pages[page];
        if entry.users == 0 {
            self.idle.remove(&(entry.used, page));
        }
        entry.users += 1;
        entry.used = self.clock;
    }

    /// A page for one user, if there is one.
    pub(crate) fn take(&mut self) -> Option<usize> {
        let page = match self.free.pop() {
            Some(page) => page,
            None if self.pages.len() < self.count => self.grow(),
            None => {
                let (_, page) = self.idle.pop_first()?;
                if let Some((_, key)) = self.pages[page].known.take() {
                    self.found.remove(&key);
                }
                page
            }
        };
        self.clock += 1;
        self.pages[page] = CachePage { users: 1, known: None, used: self.clock };
        Some(page)
    }

    /// A page that was never in use.
    fn grow(&mut self) -> usize {
        self.pages.push(CachePage::default());
        let len = self.pages.len() * self.heads.page_floats();
        // Room was reserved for all of them, so nothing moves.
        self.data.iter_mut().for_each(|data| data.resize(len, 0.0));
        self.pages.len() - 1
    }

    /// A page for one user that begins as a copy of `from`.
    pub(crate) fn copy(&mut self, from: usize) -> Option<usize> {
        let page = self.take()?;
        let len = self.heads.page_floats();
        for data in &mut self.data {
            data.copy_within(from * len..(from + 1) * len, page * len);
        }
        Some(page)
    }

    /// Lets others find a page that is full now. Returns what stands before the next page.
    pub(crate) fn publish(
        &mut self,
        page: usize,
        before: PagePrefix,
        tokens: [u32; PAGE_POSITIONS],
    ) -> PagePrefix {
        let key = PageKey { before, tokens };
        if let Some(other) = self.found.get(&key)
            && let Some((number, _)) = &self.pages[*other].known
        {
            return PagePrefix::Page(*number);
        }
        self.numbers += 1;
        self.pages[page].known = Some((self.numbers, key.clone()));
        self.found.insert(key, page);
        PagePrefix::Page(self.numbers)
    }

    /// One user less.
    pub(crate) fn release(&mut self, page: usize) {
        let entry = &mut self.pages[page];
        entry.users -= 1;
        if entry.users == 0 {
            if entry.known.is_some() {
                self.idle.insert((entry.used, page));
            } else {
                self.free.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(pages: usize) -> KvCache {
        let heads = HeadLayout { query_heads: 1, kv_heads: 1, head_dim: 2 };
        KvCache::new(heads, 1, pages * KvCache::page_bytes(heads, 1)).unwrap()
    }

    #[test]
    fn a_cache_that_the_system_cannot_give_is_an_error() {
        let heads = HeadLayout { query_heads: 1, kv_heads: 1, head_dim: 2 };
        for bytes in [usize::MAX, 1 << 60] {
            let error = KvCache::new(heads, 3, bytes).unwrap_err();
            assert!(matches!(error, crate::Error::OutOfMemory { .. }), "{error}");
        }
        assert_eq!(KvCache::new(heads, 3, 0).unwrap().count(), 0);
    }

    #[test]
    fn what_was_published_is_found_until_its_room_is_needed() {
        let mut cache = cache(3);
        let tokens: Vec<u32> = (0..40).collect();
        let (first, second) = (cache.take().unwrap(), cache.take().unwrap());
        let link =
            cache.publish(first, PagePrefix::SamplingWeights(7), tokens[..16].try_into().unwrap());
        cache.publish(second, link, tokens[16..32].try_into().unwrap());
        assert!(cache.find(8, &tokens).0.is_empty(), "other weights, other pages");
        assert_eq!(cache.find(7, &tokens).0, [first, second]);
        for page in [first, second, first, second] {
            cache.release(page);
        }
        assert_eq!(cache.available(), 3);
        let (a, b) = (cache.take().unwrap(), cache.take().unwrap());
        assert_eq!(cache.find(7, &tokens).0, [first], "the end of a run goes first");
        assert_eq!(cache.take(), None, "all three are in use");
        cache.release(a);
        cache.release(b);
        cache.release(first);
        assert_eq!(cache.available(), 3);
    }

    #[test]
    fn the_same_page_twice_is_published_once() {
        let mut cache = cache(2);
        let (a, b) = (cache.take().unwrap(), cache.take().unwrap());
        let link = cache.publish(a, PagePrefix::SamplingWeights(1), [5; 16]);
        assert_eq!(cache.publish(b, PagePrefix::SamplingWeights(1), [5; 16]), link);
        cache.release(b);
        cache.release(a);
        assert_eq!(cache.available(), 2);
        assert_eq!(cache.find(1, &[5; 16]).0, [a]);
    }
}
