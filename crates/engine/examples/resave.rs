//! Reads a PEFT adapter and writes it again: `cargo run --example resave -- FROM TO`.
//!
//! `tests/golden/record.py check` then compares the log-probabilities that `peft` computes with the
//! copy to the recorded ones.

use std::path::Path;

use tinkex_weights::{AdapterFile, LoraPairRef, write_folder};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut paths = std::env::args().skip(1);
    let (Some(from), Some(to)) = (paths.next(), paths.next()) else {
        return Err("usage: resave FROM TO".into());
    };
    let adapter = AdapterFile::load(from)?;
    let pairs: Vec<LoraPairRef<'_>> = adapter
        .pairs
        .iter()
        .map(|pair| LoraPairRef {
            module: &pair.module,
            inputs: pair.inputs,
            outputs: pair.outputs,
            a: &pair.a,
            b: &pair.b,
        })
        .collect();
    write_folder(Path::new(&to), |folder| AdapterFile::save(folder, &adapter.config, &pairs))?;
    Ok(())
}
