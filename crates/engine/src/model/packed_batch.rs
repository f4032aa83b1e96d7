//! [`PackedBatch`]: sequences packed into rows without padding, with shared prefixes stored once.

use std::collections::HashMap;
use std::ops::Range;

use crate::kernel::paged_attention::{PAGE_POSITIONS, PageRef, SequenceChunk};

/// Sequences of a training batch, packed into rows without padding.
///
/// Sequences with a common prefix share its rows, which is exact because the activations of a row
/// depend only on the tokens before it. Each group of sequences with a common prefix forms a tree
/// of depth two: the prefix, and the rest of each sequence.
#[derive(Debug, Default)]
pub(crate) struct PackedBatch {
    pub(crate) tokens: Vec<u32>,
    /// Nodes of all trees; the nodes of a tree are contiguous, and parents precede children.
    pub(crate) nodes: Vec<PrefixNode>,
    /// Node range of each tree.
    pub(crate) trees: Vec<Range<usize>>,
    /// Nodes of each sequence, in order.
    pub(crate) paths: Vec<Vec<usize>>,
}

/// A run of rows that belongs to the same set of sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefixNode {
    pub(crate) rows: Range<usize>,
    /// Position of the first row in its sequences.
    pub(crate) start: usize,
    pub(crate) parent: Option<usize>,
}

impl PackedBatch {
    /// Packs `sequences`, none of which may be empty.
    ///
    /// Sequences share a prefix only if they agree on their first `min_prefix` tokens. Prefixes are
    /// shared one level deep, which suffices for several samples of one prompt.
    pub(crate) fn pack(sequences: &[&[u32]], min_prefix: usize) -> Self {
        let mut batch = Self { paths: vec![Vec::new(); sequences.len()], ..Self::default() };
        for group in Self::group_by_prefix(sequences, min_prefix) {
            batch.add_tree(sequences, &group);
        }
        batch
    }

    /// Returns groups of sequences that agree on their first `min_prefix` tokens, in order of first
    /// appearance.
    fn group_by_prefix(sequences: &[&[u32]], min_prefix: usize) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut group_of: HashMap<&[u32], usize> = HashMap::new();
        for (i, sequence) in sequences.iter().enumerate() {
            match sequence.get(..min_prefix) {
                Some(prefix) if min_prefix > 0 => {
                    let group = *group_of.entry(prefix).or_insert_with(|| {
                        groups.push(Vec::new());
                        groups.len() - 1
                    });
                    groups[group].push(i);
                }
                _ => groups.push(vec![i]),
            }
        }
        groups
    }

    /// Divides `sequences` into micro-batches of at most `max_rows` rows each; a single larger tree
    /// forms a micro-batch of its own.
    ///
    /// The micro-batches packed one after the other have the rows of all sequences packed at once,
    /// in the same order.
    pub(crate) fn micro_batches(
        sequences: &[&[u32]],
        min_prefix: usize,
        max_rows: usize,
    ) -> Vec<Vec<usize>> {
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut rows_left = 0;
        for group in Self::group_by_prefix(sequences, min_prefix) {
            let shared = if group.len() > 1 { common_prefix(sequences, &group) } else { 0 };
            let rows = group.iter().map(|i| sequences[*i].len() - shared).sum::<usize>() + shared;
            match batches.last_mut() {
                Some(batch) if rows <= rows_left => batch.extend(group),
                _ => {
                    batches.push(group);
                    rows_left = max_rows;
                }
            }
            rows_left = rows_left.saturating_sub(rows);
        }
        batches
    }

    /// Adds the tree of a group of sequences: the common prefix, if the group has several
    /// sequences, and the rest of each.
    fn add_tree(&mut self, sequences: &[&[u32]], group: &[usize]) {
        let first = self.nodes.len();
        let shared = common_prefix(sequences, group);
        if group.len() > 1 {
            self.add_node(&sequences[group[0]][..shared], 0, None);
        }
        for &i in group {
            let parent = (group.len() > 1).then_some(first);
            let start = if parent.is_some() { shared } else { 0 };
            self.paths[i].extend(parent);
            let rest = &sequences[i][start..];
            if !rest.is_empty() {
                self.paths[i].push(self.nodes.len());
                self.add_node(rest, start, parent);
            }
        }
        self.trees.push(first..self.nodes.len());
    }

    /// Adds a node with these tokens, which start at position `start` of their sequences.
    fn add_node(&mut self, tokens: &[u32], start: usize, parent: Option<usize>) {
        let rows = self.tokens.len()..self.tokens.len() + tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.nodes.push(PrefixNode { rows, start, parent });
    }

    /// Returns the rows of a sequence, in order of position.
    pub(crate) fn rows(&self, sequence: usize) -> impl Iterator<Item = usize> + '_ {
        self.paths[sequence].iter().flat_map(|node| self.nodes[*node].rows.clone())
    }

    /// Returns one chunk per node, with pages numbered from 0, and the number of pages.
    pub(crate) fn sequence_chunks(&self) -> (Vec<SequenceChunk>, usize) {
        let mut chunks: Vec<SequenceChunk> = Vec::with_capacity(self.nodes.len());
        let mut pages = 0;
        for node in &self.nodes {
            let mut block_table =
                node.parent.map_or_else(Vec::new, |p| chunks[p].block_table.clone());
            let mut left = node.rows.len();
            while left > 0 {
                let len = left.min(PAGE_POSITIONS);
                block_table.push(PageRef { page: pages, len });
                pages += 1;
                left -= len;
            }
            chunks.push(SequenceChunk { rows: node.rows.clone(), start: node.start, block_table });
        }
        (chunks, pages)
    }

    /// Returns the nodes that `node` attends to, in order, ending with itself.
    pub(crate) fn ancestry(&self, node: usize) -> Vec<usize> {
        let mut path = vec![node];
        while let Some(parent) = self.nodes[path[path.len() - 1]].parent {
            path.push(parent);
        }
        path.reverse();
        path
    }
}

/// Returns the length of the longest common prefix of a group of sequences.
fn common_prefix(sequences: &[&[u32]], group: &[usize]) -> usize {
    let first = sequences[group[0]];
    group.iter().fold(first.len(), |shared, i| {
        let same = first.iter().zip(sequences[*i]).take_while(|(a, b)| a == b).count();
        shared.min(same)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_do_not_divide_a_tree() {
        let sequences: [&[u32]; 5] = [&[1, 2, 3], &[9, 9], &[1, 2, 4, 5], &[8, 8, 8], &[7, 7]];
        assert_eq!(PackedBatch::micro_batches(&sequences, 2, 100), [[0, 2, 1, 3, 4]]);
        // The tree of sequences 0 and 2 has five rows: two shared ones, then one and two.
        assert_eq!(PackedBatch::micro_batches(&sequences, 2, 7), [vec![0, 2, 1], vec![3, 4]]);
        assert_eq!(
            PackedBatch::micro_batches(&sequences, 2, 1),
            [vec![0, 2], vec![1], vec![3], vec![4]]
        );
        assert!(PackedBatch::micro_batches(&[], 2, 1).is_empty());
    }

    #[test]
    fn a_common_prefix_is_stored_once() {
        let sequences: [&[u32]; 4] = [&[1, 2, 3, 4], &[9], &[1, 2, 3], &[1, 2, 5, 6, 7]];
        let batch = PackedBatch::pack(&sequences, 2);
        assert_eq!(batch.tokens.len(), 2 + 2 + 1 + 3 + 1);
        for (i, sequence) in sequences.iter().enumerate() {
            let tokens: Vec<u32> = batch.rows(i).map(|row| batch.tokens[row]).collect();
            assert_eq!(tokens, *sequence);
        }
        assert_eq!(batch.trees.len(), 2);
        let alone = PackedBatch::pack(&sequences, 0);
        assert_eq!(alone.tokens.len(), 13);
    }

    #[test]
    fn identical_sequences_share_all_rows() {
        let sequences: [&[u32]; 2] = [&[1, 2, 3], &[1, 2, 3]];
        let batch = PackedBatch::pack(&sequences, 1);
        assert_eq!(batch.tokens.len(), 3);
        assert_eq!(batch.rows(1).count(), 3);
    }
}
