//! Prints documents of the built-in model's corpus: `cargo run --example corpus -- [SEED] [COUNT]`.

#![expect(clippy::print_stdout, reason = "the example prints its result")]

use tinkex_engine::corpus::{END_OF_TEXT, document};

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>().ok());
    let seed = numbers.next().flatten().unwrap_or(1);
    let count = numbers.next().flatten().unwrap_or(10);
    for index in 0..count {
        println!("{}{END_OF_TEXT}", document(seed, index));
    }
}
