//! Backward pass of attention.
//!
//! Tasks are pairs of a prefix tree and a key-value head. Within a task all sums run in a fixed
//! order: query heads, nodes, blocks of query rows. The result therefore does not depend on the
//! number of threads.
//!
//! A task first copies the columns of its head into matrices with one row of `head_dim` elements
//! per row of the tree. Rows are numbered within the batch; [`Tree::elements`] converts them to
//! positions in these matrices.

use std::ops::Range;

use super::forward::qkv_offsets;
use super::packed_batch::PrefixNode;
use super::{Model, PackedBatch};
use crate::kernel::{ActivationBuffer, Isa, Kernel, Lhs, Panels, Precision, Rhs, row_ops};

/// Query rows per block.
const BLOCK_ROWS: usize = 48;

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

/// One prefix tree of a batch, and the ranges of its nodes and rows.
struct Tree<'a> {
    batch: &'a PackedBatch,
    /// Indices of the tree's nodes in the batch.
    nodes: Range<usize>,
    /// Rows of the tree in the batch.
    rows: Range<usize>,
    head_dim: usize,
}

impl<'a> Tree<'a> {
    fn new(batch: &'a PackedBatch, index: usize, head_dim: usize) -> Self {
        let nodes = batch.trees[index].clone();
        let rows = batch.nodes[nodes.start].rows.start..batch.nodes[nodes.end - 1].rows.end;
        Self { batch, nodes, rows, head_dim }
    }

    /// Returns the nodes of the tree.
    fn nodes(&self) -> &'a [PrefixNode] {
        &self.batch.nodes[self.nodes.clone()]
    }

    /// Returns the number of elements in a matrix of one head.
    fn head_len(&self) -> usize {
        self.rows.len() * self.head_dim
    }

    /// Returns the elements of these rows in a matrix of one head.
    fn elements(&self, rows: &Range<usize>) -> Range<usize> {
        let first = self.rows.start;
        (rows.start - first) * self.head_dim..(rows.end - first) * self.head_dim
    }

    /// Copies the head whose first column is `col` out of a matrix with `width` columns and one row
    /// per row of the batch.
    fn copy_head(&self, matrix: &[f32], width: usize, col: usize) -> Vec<f32> {
        let mut head = Vec::with_capacity(self.head_len());
        for row in self.rows.clone() {
            head.extend_from_slice(&matrix[row * width + col..][..self.head_dim]);
        }
        head
    }

    /// Packs the rows of each node of a head's matrix.
    fn pack_nodes(&self, head: &[f32]) -> Vec<Panels> {
        let pack = |node: &PrefixNode| {
            let rows = &head[self.elements(&node.rows)];
            Panels::from_rows(rows, node.rows.len(), self.head_dim, Precision::F32)
        };
        self.nodes().iter().map(pack).collect()
    }

    /// Returns the context of query rows of node `node`: the first `context_len` positions of their
    /// sequence, divided into the nodes that contain them.
    fn context(&self, node: usize, context_len: usize) -> Vec<ContextPart> {
        let mut parts = Vec::new();
        let mut first_col = 0;
        for ancestor in self.batch.ancestry(node) {
            let rows = &self.batch.nodes[ancestor].rows;
            let len = rows.len().min(context_len - first_col);
            let node = ancestor - self.nodes.start;
            parts.push(ContextPart { node, rows: rows.start..rows.start + len, first_col });
            first_col += len;
        }
        parts
    }
}

/// Part of a context that lies in one node.
///
/// For example, a query at position 4 of a sequence whose first 3 tokens are a shared prefix has
/// the context parts of the prefix (3 rows, `first_col` 0) and of the rest (2 rows, `first_col` 3).
struct ContextPart {
    /// Index of the node within the tree.
    node: usize,
    /// Rows of the keys and values.
    rows: Range<usize>,
    /// Position of the first row, which is its column in a matrix of scores.
    first_col: usize,
}

/// Keys, values and gradients of one key-value head for the rows of one tree.
struct TreeHead {
    /// Keys, `rows × head_dim`. The gradients have the same shape.
    keys: Vec<f32>,
    /// Packed keys of each node.
    key_panels: Vec<Panels>,
    /// Packed values of each node.
    value_panels: Vec<Panels>,
    grad_keys: Vec<f32>,
    grad_values: Vec<f32>,
    /// Gradient of the queries of each query head that uses this key-value head.
    grad_queries: Vec<Vec<f32>>,
}

impl Model {
    /// Returns the gradient with respect to the rotated queries and keys and to the values, in the
    /// layout of the projected rows.
    pub(super) fn attend_backward(&self, tensors: &AttentionTensors<'_>) -> ActivationBuffer {
        let heads = self.heads();
        let batch = tensors.batch;
        let trees: Vec<Tree<'_>> =
            (0..batch.trees.len()).map(|tree| Tree::new(batch, tree, heads.head_dim)).collect();
        let kernel = self.kernel.single_threaded();
        let tree_heads = self.kernel.pool().map(trees.len() * heads.kv_heads, |task| {
            let tree = task / heads.kv_heads;
            let kv_head = task % heads.kv_heads;
            self.tree_backward(&kernel, tensors, &trees[tree], kv_head)
        });

        // Copy the gradients of all heads to their columns.
        let width = heads.query_width() + 2 * heads.kv_width();
        let (queries, keys, values) = qkv_offsets(heads.query_width(), heads.kv_width());
        // The trees are in row order.
        let tree_of_row: Vec<usize> =
            (0..).zip(&trees).flat_map(|(i, tree)| tree.rows.clone().map(move |_| i)).collect();
        let mut grad = ActivationBuffer::default();
        grad.fill_rows(self.kernel.pool(), batch.tokens.len(), width, width, |row, grad| {
            let tree = tree_of_row[row];
            let elements = trees[tree].elements(&(row..row + 1));
            let mut copy_head = |col: usize, from: &[f32]| {
                grad[col..col + heads.head_dim].copy_from_slice(&from[elements.clone()]);
            };
            let tree_heads = &tree_heads[tree * heads.kv_heads..(tree + 1) * heads.kv_heads];
            for (kv_head, tree_head) in tree_heads.iter().enumerate() {
                let query_heads = kv_head * heads.group()..;
                for (query_head, grad_queries) in query_heads.zip(&tree_head.grad_queries) {
                    copy_head(queries + query_head * heads.head_dim, grad_queries);
                }
                copy_head(keys + kv_head * heads.head_dim, &tree_head.grad_keys);
                copy_head(values + kv_head * heads.head_dim, &tree_head.grad_values);
            }
        });
        grad
    }

    /// Computes one task: the backward pass of key-value head `kv_head` for the rows of `tree`.
    fn tree_backward(
        &self,
        kernel: &Kernel,
        tensors: &AttentionTensors<'_>,
        tree: &Tree<'_>,
        kv_head: usize,
    ) -> TreeHead {
        let heads = self.heads();
        let head_dim = heads.head_dim;
        let width = heads.query_width() + 2 * heads.kv_width();
        let (queries, keys, values) = qkv_offsets(heads.query_width(), heads.kv_width());
        let head_keys = tree.copy_head(tensors.rotated, width, keys + kv_head * head_dim);
        let head_values = tree.copy_head(tensors.rotated, width, values + kv_head * head_dim);
        let mut tree_head = TreeHead {
            key_panels: tree.pack_nodes(&head_keys),
            value_panels: tree.pack_nodes(&head_values),
            grad_keys: vec![0.0; tree.head_len()],
            grad_values: vec![0.0; tree.head_len()],
            grad_queries: Vec::with_capacity(heads.group()),
            keys: head_keys,
        };
        for query_head in kv_head * heads.group()..(kv_head + 1) * heads.group() {
            let col = query_head * head_dim;
            let mut head_queries = tree.copy_head(tensors.rotated, width, queries + col);
            row_ops::scale(kernel.isa(), &mut head_queries, heads.scale());
            let out = tree.copy_head(tensors.out, heads.query_width(), col);
            let grad = tree.copy_head(tensors.grad, heads.query_width(), col);
            let mut grad_queries = vec![0.0; tree.head_len()];
            for node in tree.nodes.clone() {
                let node_rows = tree.batch.nodes[node].rows.clone();
                for start in node_rows.clone().step_by(BLOCK_ROWS) {
                    let rows = start..node_rows.end.min(start + BLOCK_ROWS);
                    let elements = tree.elements(&rows);
                    let block = QueryBlock {
                        tree,
                        node,
                        rows,
                        queries: &head_queries[elements.clone()],
                        out: &out[elements.clone()],
                        grad: &grad[elements.clone()],
                    };
                    block.backward(kernel, &mut tree_head, &mut grad_queries[elements]);
                }
            }
            // The scores were computed from scaled queries.
            row_ops::scale(kernel.isa(), &mut grad_queries, heads.scale());
            tree_head.grad_queries.push(grad_queries);
        }
        tree_head
    }
}

/// A block of query rows of one node and one query head.
struct QueryBlock<'a> {
    tree: &'a Tree<'a>,
    /// Index of the node in the batch.
    node: usize,
    rows: Range<usize>,
    /// Queries, multiplied by the attention scale.
    queries: &'a [f32],
    /// Output of attention.
    out: &'a [f32],
    /// Gradient with respect to `out`.
    grad: &'a [f32],
}

impl QueryBlock<'_> {
    /// Returns the position of the block's first row in its sequence.
    fn position(&self) -> usize {
        let node = &self.tree.batch.nodes[self.node];
        node.start + self.rows.start - node.rows.start
    }

    /// Adds to the gradients of the queries of this block and of the keys and values of its
    /// context.
    fn backward(&self, kernel: &Kernel, tree_head: &mut TreeHead, grad_queries: &mut [f32]) {
        let count = self.rows.len();
        let head_dim = self.tree.head_dim;
        let context_len = self.position() + count;
        let context = self.tree.context(self.node, context_len);

        // One row per query, one column per position of the context.
        let mut scores = vec![0.0; count * context_len];
        let mut grad_probabilities = vec![0.0; count * context_len];
        for part in &context {
            let size = (count, head_dim, part.rows.len());
            let lhs = Lhs::rows(self.queries, head_dim);
            let rhs = Rhs::packed(&tree_head.key_panels[part.node]);
            kernel.gemm(size, lhs, rhs, &mut scores[part.first_col..], context_len);
            let lhs = Lhs::rows(self.grad, head_dim);
            let rhs = Rhs::packed(&tree_head.value_panels[part.node]);
            kernel.gemm(size, lhs, rhs, &mut grad_probabilities[part.first_col..], context_len);
        }
        self.softmax_backward(kernel.isa(), &mut scores, &mut grad_probabilities);
        let probabilities = scores;
        let grad_scores = grad_probabilities;

        for part in &context {
            let elements = self.tree.elements(&part.rows);
            let part_probabilities = &probabilities[part.first_col..];
            let part_grad_scores = &grad_scores[part.first_col..];

            let lhs = Lhs::rows(part_grad_scores, context_len);
            let rhs = Rhs::Rows { data: &tree_head.keys[elements.clone()], stride: head_dim };
            let size = (count, part.rows.len(), head_dim);
            kernel.gemm_accumulate(size, lhs, rhs, grad_queries, head_dim);

            let size = (part.rows.len(), count, head_dim);
            let lhs = Lhs::columns(part_grad_scores, context_len);
            let rhs = Rhs::Rows { data: self.queries, stride: head_dim };
            let out = &mut tree_head.grad_keys[elements.clone()];
            kernel.gemm_accumulate(size, lhs, rhs, out, head_dim);

            let lhs = Lhs::columns(part_probabilities, context_len);
            let rhs = Rhs::Rows { data: self.grad, stride: head_dim };
            let out = &mut tree_head.grad_values[elements];
            kernel.gemm_accumulate(size, lhs, rhs, out, head_dim);
        }
    }

    /// Replaces scores by attention probabilities, and the gradients with respect to the
    /// probabilities by the gradients with respect to the scores. Positions after the
    /// position of a query become zero in both matrices.
    fn softmax_backward(&self, isa: Isa, scores: &mut [f32], grads: &mut [f32]) {
        let position = self.position();
        let head_dim = self.tree.head_dim;
        let context_len = position + self.rows.len();
        let rows = scores.chunks_exact_mut(context_len).zip(grads.chunks_exact_mut(context_len));
        for (i, (scores, grads)) in rows.enumerate() {
            let visible = position + i + 1;
            let (scores, masked_scores) = scores.split_at_mut(visible);
            let (grads, masked_grads) = grads.split_at_mut(visible);
            masked_scores.fill(0.0);
            masked_grads.fill(0.0);

            let max = row_ops::max(isa, scores);
            let sum = row_ops::exp_and_sum(isa, scores, max);
            row_ops::scale(isa, scores, 1.0 / sum);
            let probabilities = scores;
            // `out · grad` equals the sum of the probabilities times their gradients, which the
            // derivative of softmax subtracts.
            let elements = i * head_dim..(i + 1) * head_dim;
            let shift = row_ops::dot(isa, &self.out[elements.clone()], &self.grad[elements]);
            row_ops::softmax_backward(isa, probabilities, grads, shift, 1.0);
        }
    }
}
