//! Coverage-guided fuzzing of the readers of untrusted bytes.
//!
//! `cargo xtask fuzz guided --target NAME --seconds N` builds this program with coverage counters
//! and runs it. libFuzzer keeps inputs that reach new code and mutates them further. A panic, an
//! integer overflow, a read that takes ten seconds and the use of 2 GiB of memory are failures.

#![no_main]

mod chat_template;
mod files;
#[path = "../../crates/wire/tests/it/fuzz_targets.rs"]
mod wire_targets;

use std::sync::LazyLock;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;

/// Reads the bytes of an input, and panics if a rule is violated.
type Reader = fn(&[u8]);

/// Returns the readers by name.
fn readers() -> Vec<(&'static str, Reader)> {
    vec![
        ("adapter", files::adapter),
        ("config", files::model_config),
        ("gguf", files::gguf),
        ("safetensors", files::safetensors),
        ("template", chat_template::render),
        ("wire", wire),
    ]
}

static READER: LazyLock<Reader> = LazyLock::new(|| {
    let name = std::env::var("TINKEX_FUZZ_TARGET").unwrap_or_default();
    let readers = readers();
    let names: Vec<&str> = readers.iter().map(|(name, _)| *name).collect();
    let found = readers.iter().find(|(other, _)| *other == name);
    found.unwrap_or_else(|| panic!("unknown target {name:?}; expected one of {names:?}")).1
});

/// Decodes a message. The first byte selects its type.
fn wire(input: &[u8]) {
    let Some((first, rest)) = input.split_first() else { return };
    let all = wire_targets::TARGETS;
    let (name, target) = all[usize::from(*first) % all.len()];
    if let Err(error) = target(&Bytes::copy_from_slice(rest)) {
        panic!("{name}: {error}");
    }
}

fuzz_target!(|input: &[u8]| READER(input));
