//! Merging neighbours, the earliest learnt pair first.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Merges `tokens[start..]` as far as it goes.
///
/// Time grows with the length times its logarithm, so a text of one endless word is no trouble.
pub(super) fn merge(tokens: &mut Vec<u32>, start: usize, merges: &HashMap<(u32, u32), u32>) {
    let count = tokens.len() - start;
    if count < 2 {
        return;
    }
    const NONE: usize = usize::MAX;
    let word = &mut tokens[start..];
    // A list of what is left: a merged token stands at the place of its first half.
    let mut next: Vec<usize> = (1..=count).map(|i| if i == count { NONE } else { i }).collect();
    let mut previous: Vec<usize> = (0..count).map(|i| i.wrapping_sub(1)).collect();
    let mut gone = vec![false; count];
    let mut ready = BinaryHeap::new();
    let offer = |ready: &mut BinaryHeap<_>, left: usize, right: usize, word: &[u32]| {
        if let Some(&merged) = merges.get(&(word[left], word[right])) {
            ready.push(Reverse((merged, left, word[left], word[right])));
        }
    };
    for i in 0..count - 1 {
        offer(&mut ready, i, i + 1, word);
    }
    while let Some(Reverse((merged, left, was_left, was_right))) = ready.pop() {
        let right = next[left];
        // Offers that an earlier merge has overtaken.
        let stale =
            gone[left] || right == NONE || (word[left], word[right]) != (was_left, was_right);
        if stale {
            continue;
        }
        word[left] = merged;
        gone[right] = true;
        next[left] = next[right];
        if next[left] != NONE {
            previous[next[left]] = left;
            offer(&mut ready, left, next[left], word);
        }
        if previous[left] != NONE {
            offer(&mut ready, previous[left], left, word);
        }
    }
    let mut at = 0;
    let mut kept = start;
    while at != NONE {
        tokens[kept] = tokens[start + at];
        kept += 1;
        at = next[at];
    }
    tokens.truncate(kept);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: as long as there is a pair to merge, merge the earliest learnt, leftmost.
    fn slowly(tokens: &mut Vec<u32>, merges: &HashMap<(u32, u32), u32>) {
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
            pairs in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..12),
        ) {
            let mut merges = HashMap::new();
            let mut known = 3_u32;
            for (a, b) in pairs {
                let pick = |i: prop::sample::Index| u32::try_from(i.index(known as usize)).unwrap();
                if merges.insert((pick(a), pick(b)), known).is_none() {
                    known += 1;
                }
            }
            let (mut fast, mut slow) = (tokens.clone(), tokens);
            merge(&mut fast, 0, &merges);
            slowly(&mut slow, &merges);
            prop_assert_eq!(fast, slow);
        }
    }

    #[test]
    fn what_stands_before_is_left_alone() {
        let merges = HashMap::from([((1, 1), 2)]);
        let mut tokens = vec![1, 1, 1, 1, 1];
        merge(&mut tokens, 2, &merges);
        assert_eq!(tokens, [1, 1, 2, 1]);
    }
}
