//! Applies the merges of byte-pair encoding.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Merges pairs of neighbours in `tokens[start..]`, lowest merged token first, until none can be
/// merged.
///
/// Takes O(n log n) time, because a single word may be very long.
pub(super) fn merge(tokens: &mut Vec<u32>, start: usize, merges: &HashMap<(u32, u32), u32>) {
    let count = tokens.len() - start;
    if count < 2 {
        return;
    }
    const NONE: usize = usize::MAX;
    let word = &mut tokens[start..];
    // Linked list of the remaining tokens. A merged token takes the position of its left half.
    let mut next: Vec<usize> = (1..=count).map(|i| if i == count { NONE } else { i }).collect();
    let mut previous: Vec<usize> = (0..count).map(|i| i.wrapping_sub(1)).collect();
    let mut removed = vec![false; count];
    let mut candidates = BinaryHeap::new();
    let push_candidate =
        |candidates: &mut BinaryHeap<_>, left: usize, right: usize, word: &[u32]| {
            if let Some(&merged) = merges.get(&(word[left], word[right])) {
                candidates.push(Reverse((merged, left, word[left], word[right])));
            }
        };
    for i in 0..count - 1 {
        push_candidate(&mut candidates, i, i + 1, word);
    }
    while let Some(Reverse((merged, left, was_left, was_right))) = candidates.pop() {
        let right = next[left];
        // An earlier merge has changed or removed one of the two tokens.
        let stale =
            removed[left] || right == NONE || (word[left], word[right]) != (was_left, was_right);
        if stale {
            continue;
        }
        word[left] = merged;
        removed[right] = true;
        next[left] = next[right];
        if next[left] != NONE {
            previous[next[left]] = left;
            push_candidate(&mut candidates, left, next[left], word);
        }
        if previous[left] != NONE {
            push_candidate(&mut candidates, previous[left], left, word);
        }
    }
    let mut at = 0;
    let mut end = start;
    while at != NONE {
        tokens[end] = tokens[start + at];
        end += 1;
        at = next[at];
    }
    tokens.truncate(end);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    /// Merges by definition: repeatedly the pair with the lowest merged token, of equal ones the
    /// leftmost.
    fn reference(tokens: &mut Vec<u32>, merges: &HashMap<(u32, u32), u32>) {
        loop {
            let pairs = tokens.windows(2).enumerate();
            let best = pairs.filter_map(|(i, pair)| Some((merges.get(&(pair[0], pair[1]))?, i)));
            let Some((&merged, at)) = best.min() else { return };
            tokens[at] = merged;
            tokens.remove(at + 1);
        }
    }

    proptest! {
        #[test]
        fn merging_follows_the_definition(
            tokens in prop::collection::vec(0_u32..3, 0..60),
            pairs in prop::collection::vec(any::<(Index, Index)>(), 0..12),
        ) {
            let mut merges = HashMap::new();
            let mut known = 3_u32;
            for (a, b) in pairs {
                let token = |i: Index| u32::try_from(i.index(known as usize)).unwrap();
                if merges.insert((token(a), token(b)), known).is_none() {
                    known += 1;
                }
            }
            let mut fast = tokens.clone();
            let mut slow = tokens;
            merge(&mut fast, 0, &merges);
            reference(&mut slow, &merges);
            prop_assert_eq!(fast, slow);
        }
    }

    #[test]
    fn tokens_before_the_start_are_not_merged() {
        let merges = HashMap::from([((1, 1), 2)]);
        let mut tokens = vec![1, 1, 1, 1, 1];
        merge(&mut tokens, 2, &merges);
        assert_eq!(tokens, [1, 1, 2, 1]);
    }
}
