//! Sums, in lines and in words.

use super::words::{CorpusRng, NAMES, NUMBERS, THINGS};

/// A few sums of one kind.
pub(super) fn write(pen: &mut CorpusRng) -> String {
    match pen.below(4) {
        0 | 1 => lines(pen),
        2 => counting(pen),
        _ => in_words(pen),
    }
}

/// A sum and its result. Kept small, so that they can be learnt.
pub(super) fn sum(pen: &mut CorpusRng) -> (String, usize) {
    match pen.below(4) {
        0 | 1 => {
            let (a, b) = (pen.below(50), pen.below(50));
            (format!("{a} + {b}"), a + b)
        }
        2 => {
            let a = pen.below(50);
            let b = pen.below(a + 1);
            (format!("{a} - {b}"), a - b)
        }
        _ => {
            let (a, b) = (pen.below(11), pen.below(11));
            (format!("{a} * {b}"), a * b)
        }
    }
}

fn lines(pen: &mut CorpusRng) -> String {
    let count = 4 + pen.below(5);
    let lines: Vec<String> = (0..count)
        .map(|_| {
            let (text, result) = sum(pen);
            format!("{text} = {result}.")
        })
        .collect();
    lines.join("\n")
}

fn counting(pen: &mut CorpusRng) -> String {
    let step = 1 + pen.below(5);
    let start = pen.below(30);
    let all: Vec<String> = (0..8).map(|i| (start + i * step).to_string()).collect();
    format!("Counting by {}: {}.", NUMBERS[step], all.join(", "))
}

fn in_words(pen: &mut CorpusRng) -> String {
    let (name, she) = pen.one(&NAMES);
    let (friend, _) = pen.another(&NAMES, (name, she));
    let pronoun = if she { "She" } else { "He" };
    let (thing, _) = pen.one(&THINGS);
    let (a, b) = (2 + pen.below(8), 2 + pen.below(8));
    if pen.below(2) == 0 {
        format!(
            "{name} has {a} {thing}s. {friend} gives {name} {b} more. \
             {pronoun} now has {} {thing}s, because {a} + {b} = {}.",
            a + b,
            a + b
        )
    } else {
        let all = a + b;
        format!(
            "{name} has {all} {thing}s. {pronoun} gives {b} to {friend}. \
             {pronoun} has {a} {thing}s left, because {all} - {b} = {a}."
        )
    }
}
