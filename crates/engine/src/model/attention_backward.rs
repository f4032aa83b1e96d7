//! Attention's backward pass.

use super::forward::split;
use super::{Model, PackedBatch};
use crate::kernel::{Kernel, Lhs, Panels, Precision, Rhs, row_ops};

/// Rows of queries that are worked on together.
const ROWS: usize = 48;

/// Rotated projections of a batch, what attention gave, and the gradient by it.
pub(super) struct AttentionTensors<'a> {
    pub(super) batch: &'a PackedBatch,
    pub(super) rotated: &'a [f32],
    pub(super) out: &'a [f32],
    pub(super) grad: &'a [f32],
}

/// Rows of one tree, one key-value head: everything its gradient needs, side by side.
struct TreeHead {
    /// Keys and values, one row for each row of the tree.
    keys: Vec<f32>,
    /// The same as panels, node by node.
    key_panels: Vec<Panels>,
    value_panels: Vec<Panels>,
    grad_keys: Vec<f32>,
    grad_values: Vec<f32>,
    /// For every query head of the group.
    grad_queries: Vec<Vec<f32>>,
}

impl Model {
    /// The gradient by the rotated queries and keys, and by the values.
    pub(super) fn attend_backward(&self, mixed: &AttentionTensors<'_>) -> Vec<f32> {
        let heads = self.heads();
        let width = heads.query_width() + 2 * heads.kv_width();
        let tasks = mixed.batch.trees.len() * heads.kv_heads;
        let kernel = self.kernel.alone();
        let done = self.kernel.pool().map(tasks, |task| {
            let (tree, head) = (task / heads.kv_heads, task % heads.kv_heads);
            self.tree_backward(&kernel, mixed, tree, head)
        });
        let mut grad = vec![0.0; mixed.batch.tokens.len() * width];
        let (queries, keys, values) = split(heads.query_width(), heads.kv_width());
        let (group, d) = (heads.group(), heads.head_dim);
        // Which tree every row is of, and where that begins.
        let mut trees = Vec::with_capacity(mixed.batch.tokens.len());
        for (tree, nodes) in mixed.batch.trees.iter().enumerate() {
            let nodes = &mixed.batch.nodes[nodes.clone()];
            let (first, end) = (nodes[0].rows.start, nodes[nodes.len() - 1].rows.end);
            trees.extend((first..end).map(|_| (tree, first)));
        }
        self.kernel.pool().each_row(&mut grad, width, width, |row, grad| {
            let (tree, first) = trees[row];
            let own = (row - first) * d..(row - first + 1) * d;
            for (head, local) in done[tree * heads.kv_heads..][..heads.kv_heads].iter().enumerate()
            {
                let mut put = |col: usize, from: &[f32]| {
                    grad[col..col + d].copy_from_slice(&from[own.clone()]);
                };
                for (g, from) in local.grad_queries.iter().enumerate() {
                    put(queries + (head * group + g) * d, from);
                }
                put(keys + head * d, &local.grad_keys);
                put(values + head * d, &local.grad_values);
            }
        });
        grad
    }

    fn tree_backward(
        &self,
        kernel: &Kernel,
        mixed: &AttentionTensors<'_>,
        tree: usize,
        head: usize,
    ) -> TreeHead {
        let heads = self.heads();
        let (batch, d) = (mixed.batch, heads.head_dim);
        let nodes = batch.trees[tree].clone();
        let first = batch.nodes[nodes.start].rows.start;
        let count = batch.nodes[nodes.end - 1].rows.end - first;
        let width = heads.query_width() + 2 * heads.kv_width();
        let (queries, keys, values) = split(heads.query_width(), heads.kv_width());
        let column = |from: &[f32], stride: usize, col: usize| {
            let mut out = Vec::with_capacity(count * d);
            for row in first..first + count {
                out.extend_from_slice(&from[row * stride + col..][..d]);
            }
            out
        };
        let local_keys = column(mixed.rotated, width, keys + head * d);
        let local_values = column(mixed.rotated, width, values + head * d);
        let panels = |from: &[f32]| -> Vec<Panels> {
            let of = |node: usize| {
                let rows = &batch.nodes[node].rows;
                let from = &from[(rows.start - first) * d..(rows.end - first) * d];
                Panels::from_rows(from, rows.len(), d, Precision::F32)
            };
            nodes.clone().map(of).collect()
        };
        let mut local = TreeHead {
            key_panels: panels(&local_keys),
            value_panels: panels(&local_values),
            grad_keys: vec![0.0; count * d],
            grad_values: vec![0.0; count * d],
            grad_queries: Vec::new(),
            keys: local_keys,
        };
        for g in 0..heads.group() {
            let head = head * heads.group() + g;
            let mut local_queries = column(mixed.rotated, width, queries + head * d);
            row_ops::scale(kernel.isa(), &mut local_queries, heads.scale());
            let out = column(mixed.out, heads.query_width(), head * d);
            let grad = column(mixed.grad, heads.query_width(), head * d);
            let mut grad_queries = vec![0.0; count * d];
            for node in nodes.clone() {
                let rows = batch.nodes[node].rows.clone();
                for start in rows.clone().step_by(ROWS) {
                    let block = start..rows.end.min(start + ROWS);
                    let here = (block.start - first) * d..(block.end - first) * d;
                    let query = QueryBlock {
                        queries: &local_queries[here.clone()],
                        out: &out[here.clone()],
                        grad: &grad[here.clone()],
                        node,
                        nodes: nodes.start,
                        offset: block.start - rows.start,
                    };
                    query.backward(kernel, batch, first, d, &mut local, &mut grad_queries[here]);
                }
            }
            row_ops::scale(kernel.isa(), &mut grad_queries, heads.scale());
            local.grad_queries.push(grad_queries);
        }
        local
    }
}

/// A few rows of queries of one node and one head, scaled.
struct QueryBlock<'a> {
    queries: &'a [f32],
    out: &'a [f32],
    grad: &'a [f32],
    node: usize,
    /// The tree's first node.
    nodes: usize,
    /// Which of the node's rows is the first.
    offset: usize,
}

impl QueryBlock<'_> {
    fn backward(
        &self,
        kernel: &Kernel,
        batch: &PackedBatch,
        first: usize,
        d: usize,
        local: &mut TreeHead,
        grad_queries: &mut [f32],
    ) {
        let isa = kernel.isa();
        let count = self.queries.len() / d;
        let position = batch.nodes[self.node].start + self.offset;
        let context = position + count;
        // Which local rows the context consists of, in order.
        let mut parts = Vec::new();
        let mut seen = 0;
        for node in batch.ancestry(self.node) {
            let rows = &batch.nodes[node].rows;
            let len = rows.len().min(context - seen);
            parts.push((node - self.nodes, rows.start - first, seen, len));
            seen += len;
        }
        let mut p = vec![0.0; count * context];
        let mut ds = vec![0.0; count * context];
        for &(node, _, col, len) in &parts {
            let lhs = Lhs::rows(self.queries, d);
            let rhs = Rhs::packed(&local.key_panels[node]);
            kernel.gemm((count, d, len), lhs, rhs, &mut p[col..], context);
            let lhs = Lhs::rows(self.grad, d);
            let rhs = Rhs::packed(&local.value_panels[node]);
            kernel.gemm((count, d, len), lhs, rhs, &mut ds[col..], context);
        }
        for (i, (p, ds)) in
            p.chunks_exact_mut(context).zip(ds.chunks_exact_mut(context)).enumerate()
        {
            let (p, hidden) = p.split_at_mut(position + i + 1);
            hidden.fill(0.0);
            let max = row_ops::max(isa, p);
            let sum = row_ops::exp_and_sum(isa, p, max);
            row_ops::scale(isa, p, 1.0 / sum);
            let own = i * d..(i + 1) * d;
            let shift = row_ops::dot(isa, &self.out[own.clone()], &self.grad[own]);
            let (ds, hidden) = ds.split_at_mut(position + i + 1);
            hidden.fill(0.0);
            row_ops::softmax_backward(isa, p, ds, shift, 1.0);
        }
        for &(_, row, col, len) in &parts {
            let range = row * d..(row + len) * d;
            let rhs = Rhs::Rows { data: &local.keys[range.clone()], stride: d };
            let lhs = Lhs::rows(&ds[col..], context);
            kernel.gemm_accumulate((count, len, d), lhs, rhs, grad_queries, d);
            let rhs = Rhs::Rows { data: self.queries, stride: d };
            let out = &mut local.grad_keys[range.clone()];
            kernel.gemm_accumulate((len, count, d), Lhs::columns(&ds[col..], context), rhs, out, d);
            let rhs = Rhs::Rows { data: self.grad, stride: d };
            let out = &mut local.grad_values[range];
            kernel.gemm_accumulate((len, count, d), Lhs::columns(&p[col..], context), rhs, out, d);
        }
    }
}
