//! Keys and values in pages, and attention over them.
//!
//! A page holds sixteen positions of every key-value head of a layer. Keys stand as a panel (sixteen
//! positions side by side for each dimension), values as rows, so that both products of attention
//! read pages as they are. Which pages make up a context, and in which order, is said by a list of
//! [`PageRef`]s; where pages are cut changes no bit of the result.

#![expect(
    unsafe_code,
    reason = "tiles take raw addresses; tasks write disjoint parts of one matrix"
)]

use std::cell::RefCell;
use std::ops::Range;

use super::task_pool::SharedMut;
use super::tile::{Prefetch, ROWS, Tile};
use super::{Isa, Kernel, PANEL, row_ops};

/// Positions in a page.
pub(crate) const PAGE_POSITIONS: usize = PANEL;

/// The first `len` positions of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRef {
    pub(crate) page: usize,
    pub(crate) len: usize,
}

/// Consecutive tokens of one sequence: which rows of the batch they are, where they stand, and what
/// they can see.
#[derive(Clone, Debug)]
pub(crate) struct SequenceChunk {
    pub(crate) rows: Range<usize>,
    /// Position of the first row.
    pub(crate) start: usize,
    /// The whole context in order, these tokens included.
    pub(crate) blocks: Vec<PageRef>,
}

/// How heads are laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadLayout {
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl HeadLayout {
    pub(crate) fn query_width(self) -> usize {
        self.query_heads * self.head_dim
    }

    pub(crate) fn kv_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn padded(self) -> usize {
        self.head_dim.next_multiple_of(PANEL)
    }

    /// Keys and values of one head in a page.
    fn head_floats(self) -> usize {
        PAGE_POSITIONS * (self.head_dim + self.padded())
    }

    /// Floats in a page.
    pub(crate) fn page_floats(self) -> usize {
        self.kv_heads * self.head_floats()
    }

    pub(crate) fn group(self) -> usize {
        self.query_heads / self.kv_heads
    }

    #[expect(clippy::cast_precision_loss, reason = "a head is narrower than 2²⁴")]
    pub(crate) fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

#[derive(Default)]
struct AttentionScratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
    out: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = RefCell::default();
}

/// Writes the keys and values of a span to its pages. `keys` and `values` begin with the span's
/// first row; rows are `stride` apart.
pub(crate) fn write_kv(
    heads: HeadLayout,
    span: &SequenceChunk,
    keys: &[f32],
    values: &[f32],
    stride: usize,
    pages: &mut [f32],
) {
    let (width, padded) = (heads.head_dim, heads.padded());
    let end = span.start + span.rows.len();
    let mut first = 0;
    for block in &span.blocks {
        let begin = first;
        first += block.len;
        for position in begin.max(span.start)..(begin + block.len).min(end) {
            let row = (position - span.start) * stride;
            let slot = position - begin;
            let page = &mut pages[block.page * heads.page_floats()..][..heads.page_floats()];
            for (head, page) in page.chunks_exact_mut(heads.head_floats()).enumerate() {
                let (page_keys, page_values) = page.split_at_mut(PAGE_POSITIONS * width);
                let from = row + head * width;
                for (to, key) in
                    page_keys.chunks_exact_mut(PAGE_POSITIONS).zip(&keys[from..from + width])
                {
                    to[slot] = *key;
                }
                page_values[slot * padded..slot * padded + width]
                    .copy_from_slice(&values[from..from + width]);
            }
        }
    }
}

impl Kernel {
    /// Attention of every span's rows over its context. Queries and `out` have one row for each row
    /// of the batch, `query_stride` and [`HeadLayout::query_width`] wide.
    pub(crate) fn attend(
        &self,
        heads: HeadLayout,
        spans: &[SequenceChunk],
        queries: &[f32],
        query_stride: usize,
        pages: &[f32],
        out: &mut [f32],
    ) {
        let mut tasks = Vec::new();
        let mut work = 0;
        for span in spans {
            let context = span.start + span.rows.len();
            // Few rows at a time over a long context: the scores must fit a cache.
            let most = (32_768 / (context * heads.group())).clamp(1, 24);
            for first in span.rows.clone().step_by(most) {
                tasks.push((span, first..span.rows.end.min(first + most)));
            }
            work += span.rows.len() * context * heads.query_width();
        }
        let width = heads.query_width();
        let out = SharedMut::new(out);
        self.pool.each_if_worth(work, tasks.len() * heads.kv_heads, |task| {
            let (span, rows) = &tasks[task / heads.kv_heads];
            let head = task % heads.kv_heads;
            SCRATCH.with_borrow_mut(|scratch| {
                let queries = &queries[rows.start * query_stride..];
                attend_rows(
                    self.isa,
                    heads,
                    span,
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
                    // SAFETY: tasks differ in their rows or in their head, so the parts are disjoint.
                    let out = unsafe { out.part(start, group * heads.head_dim) };
                    for (g, out) in out.chunks_exact_mut(heads.head_dim).enumerate() {
                        let v = i * group + g;
                        let sum = scratch.sums[v];
                        let from = &scratch.out[v * heads.padded()..][..heads.head_dim];
                        for (out, from) in out.iter_mut().zip(from) {
                            *out = from / sum;
                        }
                    }
                }
            });
        });
    }
}

#[expect(clippy::too_many_arguments, reason = "one task of `attend`, whose state it shares")]
fn attend_rows(
    isa: Isa,
    heads: HeadLayout,
    span: &SequenceChunk,
    rows: &Range<usize>,
    head: usize,
    queries: &[f32],
    query_stride: usize,
    pages: &[f32],
    scratch: &mut AttentionScratch,
) {
    let (width, padded, group) = (heads.head_dim, heads.padded(), heads.group());
    let vectors = rows.len() * group;
    let first_position = span.start + rows.start - span.rows.start;
    let context = first_position + rows.len();
    let stride = context.next_multiple_of(PANEL) + PANEL;

    scratch.queries.clear();
    for row in queries.chunks(query_stride).take(rows.len()) {
        let row = &row[head * group * width..(head + 1) * group * width];
        scratch.queries.extend(row.iter().map(|x| x * heads.scale()));
    }
    scratch.scores.resize(scratch.scores.len().max(vectors * stride), 0.0);
    scratch.out.clear();
    scratch.out.resize(vectors * padded, 0.0);
    scratch.sums.clear();

    // Pages lie anywhere, so memory is told which comes next.
    let next_page = |index: usize, part: usize| {
        let block = span.blocks.get(index + 1).unwrap_or(&span.blocks[index]);
        let start = block.page * heads.page_floats() + head * heads.head_floats();
        pages.as_ptr().wrapping_add(start + part)
    };
    // Scores: a page of keys is a panel. A block that is not full leaves numbers behind its end,
    // which the next block or the softmax writes over.
    let mut position = 0;
    for (index, block) in span.blocks.iter().enumerate() {
        if position >= context {
            break;
        }
        let start = block.page * heads.page_floats() + head * heads.head_floats();
        let keys = &pages[start..start + PAGE_POSITIONS * width];
        let next = next_page(index, 0);
        for first in (0..vectors).step_by(ROWS) {
            let count = ROWS.min(vectors - first);
            assert!(position + PANEL <= stride, "scores of one row stay in their row");
            let tile = Tile {
                depth: width,
                a: scratch.queries[first * width..].as_ptr(),
                a_row: width,
                a_step: 1,
                b: keys.as_ptr(),
                b_panel: 0,
                b_step: PANEL,
                next: Prefetch::from(next),
                c: scratch.scores[first * stride + position..].as_mut_ptr(),
                c_row: stride,
                zero_init: true,
            };
            // SAFETY: `count` queries of `width` numbers are there, the page has `width` steps of
            // sixteen keys, and sixteen scores fit each row by the check above. One thread's own.
            unsafe { tile.run(isa, count, 1) };
        }
        position += block.len;
    }

    for (v, scores) in scratch.scores.chunks_exact_mut(stride).take(vectors).enumerate() {
        let seen = first_position + v / group + 1;
        let (seen, unseen) = scores.split_at_mut(seen);
        let max = row_ops::max(isa, seen);
        scratch.sums.push(row_ops::exp_and_sum(isa, seen, max));
        unseen.fill(0.0);
    }

    let mut position = 0;
    for (index, block) in span.blocks.iter().enumerate() {
        if position >= context {
            break;
        }
        let start =
            block.page * heads.page_floats() + head * heads.head_floats() + PAGE_POSITIONS * width;
        let values = &pages[start..start + PAGE_POSITIONS * padded];
        let next = next_page(index, PAGE_POSITIONS * width);
        let depth = block.len.min(context - position);
        for first in (0..vectors).step_by(ROWS) {
            let count = ROWS.min(vectors - first);
            let most = Tile::<f32>::panels(isa, count);
            let mut panel = 0;
            while panel * PANEL < padded {
                let panels = if padded / PANEL - panel >= most { most } else { 1 };
                let tile = Tile {
                    depth,
                    a: scratch.scores[first * stride + position..].as_ptr(),
                    a_row: stride,
                    a_step: 1,
                    b: values[panel * PANEL..].as_ptr(),
                    b_panel: PANEL,
                    b_step: padded,
                    next: Prefetch::from(next.wrapping_add(panel * PANEL * PAGE_POSITIONS)),
                    c: scratch.out[first * padded + panel * PANEL..].as_mut_ptr(),
                    c_row: padded,
                    zero_init: false,
                };
                // SAFETY: `count` rows of scores reach beyond `position + depth`, the page has
                // sixteen rows of `padded` values, `out` as many sums. One thread's own.
                unsafe { tile.run(isa, count, panels) };
                panel += panels;
            }
        }
        position += block.len;
    }
}
