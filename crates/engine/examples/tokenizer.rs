//! Trains the built-in model's tokenizer: `cargo run --release --example tokenizer -- FILE`.

use tinkex_engine::corpus::{SPECIALS, document};
use tinkex_engine::tokenizer::Tokenizer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: tokenizer FILE")?;
    let texts: Vec<String> = (0..4000).map(|index| document(1, index)).collect();
    let tokenizer = Tokenizer::train(texts.iter().map(String::as_str), 1024, &SPECIALS)?;
    tokenizer.write(path)?;
    Ok(())
}
