//! [`KvCache`]: paged keys and values with prefix sharing.
//!
//! A full page is *published*: it stays in the cache after its last reference is released, until
//! its memory is needed for another page, and [`KvCache::find_prefix`] finds it by its contents:
//! the weights, all preceding tokens and its own tokens. Map keys are compared in full, so a hash
//! collision cannot return a wrong page.

use std::collections::{BTreeSet, HashMap};

use crate::Result;
use crate::kernel::paged_attention::{HeadLayout, PAGE_POSITIONS};
use crate::memory::reserve;

/// Identifies the contents of a page: its prefix and its own tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PageKey {
    pub(crate) prefix: PagePrefix,
    pub(crate) tokens: [u32; PAGE_POSITIONS],
}

/// Identifies the weights and all tokens before a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PagePrefix {
    /// The page is the first of its sequence. Contains the identifier of the weights.
    Weights(u64),
    /// The page follows another one. Contains the identifier of that page, which is never reused.
    Page(u64),
}

/// Bookkeeping of one page.
#[derive(Clone, Debug, Default)]
struct CachePage {
    ref_count: usize,
    /// Identifier and key, if the page is published.
    published: Option<(u64, PageKey)>,
    /// Value of `KvCache::releases` when the last reference was released.
    released_at: u64,
}

/// Paged KV cache of a model.
#[derive(Debug)]
pub(crate) struct KvCache {
    heads: HeadLayout,
    /// Pages of each layer. Grows up to the reserved capacity.
    data: Vec<Vec<f32>>,
    /// Pages that have been allocated at least once.
    pages: Vec<CachePage>,
    /// Maximum number of pages.
    capacity: usize,
    /// Pages without references that are not published.
    free: Vec<usize>,
    by_key: HashMap<PageKey, usize>,
    /// Published pages without references, as (`released_at`, page): least recently used first.
    evictable: BTreeSet<(u64, usize)>,
    /// Identifier of the page that was published last.
    last_id: u64,
    /// Number of times so far that a published page lost its last reference.
    releases: u64,
}

impl KvCache {
    /// Creates a cache of at most `bytes` bytes. Reserves the address space; the system assigns
    /// physical memory when a page is first used.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system refuses the reservation.
    pub(crate) fn new(heads: HeadLayout, layers: usize, bytes: usize) -> Result<Self> {
        let capacity = bytes / Self::page_bytes(heads, layers).max(1);
        let what = "the KV cache";
        let data = (0..layers).map(|_| reserve(what, capacity * heads.page_floats()));
        Ok(Self {
            heads,
            data: data.collect::<Result<_>>()?,
            pages: Vec::new(),
            capacity,
            free: Vec::new(),
            by_key: HashMap::new(),
            evictable: BTreeSet::new(),
            last_id: 0,
            releases: 0,
        })
    }

    /// Returns the size of one page over all layers, in bytes.
    pub(crate) fn page_bytes(heads: HeadLayout, layers: usize) -> usize {
        heads.page_floats() * layers * 4
    }

    /// Returns the maximum number of pages.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of pages that can be allocated, including those that must be evicted
    /// first.
    pub(crate) fn available(&self) -> usize {
        self.capacity - self.pages.len() + self.free.len() + self.evictable.len()
    }

    /// Returns the pages of one layer.
    pub(crate) fn layer(&mut self, layer: usize) -> &mut [f32] {
        &mut self.data[layer]
    }

    /// Finds the longest prefix of `tokens` that consists of published pages, and retains each of
    /// them. Returns the pages and the prefix of the page that follows them.
    pub(crate) fn find_prefix(&mut self, weights: u64, tokens: &[u32]) -> (Vec<usize>, PagePrefix) {
        let mut prefix = PagePrefix::Weights(weights);
        let mut pages = Vec::new();
        for tokens in tokens.as_chunks::<PAGE_POSITIONS>().0 {
            let Some(&page) = self.by_key.get(&PageKey { prefix, tokens: *tokens }) else {
                break;
            };
            let Some((id, _)) = self.pages[page].published else { break };
            prefix = PagePrefix::Page(id);
            pages.push(page);
        }
        pages.iter().for_each(|page| self.retain(*page));
        (pages, prefix)
    }

    /// Finds a published page and retains it. Returns the page and the prefix of the page that
    /// follows it.
    pub(crate) fn find_page(&mut self, key: &PageKey) -> Option<(usize, PagePrefix)> {
        let page = *self.by_key.get(key)?;
        let (id, _) = self.pages[page].published.as_ref()?;
        let next = PagePrefix::Page(*id);
        self.retain(page);
        Some((page, next))
    }

    /// Adds a reference to a page.
    pub(crate) fn retain(&mut self, page: usize) {
        let entry = &mut self.pages[page];
        if entry.ref_count == 0 {
            self.evictable.remove(&(entry.released_at, page));
        }
        entry.ref_count += 1;
    }

    /// Allocates a page with one reference, evicting the least recently used published page if
    /// necessary. Returns `None` if all pages have references.
    pub(crate) fn allocate(&mut self) -> Option<usize> {
        let page = match self.free.pop() {
            Some(page) => page,
            None if self.pages.len() < self.capacity => self.allocate_new(),
            None => {
                let (_, page) = self.evictable.pop_first()?;
                if let Some((_, key)) = self.pages[page].published.take() {
                    self.by_key.remove(&key);
                }
                page
            }
        };
        self.pages[page] = CachePage { ref_count: 1, published: None, released_at: 0 };
        Some(page)
    }

    /// Returns a page that has never been allocated.
    fn allocate_new(&mut self) -> usize {
        self.pages.push(CachePage::default());
        let len = self.pages.len() * self.heads.page_floats();
        // The capacity was reserved, so the buffers do not move.
        self.data.iter_mut().for_each(|data| data.resize(len, 0.0));
        self.pages.len() - 1
    }

    /// Allocates a page with one reference and copies the contents of page `from` to it. Returns
    /// `None` if no page is available.
    pub(crate) fn allocate_copy(&mut self, from: usize) -> Option<usize> {
        let page = self.allocate()?;
        let len = self.heads.page_floats();
        for data in &mut self.data {
            data.copy_within(from * len..(from + 1) * len, page * len);
        }
        Some(page)
    }

    /// Publishes a full page. Returns the prefix of the page that follows it. If an equal page is
    /// already published, `page` stays unpublished and the result refers to the equal one.
    pub(crate) fn publish(
        &mut self,
        page: usize,
        prefix: PagePrefix,
        tokens: [u32; PAGE_POSITIONS],
    ) -> PagePrefix {
        let key = PageKey { prefix, tokens };
        if let Some(other) = self.by_key.get(&key)
            && let Some((id, _)) = &self.pages[*other].published
        {
            return PagePrefix::Page(*id);
        }
        self.last_id += 1;
        self.pages[page].published = Some((self.last_id, key.clone()));
        self.by_key.insert(key, page);
        PagePrefix::Page(self.last_id)
    }

    /// Removes a reference from a page. Published pages are evicted in the order in which they lose
    /// their last reference, so callers release the last page of a sequence first: without the
    /// pages before it, a page cannot be found.
    pub(crate) fn release(&mut self, page: usize) {
        let entry = &mut self.pages[page];
        entry.ref_count -= 1;
        if entry.ref_count == 0 {
            if entry.published.is_some() {
                self.releases += 1;
                entry.released_at = self.releases;
                self.evictable.insert((entry.released_at, page));
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
    fn a_cache_larger_than_memory_is_an_error() {
        let heads = HeadLayout { query_heads: 1, kv_heads: 1, head_dim: 2 };
        for bytes in [usize::MAX, 1 << 60] {
            let error = KvCache::new(heads, 3, bytes).unwrap_err();
            assert!(matches!(error, crate::Error::OutOfMemory { .. }), "{error}");
        }
        assert_eq!(KvCache::new(heads, 3, 0).unwrap().capacity(), 0);
    }

    #[test]
    fn published_pages_are_found_until_they_are_evicted() {
        let mut cache = cache(3);
        let tokens: Vec<u32> = (0..40).collect();
        let first = cache.allocate().unwrap();
        let second = cache.allocate().unwrap();
        let prefix = cache.publish(first, PagePrefix::Weights(7), tokens[..16].try_into().unwrap());
        cache.publish(second, prefix, tokens[16..32].try_into().unwrap());
        assert!(cache.find_prefix(8, &tokens).0.is_empty(), "other weights, other pages");
        for page in [second, first] {
            cache.release(page);
        }
        assert_eq!(cache.find_prefix(7, &tokens).0, [first, second]);
        for page in [second, first] {
            cache.release(page);
        }
        assert_eq!(cache.available(), 3);
        let a = cache.allocate().unwrap();
        let b = cache.allocate().unwrap();
        assert_eq!(
            cache.find_prefix(7, &tokens).0,
            [first],
            "the end of a prefix is evicted first"
        );
        assert_eq!(cache.allocate(), None, "all three are in use");
        cache.release(a);
        cache.release(b);
        cache.release(first);
        assert_eq!(cache.available(), 3);
    }

    #[test]
    fn equal_pages_are_published_once() {
        let mut cache = cache(2);
        let a = cache.allocate().unwrap();
        let b = cache.allocate().unwrap();
        let prefix = cache.publish(a, PagePrefix::Weights(1), [5; 16]);
        assert_eq!(cache.publish(b, PagePrefix::Weights(1), [5; 16]), prefix);
        cache.release(b);
        cache.release(a);
        assert_eq!(cache.available(), 2);
        assert_eq!(cache.find_prefix(1, &[5; 16]).0, [a]);
    }
}
