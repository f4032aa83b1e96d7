//! [`PackedBatch`]: sequences packed into rows, each common beginning once.

use std::collections::HashMap;
use std::ops::Range;

use crate::kernel::paged_attention::{PAGE_POSITIONS, PageRef, SequenceChunk};

/// Sequences of a training batch as rows without padding. Where sequences begin with the same
/// tokens those rows exist once: a row depends on what stands before it alone.
#[derive(Debug, Default)]
pub(crate) struct PackedBatch {
    pub(crate) tokens: Vec<u32>,
    /// Parents before children; all nodes of a tree together.
    pub(crate) nodes: Vec<PrefixNode>,
    /// The nodes of each tree.
    pub(crate) trees: Vec<Range<usize>>,
    /// For every sequence the nodes that it consists of.
    pub(crate) paths: Vec<Vec<usize>>,
}

/// Rows that belong to the same sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefixNode {
    pub(crate) rows: Range<usize>,
    /// Position of the first row.
    pub(crate) start: usize,
    pub(crate) parent: Option<usize>,
}

impl PackedBatch {
    /// Packs `sequences`, none of which may be empty. The common beginning of a group is shared
    /// one level deep, which is what samples of one prompt need; a beginning of fewer than
    /// `least` tokens is not worth it.
    pub(crate) fn pack(sequences: &[&[u32]], least: usize) -> Self {
        let mut batch = Self { paths: vec![Vec::new(); sequences.len()], ..Self::default() };
        for group in Self::alike(sequences, least) {
            batch.add_tree(sequences, &group);
        }
        batch
    }

    /// Groups of sequences that agree on their first `least` tokens, in order of appearance.
    fn alike(sequences: &[&[u32]], least: usize) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut known: HashMap<&[u32], usize> = HashMap::new();
        for (i, sequence) in sequences.iter().enumerate() {
            match sequence.get(..least) {
                Some(beginning) if least > 0 => {
                    let group = *known.entry(beginning).or_insert_with(|| {
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

    /// Cuts `sequences` into batches of at most `most` rows, or of one tree where that has more.
    /// Packed one after the other they have the rows of all packed at once, in the same order.
    pub(crate) fn cut(sequences: &[&[u32]], least: usize, most: usize) -> Vec<Vec<usize>> {
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut left = 0;
        for group in Self::alike(sequences, least) {
            let shared = if group.len() > 1 { common(sequences, &group) } else { 0 };
            let rows = group.iter().map(|i| sequences[*i].len() - shared).sum::<usize>() + shared;
            match batches.last_mut() {
                Some(batch) if rows <= left => batch.extend(group),
                _ => {
                    batches.push(group);
                    left = most;
                }
            }
            left = left.saturating_sub(rows);
        }
        batches
    }

    fn add_tree(&mut self, sequences: &[&[u32]], group: &[usize]) {
        let first = self.nodes.len();
        let leader = sequences[group[0]];
        let shared = common(sequences, group);
        if group.len() > 1 {
            self.add_node(&leader[..shared], 0, None);
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

    fn add_node(&mut self, tokens: &[u32], start: usize, parent: Option<usize>) {
        let rows = self.tokens.len()..self.tokens.len() + tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.nodes.push(PrefixNode { rows, start, parent });
    }

    /// The row of position `position` of sequence `sequence`.
    pub(crate) fn rows(&self, sequence: usize) -> impl Iterator<Item = usize> + '_ {
        self.paths[sequence].iter().flat_map(|node| self.nodes[*node].rows.clone())
    }

    /// Pages for every node, numbered from 0, and how many there are.
    pub(crate) fn spans(&self) -> (Vec<SequenceChunk>, usize) {
        let mut spans: Vec<SequenceChunk> = Vec::with_capacity(self.nodes.len());
        let mut pages = 0;
        for node in &self.nodes {
            let mut blocks = node.parent.map_or_else(Vec::new, |p| spans[p].blocks.clone());
            let mut left = node.rows.len();
            while left > 0 {
                let len = left.min(PAGE_POSITIONS);
                blocks.push(PageRef { page: pages, len });
                pages += 1;
                left -= len;
            }
            spans.push(SequenceChunk { rows: node.rows.clone(), start: node.start, blocks });
        }
        (spans, pages)
    }

    /// The nodes that `node` can see, itself last.
    pub(crate) fn ancestry(&self, node: usize) -> Vec<usize> {
        let mut path = vec![node];
        while let Some(parent) = self.nodes[path[path.len() - 1]].parent {
            path.push(parent);
        }
        path.reverse();
        path
    }
}

/// How many tokens all of a group begin with.
fn common(sequences: &[&[u32]], group: &[usize]) -> usize {
    let leader = sequences[group[0]];
    group.iter().fold(leader.len(), |shared, i| {
        let same = leader.iter().zip(sequences[*i]).take_while(|(a, b)| a == b).count();
        shared.min(same)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_cut_between_trees_and_nowhere_else() {
        let sequences: [&[u32]; 5] = [&[1, 2, 3], &[9, 9], &[1, 2, 4, 5], &[8, 8, 8], &[7, 7]];
        assert_eq!(PackedBatch::cut(&sequences, 2, 100), [[0, 2, 1, 3, 4]]);
        // The tree of 0 and 2 has five rows: two shared, one and two of their own.
        assert_eq!(PackedBatch::cut(&sequences, 2, 7), [vec![0, 2, 1], vec![3, 4]]);
        assert_eq!(PackedBatch::cut(&sequences, 2, 1), [vec![0, 2], vec![1], vec![3], vec![4]]);
        assert!(PackedBatch::cut(&[], 2, 1).is_empty());
    }

    #[test]
    fn a_common_beginning_has_its_rows_once() {
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
    fn the_same_sequence_twice_is_one() {
        let sequences: [&[u32]; 2] = [&[1, 2, 3], &[1, 2, 3]];
        let batch = PackedBatch::pack(&sequences, 1);
        assert_eq!(batch.tokens.len(), 3);
        assert_eq!(batch.rows(1).count(), 3);
    }
}
