//! Generates arithmetic: equations, sequences and word problems.

use super::words::{CorpusRng, NAMES, NUMBERS, THINGS};

/// Generates a document of one kind of arithmetic.
pub(super) fn write(rng: &mut CorpusRng) -> String {
    match rng.below(4) {
        0 | 1 => equations(rng),
        2 => counting(rng),
        _ => word_problem(rng),
    }
}

/// Returns an expression and its result. The numbers are small enough for the model to learn.
pub(super) fn sum(rng: &mut CorpusRng) -> (String, usize) {
    match rng.below(4) {
        0 | 1 => {
            let a = rng.below(50);
            let b = rng.below(50);
            (format!("{a} + {b}"), a + b)
        }
        2 => {
            let a = rng.below(50);
            let b = rng.below(a + 1);
            (format!("{a} - {b}"), a - b)
        }
        _ => {
            let a = rng.below(11);
            let b = rng.below(11);
            (format!("{a} * {b}"), a * b)
        }
    }
}

fn equations(rng: &mut CorpusRng) -> String {
    let count = 4 + rng.below(5);
    let lines: Vec<String> = (0..count)
        .map(|_| {
            let (text, result) = sum(rng);
            format!("{text} = {result}.")
        })
        .collect();
    lines.join("\n")
}

fn counting(rng: &mut CorpusRng) -> String {
    let step = 1 + rng.below(5);
    let start = rng.below(30);
    let all: Vec<String> = (0..8).map(|i| (start + i * step).to_string()).collect();
    format!("Counting by {}: {}.", NUMBERS[step], all.join(", "))
}

fn word_problem(rng: &mut CorpusRng) -> String {
    let (name, she) = rng.choose(&NAMES);
    let (friend, _) = rng.choose_other(&NAMES, (name, she));
    let pronoun = if she { "She" } else { "He" };
    let (thing, _) = rng.choose(&THINGS);
    let a = 2 + rng.below(8);
    let b = 2 + rng.below(8);
    if rng.below(2) == 0 {
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
