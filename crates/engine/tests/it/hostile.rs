//! Parsers of untrusted files must not panic on mutated input.

use std::fs;

use proptest::prelude::*;
use tinkex_engine::optim::{Optimizer, OptimizerKind};
use tinkex_engine::tokenizer::{Tokenizer, Vocabulary};
use tinkex_engine::{Engine, EngineOptions};
use tinkex_weights::{AdapterFile, ModelConfig, PeftConfig};

use crate::golden::{copy_of, folder};

/// Overwrites some bytes of a file, and removes the last `cut` bytes if that is less than an eighth
/// of it.
fn mutated(mut bytes: Vec<u8>, changes: &[(prop::sample::Index, u8)], cut: usize) -> Vec<u8> {
    for (at, value) in changes {
        let at = at.index(bytes.len());
        bytes[at] = *value;
    }
    if cut < bytes.len() / 8 {
        bytes.truncate(bytes.len() - cut);
    }
    bytes
}

fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    // Digits and punctuation often keep the JSON valid but change its meaning; other bytes mostly
    // break the syntax.
    let value = prop_oneof![prop::sample::select(b"0123456789-\",:{}[]eE.".to_vec()), any::<u8>()];
    prop::collection::vec((any::<prop::sample::Index>(), value), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn mutated_configurations_and_tokenizers_do_not_panic(
        changes in changes(),
        cut in 0_usize..4000,
    ) {
        let read = |path: &str| fs::read(folder(path)).unwrap();
        for path in ["llama/config.json", "qwen3/config.json"] {
            let _ = ModelConfig::parse(&mutated(read(path), &changes, cut), "x");
        }
        let tokenizer = mutated(read("tokenizer.json"), &changes, cut);
        let _ = Tokenizer::parse(&tokenizer, "x");
        let _ = Vocabulary::parse(&tokenizer, "x");
        let copy = tempfile::tempdir().unwrap();
        let path = copy.path().join("adapter_config.json");
        let config = mutated(read("llama/adapter/adapter_config.json"), &changes, cut);
        fs::write(&path, config).unwrap();
        let _ = PeftConfig::read(&path);
    }

    #[test]
    fn mutated_adapters_and_optimizer_states_do_not_panic(
        changes in changes(),
        cut in 0_usize..4000,
    ) {
        let copy = tempfile::tempdir().unwrap();
        let from = folder("qwen2/adapter");
        let to = copy.path();
        fs::copy(from.join("adapter_config.json"), to.join("adapter_config.json")).unwrap();
        let tensors = fs::read(from.join("adapter_model.safetensors")).unwrap();
        let tensors = mutated(tensors, &changes, cut);
        fs::write(to.join("adapter_model.safetensors"), tensors).unwrap();
        if let Ok(adapter) = AdapterFile::load(copy.path()) {
            for pair in adapter.pairs {
                prop_assert_eq!(pair.a.len(), adapter.config.rank * pair.inputs);
                prop_assert!(pair.b.iter().all(|value| value.is_finite()));
            }
        }
        let path = copy.path().join("optimizer.safetensors");
        Optimizer::new(OptimizerKind::Adam, &[6]).save(&path, &[("w", &[2, 3])]).unwrap();
        fs::write(&path, mutated(fs::read(&path).unwrap(), &changes, cut)).unwrap();
        let _ = Optimizer::load(&path, OptimizerKind::Adam, &[("w", &[2, 3])]);
    }

    #[test]
    fn mutated_shard_indexes_do_not_panic(changes in changes(), cut in 0_usize..4000) {
        let copy = copy_of("qwen2");
        let index = copy.path().join("model.safetensors.index.json");
        fs::write(&index, mutated(fs::read(&index).unwrap(), &changes, cut)).unwrap();
        let _ = Engine::open(copy.path(), EngineOptions { threads: 1, ..EngineOptions::default() });
    }
}
