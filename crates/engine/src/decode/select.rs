//! Partial selection: the top k tokens and cumulative-mass crossings without a full sort.

use std::cmp::Ordering;

/// A logit with its token.
pub(super) type Candidate = (f32, u32);

/// Orders by descending logit; equal logits by ascending token.
pub(super) fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Writes the `k` highest logits to `items`, in the order of [`best_first`].
pub(super) fn top_k(logits: &[f32], k: usize, items: &mut Vec<Candidate>) {
    items.clear();
    if k == 0 {
        return;
    }
    // Collect twice as many candidates as needed before dropping the worse half, so that dropping
    // is rare. Logits below the worst remaining candidate are skipped.
    let capacity = k.saturating_mul(2).clamp(64, logits.len().max(64));
    let mut floor = f32::NEG_INFINITY;
    for (token, &logit) in (0..).zip(logits) {
        if logit < floor {
            continue;
        }
        items.push((logit, token));
        if items.len() >= capacity && items.len() > k {
            items.select_nth_unstable_by(k - 1, best_first);
            items.truncate(k);
            floor = items[k - 1].0;
        }
    }
    items.sort_unstable_by(best_first);
    items.truncate(k);
}

/// The candidate at which a cumulative sum crosses a threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Crossing {
    pub(super) token: u32,
    /// Sum up to and including this candidate.
    pub(super) through: f64,
}

/// Finds the candidate at which the sum of `weight`, in the order of [`best_first`], exceeds `goal`
/// (or reaches it, if `reach`). If it never does, returns the last candidate with nonzero weight.
/// Returns `None` if `items` is empty. Reorders `items`.
pub(super) fn find_crossing(
    mut items: &mut [Candidate],
    goal: f64,
    reach: bool,
    weight: impl Fn(f32) -> f64,
) -> Option<Crossing> {
    /// Number of candidates up to which sorting is faster than bisecting.
    const FEW: usize = 48;
    let reached = |sum: f64| if reach { sum >= goal } else { sum > goal };
    let mut before = 0.0;
    // Bisect by rank: sum the better half, then continue in the half that contains the crossing.
    while items.len() > FEW {
        let middle = items.len() / 2;
        items.select_nth_unstable_by(middle, best_first);
        let (better, worse) = items.split_at_mut(middle);
        let sum: f64 = better.iter().map(|item| weight(item.0)).sum();
        // If the worse half has no weight, a rounding error must not select it.
        if reached(before + sum) || weight(worse[0].0) == 0.0 {
            items = better;
        } else {
            before += sum;
            items = worse;
        }
    }
    items.sort_unstable_by(best_first);
    let mut last = None;
    for item in items {
        let own = weight(item.0);
        if own == 0.0 && last.is_some() {
            break;
        }
        before += own;
        last = Some(Crossing { token: item.1, through: before });
        if reached(before) {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn top_k_matches_a_full_sort(
            logits in prop::collection::vec(-3_i8..4, 1..400),
            k in 1_usize..200,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let mut all: Vec<Candidate> = logits.iter().copied().zip(0..).collect();
            all.sort_by(best_first);
            all.truncate(k);
            let mut items = Vec::new();
            top_k(&logits, k, &mut items);
            prop_assert_eq!(items, all);
        }

        #[test]
        fn crossings_match_a_cumulative_sum(
            logits in prop::collection::vec(-40_i8..4, 1..300),
            u in 0.0_f64..1.0,
        ) {
            // Weights are powers of two, so that sums are exact in any order.
            let weight = |logit: f32| 2.0_f64.powf(f64::from(logit));
            let mut items: Vec<Candidate> = logits.into_iter().map(f32::from).zip(0..).collect();
            let mut sorted = items.clone();
            sorted.sort_by(best_first);
            let total: f64 = items.iter().map(|item| weight(item.0)).sum();
            let mut sum = 0.0;
            let want = sorted.iter().find(|item| {
                sum += weight(item.0);
                sum > u * total
            });
            let got = find_crossing(&mut items, u * total, false, weight).unwrap();
            prop_assert_eq!(got.token, want.unwrap().1);
            prop_assert_eq!(got.through, sum);
        }
    }

    #[test]
    fn an_unreachable_goal_gives_the_last_candidate_with_weight() {
        let mut items: Vec<Candidate> =
            (0..100).map(|i| (if i < 60 { 0.0 } else { -1.0 }, i)).collect();
        let weight = |logit: f32| if logit == 0.0 { 1.0 } else { 0.0 };
        assert_eq!(find_crossing(&mut items, 1e9, false, weight).unwrap().token, 59);
        assert_eq!(find_crossing(&mut [], 0.5, false, weight), None);
    }
}
