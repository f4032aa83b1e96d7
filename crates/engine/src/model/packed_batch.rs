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
        for tree in Self::trees(sequences, min_prefix) {
            batch.add_tree(sequences, &tree);
        }
        batch
    }

    /// Divides `sequences` into the trees that share their prefixes.
    ///
    /// Whether a sequence joins a tree depends only on the sequences that the tree already has.
    /// Packing some consecutive trees therefore gives the rows that packing all of them gives, so
    /// the division of a batch into micro-batches of whole trees does not change a bit.
    pub(crate) fn trees(sequences: &[&[u32]], min_prefix: usize) -> Vec<PrefixTree> {
        let mut trees = Vec::new();
        for group in Self::group_by_prefix(sequences, min_prefix) {
            let mut tree: Option<PrefixTree> = None;
            for i in group {
                if !tree.as_mut().is_some_and(|tree| tree.add(sequences, i)) {
                    trees.extend(tree.replace(PrefixTree::new(sequences, i)));
                }
            }
            trees.extend(tree);
        }
        trees
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

    /// Adds the rows of a tree: the common prefix, if the tree has several sequences, and the rest
    /// of each.
    fn add_tree(&mut self, sequences: &[&[u32]], tree: &PrefixTree) {
        let first = self.nodes.len();
        let PrefixTree { sequences: group, shared, .. } = tree;
        if group.len() > 1 {
            self.add_node(&sequences[group[0]][..*shared], 0, None);
        }
        for &i in group {
            let parent = (group.len() > 1).then_some(first);
            let start = if parent.is_some() { *shared } else { 0 };
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

/// Number of rows up to which sequences with a common prefix form one tree.
///
/// A tree cannot be divided, so its size bounds the work of a micro-batch. The limit must not
/// depend on memory or on time: a division of a tree changes the order of the sums.
const MAX_TREE_ROWS: usize = 1_024;

/// Size of a tree, as a multiple of its common prefix, up to which the tree may exceed
/// [`MAX_TREE_ROWS`]. A prefix that is computed again in the next tree then adds at most one eighth
/// to the work.
const MAX_PREFIX_MULTIPLE: usize = 8;

/// Sequences that share the rows of their common prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefixTree {
    /// Indices of the sequences.
    pub(crate) sequences: Vec<usize>,
    /// Length of the common prefix.
    shared: usize,
    /// Number of rows: the common prefix once, and the rest of each sequence.
    pub(crate) rows: usize,
}

impl PrefixTree {
    fn new(sequences: &[&[u32]], i: usize) -> Self {
        let len = sequences[i].len();
        Self { sequences: vec![i], shared: len, rows: len }
    }

    /// Adds a sequence, unless the tree would become too large. Returns whether the sequence was
    /// added.
    fn add(&mut self, sequences: &[&[u32]], i: usize) -> bool {
        let first = sequences[self.sequences[0]];
        let same = first.iter().zip(sequences[i]).take_while(|(a, b)| a == b).count();
        let shared = self.shared.min(same);
        // A shorter prefix moves rows from the prefix into every sequence.
        let rows = self.rows
            + (self.shared - shared) * (self.sequences.len() - 1)
            + (sequences[i].len() - shared);
        if rows > MAX_TREE_ROWS.max(shared.saturating_mul(MAX_PREFIX_MULTIPLE)) {
            return false;
        }
        self.sequences.push(i);
        self.shared = shared;
        self.rows = rows;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(trees: &[PrefixTree]) -> Vec<&[usize]> {
        trees.iter().map(|tree| &tree.sequences[..]).collect()
    }

    #[test]
    fn sequences_with_a_common_prefix_form_a_tree() {
        let sequences: [&[u32]; 5] = [&[1, 2, 3], &[9, 9], &[1, 2, 4, 5], &[8, 8, 8], &[7, 7]];
        let trees = PackedBatch::trees(&sequences, 2);
        assert_eq!(members(&trees), [&[0, 2][..], &[1], &[3], &[4]]);
        // Two shared rows, then one and two.
        assert_eq!(trees[0].rows, 5);
        assert!(PackedBatch::trees(&[], 2).is_empty());
    }

    #[test]
    fn a_tree_has_a_limited_size_and_the_same_members_in_every_micro_batch() {
        let row = |prefix: usize, length: usize, salt: u32| -> Vec<u32> {
            let rest = (0_u32..).map(|n| 1_000 + n + 10_000 * salt);
            (0_u32..).take(prefix).chain(rest.take(length - prefix)).collect()
        };
        // Ten sequences of 300 tokens with 20 common tokens, then nine with 290 common tokens.
        let mut rows: Vec<Vec<u32>> = (0..10).map(|n| row(20, 300, n)).collect();
        rows.extend((10..19).map(|n| row(290, 300, n)));
        let sequences: Vec<&[u32]> = rows.iter().map(|row| &row[..]).collect();
        let trees = PackedBatch::trees(&sequences, 16);
        let sizes: Vec<usize> = trees.iter().map(|tree| tree.sequences.len()).collect();
        // The fourth tree has one sequence of the first kind.
        assert_eq!(sizes, [3, 3, 3, 3, 7]);
        assert!(trees.iter().all(|tree| tree.rows <= MAX_TREE_ROWS));
        // A longer prefix allows a larger tree.
        let long: Vec<Vec<u32>> = (0..10).map(|n| row(400, 800, n)).collect();
        let long: Vec<&[u32]> = long.iter().map(|row| &row[..]).collect();
        let rows: Vec<usize> = PackedBatch::trees(&long, 16).iter().map(|tree| tree.rows).collect();
        assert_eq!(rows, [400 + 7 * 400, 400 + 3 * 400]);
        for first in 0..trees.len() {
            for end in first + 1..=trees.len() {
                let part: Vec<usize> =
                    trees[first..end].iter().flat_map(|tree| tree.sequences.clone()).collect();
                let packed: Vec<&[u32]> = part.iter().map(|i| sequences[*i]).collect();
                let again = PackedBatch::trees(&packed, 16);
                let again: Vec<Vec<usize>> = again
                    .iter()
                    .map(|tree| tree.sequences.iter().map(|i| part[*i]).collect())
                    .collect();
                assert_eq!(again, members(&trees[first..end]), "trees {first} to {end}");
            }
        }
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
