//! Causal grouped-query attention over a paged KV cache.
//!
//! A page holds [`PAGE_POSITIONS`] positions of every key-value head of one layer, in f32. Per head
//! it stores the keys as a panel (for each dimension the sixteen positions side by side), then the
//! values as rows padded to a multiple of 16, so that both matrix products of attention read pages
//! in place. A block table lists the pages of a sequence in order. How a sequence is divided into
//! pages does not change a bit of the result.

#![expect(
    unsafe_code,
    reason = "the micro-kernel takes raw addresses; tasks write disjoint parts of one matrix"
)]

use std::cell::RefCell;
use std::ops::Range;

use super::gemm::fits;
use super::panel_format::F32;
use super::task_pool::SharedMut;
use super::tile::{Prefetch, ROWS, Tile, tile_panels};
use super::{ActivationBuffer, Isa, Kernel, PANEL, row_ops};

/// Positions per page.
pub(crate) const PAGE_POSITIONS: usize = PANEL;

/// Maximum number of scores (rows × group × context) of one task, so that they fit the second-level
/// cache. A task with a single row may exceed it.
const MAX_SCORES_PER_TASK: usize = 32_768;
/// Maximum number of query rows per task.
const MAX_ROWS_PER_TASK: usize = 24;

/// Entry of a block table: the first `len` positions of page `page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRef {
    pub(crate) page: usize,
    pub(crate) len: usize,
}

/// Consecutive tokens of one sequence in a batch, with the context they attend to.
#[derive(Clone, Debug)]
pub(crate) struct SequenceChunk {
    /// Rows of the batch that hold these tokens.
    pub(crate) rows: Range<usize>,
    /// Position of the first row in the sequence.
    pub(crate) start: usize,
    /// Pages of the whole sequence in order, up to and including these tokens.
    pub(crate) block_table: Vec<PageRef>,
}

/// Number and size of the attention heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadLayout {
    pub(crate) query_heads: usize,
    /// Key-value heads; divides `query_heads`.
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl HeadLayout {
    /// Returns the width of all query heads together.
    pub(crate) fn query_width(self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Returns the width of all key heads together. All value heads together have the same width.
    pub(crate) fn kv_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the length of a row of values in a page.
    fn padded_dim(self) -> usize {
        self.head_dim.next_multiple_of(PANEL)
    }

    /// Returns the number of floats of one key-value head in a page.
    fn head_floats(self) -> usize {
        PAGE_POSITIONS * (self.head_dim + self.padded_dim())
    }

    /// Returns the number of floats in a page.
    pub(crate) fn page_floats(self) -> usize {
        self.kv_heads * self.head_floats()
    }

    /// Returns the number of query heads per key-value head.
    pub(crate) fn group(self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Returns the factor `1 / √head_dim` of the attention scores.
    #[expect(clippy::cast_precision_loss, reason = "a head has fewer than 2²⁴ dimensions")]
    pub(crate) fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Buffers of one task. A vector is a pair of a row and a query head of the group.
#[derive(Default)]
struct AttentionScratch {
    /// Scaled queries of each vector.
    queries: Vec<f32>,
    /// Scores of each vector, then their exponentials.
    scores: Vec<f32>,
    /// Softmax denominator of each vector.
    sums: Vec<f32>,
    /// Unnormalized output of each vector.
    out: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = RefCell::default();
}

/// Writes the keys and values of a chunk to its pages.
///
/// `keys` and `values` start at the chunk's first row; rows are `stride` elements apart and
/// [`HeadLayout::kv_width`] wide.
pub(crate) fn write_kv(
    heads: HeadLayout,
    chunk: &SequenceChunk,
    keys: &[f32],
    values: &[f32],
    stride: usize,
    pages: &mut [f32],
) {
    let dim = heads.head_dim;
    let padded = heads.padded_dim();
    let end = chunk.start + chunk.rows.len();
    let mut first = 0;
    for block in &chunk.block_table {
        let begin = first;
        first += block.len;
        for position in begin.max(chunk.start)..(begin + block.len).min(end) {
            let row = (position - chunk.start) * stride;
            let slot = position - begin;
            let page = &mut pages[block.page * heads.page_floats()..][..heads.page_floats()];
            for (head, page) in page.chunks_exact_mut(heads.head_floats()).enumerate() {
                let (page_keys, page_values) = page.split_at_mut(PAGE_POSITIONS * dim);
                let from = row + head * dim;
                for (to, key) in
                    page_keys.chunks_exact_mut(PAGE_POSITIONS).zip(&keys[from..from + dim])
                {
                    to[slot] = *key;
                }
                page_values[slot * padded..slot * padded + dim]
                    .copy_from_slice(&values[from..from + dim]);
            }
        }
    }
}

impl Kernel {
    /// Computes [`attend`](Self::attend) for a batch of `rows` rows and replaces all values of
    /// `out`. Rows that belong to no chunk are zero.
    ///
    /// # Panics
    /// As [`attend`](Self::attend).
    #[expect(clippy::too_many_arguments, reason = "the arguments of `attend` and the rows")]
    pub(crate) fn attend_into(
        &self,
        heads: HeadLayout,
        rows: usize,
        chunks: &[SequenceChunk],
        queries: &[f32],
        query_stride: usize,
        pages: &[f32],
        out: &mut ActivationBuffer,
    ) {
        let width = heads.query_width();
        let write = |out: &mut [f32]| {
            let mut next_row = 0;
            for chunk in chunks.iter().filter(|chunk| !chunk.rows.is_empty()) {
                assert!(chunk.rows.start >= next_row, "rows are not ascending: {:?}", chunk.rows);
                out[next_row * width..chunk.rows.start * width].fill(0.0);
                next_row = chunk.rows.end;
            }
            out[next_row * width..].fill(0.0);
            self.attend(heads, chunks, queries, query_stride, pages, out);
        };
        // SAFETY: rows of a chunk are written by `attend`, which has a task for each pair of row and
        // key-value head that writes the columns of the head's group and reads none. All other rows
        // are filled.
        unsafe { out.overwrite(rows * width, write) }
    }

    /// Computes causal attention of every chunk's rows over its context.
    ///
    /// `queries` has one row per row of the batch, `query_stride` elements apart; `out` has rows of
    /// [`HeadLayout::query_width`] elements. `pages` must already hold the keys and values of the
    /// chunks themselves.
    ///
    /// # Panics
    /// If a slice is too short, a block table names a page that does not exist or does not cover
    /// the chunk's context, or the rows of two chunks overlap or are not ascending.
    pub(crate) fn attend(
        &self,
        heads: HeadLayout,
        chunks: &[SequenceChunk],
        queries: &[f32],
        query_stride: usize,
        pages: &[f32],
        out: &mut [f32],
    ) {
        check(heads, chunks, (queries.len(), query_stride), pages.len(), out.len());
        let mut tasks = Vec::new();
        let mut work = 0;
        for chunk in chunks.iter().filter(|chunk| !chunk.rows.is_empty()) {
            let context = chunk.start + chunk.rows.len();
            let max_rows =
                (MAX_SCORES_PER_TASK / (context * heads.group())).clamp(1, MAX_ROWS_PER_TASK);
            for first in chunk.rows.clone().step_by(max_rows) {
                tasks.push((chunk, first..chunk.rows.end.min(first + max_rows)));
            }
            work += chunk.rows.len() * context * heads.query_width();
        }
        let width = heads.query_width();
        let out = SharedMut::new(out);
        self.pool.for_each_if_large(work, tasks.len() * heads.kv_heads, |task| {
            let (chunk, rows) = &tasks[task / heads.kv_heads];
            let head = task % heads.kv_heads;
            SCRATCH.with_borrow_mut(|scratch| {
                let queries = &queries[rows.start * query_stride..];
                attend_rows(
                    self.isa,
                    heads,
                    chunk,
                    rows,
                    head,
                    queries,
                    query_stride,
                    pages,
                    scratch,
                );
                let group = heads.group();
                for (i, row) in rows.clone().enumerate() {
                    let start = row * width + head * group * heads.head_dim;
                    // SAFETY: two tasks differ in their rows, which `check` proved to be disjoint,
                    // or in their head, so the parts do not overlap.
                    let out = unsafe { out.part(start, group * heads.head_dim) };
                    for (g, out) in out.chunks_exact_mut(heads.head_dim).enumerate() {
                        let v = i * group + g;
                        let sum = scratch.sums[v];
                        let from = &scratch.out[v * heads.padded_dim()..][..heads.head_dim];
                        for (out, from) in out.iter_mut().zip(from) {
                            *out = from / sum;
                        }
                    }
                }
            });
        });
    }
}

/// Panics unless every address that attention reads or writes lies inside its slices and no two
/// chunks share a row. The micro-kernel relies on this and checks nothing.
fn check(
    heads: HeadLayout,
    chunks: &[SequenceChunk],
    (queries_len, query_stride): (usize, usize),
    pages_len: usize,
    out_len: usize,
) {
    assert!(
        heads.head_dim > 0
            && heads.kv_heads > 0
            && heads.group() * heads.kv_heads == heads.query_heads,
        "key-value heads must divide query heads: {heads:?}"
    );
    let width = heads.query_width();
    assert!(query_stride >= width, "queries overlap: {width} wide, {query_stride} apart");
    let page_count = pages_len / heads.page_floats();
    let mut next_row = 0;
    for chunk in chunks.iter().filter(|chunk| !chunk.rows.is_empty()) {
        assert!(chunk.rows.start >= next_row, "rows of two chunks overlap: {:?}", chunk.rows);
        next_row = chunk.rows.end;
        assert!(
            fits(queries_len, (chunk.rows.end, query_stride), (width, 1)),
            "the queries are too short for rows {:?}",
            chunk.rows
        );
        assert!(
            fits(out_len, (chunk.rows.end, width), (width, 1)),
            "the output is too short for rows {:?}",
            chunk.rows
        );
        let mut positions = 0;
        for block in &chunk.block_table {
            assert!(
                block.page < page_count && block.len <= PAGE_POSITIONS,
                "{block:?} is outside of {page_count} pages"
            );
            positions += block.len;
        }
        assert!(
            positions >= chunk.start + chunk.rows.len(),
            "the block table covers {positions} positions, not the {} of its chunk",
            chunk.start + chunk.rows.len()
        );
    }
}

/// Computes one task of [`Kernel::attend`]: some rows of a chunk for one key-value head.
///
/// Leaves the unnormalized outputs in `scratch.out` and the softmax denominators in `scratch.sums`,
/// one for every pair of row and query head of the group.
#[expect(clippy::too_many_arguments, reason = "one task of `attend`, whose state it shares")]
fn attend_rows(
    isa: Isa,
    heads: HeadLayout,
    chunk: &SequenceChunk,
    rows: &Range<usize>,
    head: usize,
    queries: &[f32],
    query_stride: usize,
    pages: &[f32],
    scratch: &mut AttentionScratch,
) {
    let dim = heads.head_dim;
    let padded = heads.padded_dim();
    let group = heads.group();
    let vectors = rows.len() * group;
    let first_position = chunk.start + rows.start - chunk.rows.start;
    let context = first_position + rows.len();
    let stride = context.next_multiple_of(PANEL) + PANEL;

    scratch.queries.clear();
    for row in queries.chunks(query_stride).take(rows.len()) {
        let row = &row[head * group * dim..(head + 1) * group * dim];
        scratch.queries.extend(row.iter().map(|x| x * heads.scale()));
    }
    scratch.scores.resize(scratch.scores.len().max(vectors * stride), 0.0);
    scratch.out.clear();
    scratch.out.resize(vectors * padded, 0.0);
    scratch.sums.clear();

    // Pages are scattered in memory, so the hardware cannot predict the next one.
    let next_page = |index: usize, offset: usize| {
        let table = &chunk.block_table;
        let block = table.get(index + 1).unwrap_or(&table[index]);
        let start = block.page * heads.page_floats() + head * heads.head_floats();
        pages.as_ptr().wrapping_add(start + offset)
    };
    // Scores. The keys of a page are one panel. A partial block leaves stale values behind its end,
    // which the next block or the softmax overwrites.
    let mut position = 0;
    for (index, block) in chunk.block_table.iter().enumerate() {
        if position >= context {
            break;
        }
        let start = block.page * heads.page_floats() + head * heads.head_floats();
        let keys = &pages[start..start + PAGE_POSITIONS * dim];
        let next = next_page(index, 0);
        for first in (0..vectors).step_by(ROWS) {
            let count = ROWS.min(vectors - first);
            let tile = Tile {
                depth: dim,
                a: scratch.queries[first * dim..].as_ptr(),
                a_row: dim,
                a_step: 1,
                b: keys.as_ptr().cast(),
                b_panel: 0,
                b_block: PANEL * size_of::<f32>(),
                prefetch: Prefetch::Lines { start: next.cast(), step: PANEL * size_of::<f32>() },
                c: scratch.scores[first * stride + position..].as_mut_ptr(),
                c_row: stride,
                zero_init: true,
            };
            // SAFETY: `check` proved that every row has its queries, so `scratch.queries` holds
            // `vectors` vectors of `dim` elements, of which `first..first + count` are read. `keys`
            // has `dim` rows of sixteen. `position < context` and `context + PANEL <= stride`, so
            // sixteen scores fit behind `position` in each of the `vectors` rows of `stride`. The
            // scratch buffers belong to this thread.
            unsafe { tile.run::<F32>(isa, count, 1) };
        }
        position += block.len;
    }

    for (v, scores) in scratch.scores.chunks_exact_mut(stride).take(vectors).enumerate() {
        let visible = first_position + v / group + 1;
        let (visible, masked) = scores.split_at_mut(visible);
        let max = row_ops::max(isa, visible);
        scratch.sums.push(row_ops::exp_and_sum(isa, visible, max));
        masked.fill(0.0);
    }

    let mut position = 0;
    for (index, block) in chunk.block_table.iter().enumerate() {
        if position >= context {
            break;
        }
        let start =
            block.page * heads.page_floats() + head * heads.head_floats() + PAGE_POSITIONS * dim;
        let values = &pages[start..start + PAGE_POSITIONS * padded];
        let next = next_page(index, PAGE_POSITIONS * dim);
        let depth = block.len.min(context - position);
        for first in (0..vectors).step_by(ROWS) {
            let count = ROWS.min(vectors - first);
            let max_panels = tile_panels(isa, count, false);
            let mut panel = 0;
            while panel * PANEL < padded {
                let panels = if padded / PANEL - panel >= max_panels { max_panels } else { 1 };
                let tile = Tile {
                    depth,
                    a: scratch.scores[first * stride + position..].as_ptr(),
                    a_row: stride,
                    a_step: 1,
                    b: values[panel * PANEL..].as_ptr().cast(),
                    b_panel: PANEL * size_of::<f32>(),
                    b_block: padded * size_of::<f32>(),
                    prefetch: Prefetch::Lines {
                        start: next.wrapping_add(panel * PANEL * PAGE_POSITIONS).cast(),
                        step: PANEL * size_of::<f32>(),
                    },
                    c: scratch.out[first * padded + panel * PANEL..].as_mut_ptr(),
                    c_row: padded,
                    zero_init: false,
                };
                // SAFETY: `position + depth <= context <= stride`, so the scores of each of the
                // `vectors` rows are inside the buffer. `depth <= PAGE_POSITIONS`, and `values` has
                // that many rows of `padded` elements; `panel + panels <= padded / PANEL`.
                // `scratch.out` has `vectors` rows of `padded` elements. The scratch buffers belong
                // to this thread.
                unsafe { tile.run::<F32>(isa, count, panels) };
                panel += panels;
            }
        }
        position += block.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: HeadLayout = HeadLayout { query_heads: 4, kv_heads: 2, head_dim: 20 };
    const CONTEXT: usize = 45;

    fn noise(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = crate::rng::ChaCha8::new(seed, 0);
        (0..len).map(|_| 2.0 * rng.uniform() - 1.0).collect()
    }

    /// A sequence of [`CONTEXT`] positions whose last `rows` rows are queried, in pages of the
    /// given lengths.
    struct Case {
        queries: Vec<f32>,
        pages: Vec<f32>,
        chunk: SequenceChunk,
    }

    /// Returns a case with one page per element of `lengths`, which is filled to that length.
    fn case(rows: usize, lengths: &[usize]) -> Case {
        assert_eq!(lengths.iter().sum::<usize>(), CONTEXT);
        let keys = keys();
        let values = values();
        // The pages are stored in reverse order, so that using a position as a page number fails.
        let refs = lengths.iter().enumerate();
        let block_table: Vec<PageRef> =
            refs.map(|(i, len)| PageRef { page: lengths.len() - 1 - i, len: *len }).collect();
        let mut pages = vec![f32::NAN; lengths.len() * HEADS.page_floats()];
        let whole = SequenceChunk { rows: 0..CONTEXT, start: 0, block_table };
        write_kv(HEADS, &whole, &keys, &values, HEADS.kv_width(), &mut pages);
        pages.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = 0.0);
        let chunk = SequenceChunk { rows: 0..rows, start: CONTEXT - rows, ..whole };
        Case { queries: noise(rows * HEADS.query_width(), 1), pages, chunk }
    }

    fn keys() -> Vec<f32> {
        noise(CONTEXT * HEADS.kv_width(), 2)
    }

    fn values() -> Vec<f32> {
        noise(CONTEXT * HEADS.kv_width(), 3)
    }

    impl Case {
        fn attend(&self, kernel: &Kernel) -> Vec<f32> {
            let width = HEADS.query_width();
            let mut out = vec![0.0; self.chunk.rows.len() * width];
            let chunks = std::slice::from_ref(&self.chunk);
            kernel.attend(HEADS, chunks, &self.queries, width, &self.pages, &mut out);
            out
        }
    }

    /// Attention by its definition, in f64.
    fn reference(case: &Case) -> Vec<f64> {
        let keys = keys();
        let values = values();
        let dim = HEADS.head_dim;
        let mut out = Vec::new();
        for row in case.chunk.rows.clone() {
            for head in 0..HEADS.query_heads {
                let query = &case.queries[row * HEADS.query_width() + head * dim..][..dim];
                let kv = |position: usize| {
                    let start = position * HEADS.kv_width() + head / HEADS.group() * dim;
                    start..start + dim
                };
                let visible = case.chunk.start + row + 1;
                let weights: Vec<f64> = (0..visible)
                    .map(|position| {
                        let terms = query.iter().zip(&keys[kv(position)]);
                        let score: f64 = terms.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        (score / (dim as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                out.extend((0..dim).map(|d| {
                    let value = |position: usize| f64::from(values[kv(position)][d]);
                    let terms = weights.iter().enumerate().map(|(p, weight)| weight * value(p));
                    terms.sum::<f64>() / total
                }));
            }
        }
        out
    }

    #[test]
    fn every_level_and_every_division_into_pages_gives_the_same_bits() {
        for rows in [1, 7, CONTEXT] {
            let whole = case(rows, &[16, 16, 13]);
            let expected = whole.attend(&Kernel::portable());
            for (got, want) in expected.iter().zip(reference(&whole)) {
                assert!((f64::from(*got) - want).abs() < 1e-5, "{rows} rows: {got} {want}");
            }
            for isa in Isa::available() {
                for threads in [1, 3] {
                    for lengths in [&[16, 16, 13][..], &[5, 16, 8, 16], &[1; CONTEXT]] {
                        let got = case(rows, lengths).attend(&Kernel::with_isa(isa, threads));
                        assert_eq!(got, expected, "{isa:?}, {threads} threads, {lengths:?}");
                    }
                }
            }
        }
    }

    /// Calls `attend` on inputs that `change` has modified.
    fn attend_with(change: impl FnOnce(&mut Case, &mut Vec<f32>)) {
        let mut case = case(7, &[16, 16, 13]);
        let width = HEADS.query_width();
        let mut out = vec![0.0; 7 * width];
        change(&mut case, &mut out);
        let chunks = std::slice::from_ref(&case.chunk);
        Kernel::portable().attend(HEADS, chunks, &case.queries, width, &case.pages, &mut out);
    }

    #[test]
    fn unchanged_inputs_are_accepted() {
        attend_with(|_, _| {});
    }

    #[test]
    #[should_panic(expected = "the queries are too short")]
    fn short_queries_are_refused() {
        attend_with(|case, _| {
            case.queries.pop();
        });
    }

    #[test]
    #[should_panic(expected = "the output is too short")]
    fn a_short_output_is_refused() {
        attend_with(|_, out| {
            out.pop();
        });
    }

    #[test]
    #[should_panic(expected = "is outside of 2 pages")]
    fn short_pages_are_refused() {
        attend_with(|case, _| {
            case.pages.pop();
        });
    }

    #[test]
    #[should_panic(expected = "the block table covers 32 positions")]
    fn a_short_block_table_is_refused() {
        attend_with(|case, _| {
            case.chunk.block_table.pop();
        });
    }

    #[test]
    #[should_panic(expected = "rows of two chunks overlap")]
    fn overlapping_chunks_are_refused() {
        let case = case(7, &[16, 16, 13]);
        let width = HEADS.query_width();
        let chunks = [case.chunk.clone(), case.chunk.clone()];
        let mut out = vec![0.0; 7 * width];
        Kernel::portable().attend(HEADS, &chunks, &case.queries, width, &case.pages, &mut out);
    }
}
