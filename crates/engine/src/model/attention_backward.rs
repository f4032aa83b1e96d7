//! Backward pass of attention.
//!
//! Tasks are pairs of a prefix tree and a key-value head. Within a task all sums run in a fixed
//! order: query heads, nodes, blocks of query rows.

use super::forward::qkv_offsets;
use super::{Model, PackedBatch};
use crate::kernel::{Kernel, Lhs, Panels, Precision, Rhs, row_ops};

/// Query rows per block.
const ROWS: usize = 48;

/// Forward values of attention and the gradient with respect to its output, one row per token.
pub(super) struct AttentionTensors<'a> {
    pub(super) batch: &'a PackedBatch,
    /// Queries, keys and values after QK norm and rotation.
    pub(super) rotated: &'a [f32],
    /// Output of attention.
    pub(super) out: &'a [f32],
    /// Gradient with respect to `out`.
    pub(super) grad: &'a [f32],
}

/// Keys, values and gradients of one key-value head for the rows of one tree.
struct TreeHead {
    /// Keys, `rows × head_dim`.
    keys: Vec<f32>,
    /// Packed keys of each node.
    key_panels: Vec<Panels>,
    /// Packed values of each node.
    value_panels: Vec<Panels>,
    grad_keys: Vec<f32>,
    grad_values: Vec<f32>,
    /// Gradient of the queries of each query head of the group.
    grad_queries: Vec<Vec<f32>>,
}

impl Model {
    /// Returns the gradient with respect to the rotated queries and keys and to the values, in the
    /// layout of the projected rows.
    pub(super) fn attend_backward(&self, tensors: &AttentionTensors<'_>) -> Vec<f32> {
        let heads = self.heads();
        let width = heads.query_width() + 2 * heads.kv_width();
        let tasks = tensors.batch.trees.len() * heads.kv_heads;
        let kernel = self.kernel.single_threaded();
        let tree_heads = self.kernel.pool().map(tasks, |task| {
            let (tree, head) = (task / heads.kv_heads, task % heads.kv_heads);
            self.tree_backward(&kernel, tensors, tree, head)
        });
        let mut grad = vec![0.0; tensors.batch.tokens.len() * width];
        let (queries, keys, values) = qkv_offsets(heads.query_width(), heads.kv_width());
        let (group, d) = (heads.group(), heads.head_dim);
        // The tree of every row, and the tree's first row.
        let mut trees = Vec::with_capacity(tensors.batch.tokens.len());
        for (tree, nodes) in tensors.batch.trees.iter().enumerate() {
            let nodes = &tensors.batch.nodes[nodes.clone()];
            let (first, end) = (nodes[0].rows.start, nodes[nodes.len() - 1].rows.end);
            trees.extend((first..end).map(|_| (tree, first)));
        }
        self.kernel.pool().for_each_row(&mut grad, width, width, |row, grad| {
            let (tree, first) = trees[row];
            let own = (row - first) * d..(row - first + 1) * d;
            for (head, tree_head) in
                tree_heads[tree * heads.kv_heads..][..heads.kv_heads].iter().enumerate()
            {
                let mut put = |col: usize, from: &[f32]| {
                    grad[col..col + d].copy_from_slice(&from[own.clone()]);
                };
                for (g, from) in tree_head.grad_queries.iter().enumerate() {
                    put(queries + (head * group + g) * d, from);
                }
                put(keys + head * d, &tree_head.grad_keys);
                put(values + head * d, &tree_head.grad_values);
            }
        });
        grad
    }

    /// Computes one task: the backward pass of key-value head `head` for the rows of `tree`.
    fn tree_backward(
        &self,
        kernel: &Kernel,
        tensors: &AttentionTensors<'_>,
        tree: usize,
        head: usize,
    ) -> TreeHead {
        let heads = self.heads();
        let (batch, d) = (tensors.batch, heads.head_dim);
        let nodes = batch.trees[tree].clone();
        let first = batch.nodes[nodes.start].rows.start;
        let count = batch.nodes[nodes.end - 1].rows.end - first;
        let width = heads.query_width() + 2 * heads.kv_width();
        let (queries, keys, values) = qkv_offsets(heads.query_width(), heads.kv_width());
        let column = |from: &[f32], stride: usize, col: usize| {
            let mut out = Vec::with_capacity(count * d);
            for row in first..first + count {
                out.extend_from_slice(&from[row * stride + col..][..d]);
            }
            out
        };
        let head_keys = column(tensors.rotated, width, keys + head * d);
        let head_values = column(tensors.rotated, width, values + head * d);
        let panels = |from: &[f32]| -> Vec<Panels> {
            let pack = |node: usize| {
                let rows = &batch.nodes[node].rows;
                let from = &from[(rows.start - first) * d..(rows.end - first) * d];
                Panels::from_rows(from, rows.len(), d, Precision::F32)
            };
            nodes.clone().map(pack).collect()
        };
        let mut tree_head = TreeHead {
            key_panels: panels(&head_keys),
            value_panels: panels(&head_values),
            grad_keys: vec![0.0; count * d],
            grad_values: vec![0.0; count * d],
            grad_queries: Vec::new(),
            keys: head_keys,
        };
        for g in 0..heads.group() {
            let head = head * heads.group() + g;
            let mut head_queries = column(tensors.rotated, width, queries + head * d);
            row_ops::scale(kernel.isa(), &mut head_queries, heads.scale());
            let out = column(tensors.out, heads.query_width(), head * d);
            let grad = column(tensors.grad, heads.query_width(), head * d);
            let mut grad_queries = vec![0.0; count * d];
            for node in nodes.clone() {
                let rows = batch.nodes[node].rows.clone();
                for start in rows.clone().step_by(ROWS) {
                    let block = start..rows.end.min(start + ROWS);
                    let here = (block.start - first) * d..(block.end - first) * d;
                    let query = QueryBlock {
                        queries: &head_queries[here.clone()],
                        out: &out[here.clone()],
                        grad: &grad[here.clone()],
                        node,
                        first_node: nodes.start,
                        offset: block.start - rows.start,
                    };
                    query.backward(
                        kernel,
                        batch,
                        first,
                        d,
                        &mut tree_head,
                        &mut grad_queries[here],
                    );
                }
            }
            row_ops::scale(kernel.isa(), &mut grad_queries, heads.scale());
            tree_head.grad_queries.push(grad_queries);
        }
        tree_head
    }
}

/// A block of query rows of one node and one query head.
struct QueryBlock<'a> {
    /// Queries, multiplied by the attention scale.
    queries: &'a [f32],
    /// Output of attention.
    out: &'a [f32],
    /// Gradient with respect to `out`.
    grad: &'a [f32],
    node: usize,
    /// First node of the tree.
    first_node: usize,
    /// First row of the block within the node.
    offset: usize,
}

impl QueryBlock<'_> {
    /// Adds to the gradients of the queries of this block and of the keys and values of its
    /// context. `first` is the first row of the tree, `d` the dimension of a head.
    fn backward(
        &self,
        kernel: &Kernel,
        batch: &PackedBatch,
        first: usize,
        d: usize,
        tree_head: &mut TreeHead,
        grad_queries: &mut [f32],
    ) {
        let isa = kernel.isa();
        let count = self.queries.len() / d;
        let position = batch.nodes[self.node].start + self.offset;
        let context = position + count;
        // The context as a list of (node, first row in the tree, first column, length).
        let mut parts = Vec::new();
        let mut covered = 0;
        for node in batch.ancestry(self.node) {
            let rows = &batch.nodes[node].rows;
            let len = rows.len().min(context - covered);
            parts.push((node - self.first_node, rows.start - first, covered, len));
            covered += len;
        }
        // Attention probabilities, and the gradient with respect to the scores.
        let mut p = vec![0.0; count * context];
        let mut ds = vec![0.0; count * context];
        for &(node, _, col, len) in &parts {
            let lhs = Lhs::rows(self.queries, d);
            let rhs = Rhs::packed(&tree_head.key_panels[node]);
            kernel.gemm((count, d, len), lhs, rhs, &mut p[col..], context);
            let lhs = Lhs::rows(self.grad, d);
            let rhs = Rhs::packed(&tree_head.value_panels[node]);
            kernel.gemm((count, d, len), lhs, rhs, &mut ds[col..], context);
        }
        for (i, (p, ds)) in
            p.chunks_exact_mut(context).zip(ds.chunks_exact_mut(context)).enumerate()
        {
            let (p, masked) = p.split_at_mut(position + i + 1);
            masked.fill(0.0);
            let max = row_ops::max(isa, p);
            let sum = row_ops::exp_and_sum(isa, p, max);
            row_ops::scale(isa, p, 1.0 / sum);
            let own = i * d..(i + 1) * d;
            let shift = row_ops::dot(isa, &self.out[own.clone()], &self.grad[own]);
            let (ds, masked) = ds.split_at_mut(position + i + 1);
            masked.fill(0.0);
            row_ops::softmax_backward(isa, p, ds, shift, 1.0);
        }
        for &(_, row, col, len) in &parts {
            let range = row * d..(row + len) * d;
            let rhs = Rhs::Rows { data: &tree_head.keys[range.clone()], stride: d };
            let lhs = Lhs::rows(&ds[col..], context);
            kernel.gemm_accumulate((count, len, d), lhs, rhs, grad_queries, d);
            let rhs = Rhs::Rows { data: self.queries, stride: d };
            let out = &mut tree_head.grad_keys[range.clone()];
            kernel.gemm_accumulate((len, count, d), Lhs::columns(&ds[col..], context), rhs, out, d);
            let rhs = Rhs::Rows { data: self.grad, stride: d };
            let out = &mut tree_head.grad_values[range];
            kernel.gemm_accumulate((len, count, d), Lhs::columns(&p[col..], context), rhs, out, d);
        }
    }
}
