//! [`WeightsCache`]: adapters that are loaded for sampling.

use std::collections::HashMap;
use std::path::Path;

use tinkex_engine::sample::ModelWeights;

use crate::operation::EngineWeights;

/// Maximum number of adapters that are cached for sampling.
const MAX_CACHED_WEIGHTS: usize = 64;

/// Weights in memory, by base model and adapter folder. All requests for the same weights share the
/// weights and their pages in the KV cache.
#[derive(Default)]
pub(super) struct WeightsCache {
    cached: HashMap<EngineWeights, CachedWeights>,
    /// Number of uses so far. Orders the weights by their last use.
    uses: u64,
}

struct CachedWeights {
    weights: ModelWeights,
    /// Approximate memory in bytes.
    bytes: usize,
    /// Value of [`WeightsCache::uses`] at the last use.
    last_used: u64,
}

impl WeightsCache {
    /// Returns weights if they are in memory.
    pub(super) fn get(&mut self, key: &EngineWeights) -> Option<ModelWeights> {
        self.uses += 1;
        let cached = self.cached.get_mut(key)?;
        cached.last_used = self.uses;
        Some(cached.weights.clone())
    }

    /// Caches weights of `bytes` bytes and evicts the least recently used weights beyond `limit`
    /// bytes.
    pub(super) fn insert(
        &mut self,
        key: &EngineWeights,
        weights: ModelWeights,
        bytes: u64,
        limit: usize,
    ) {
        self.uses += 1;
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let cached = CachedWeights { weights, bytes, last_used: self.uses };
        self.cached.insert(key.clone(), cached);
        while self.cached.len() > MAX_CACHED_WEIGHTS || self.bytes() > limit {
            let others = self.cached.iter().filter(|(other, _)| *other != key);
            let oldest = others.min_by_key(|(_, cached)| cached.last_used);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { break };
            self.cached.remove(&oldest);
        }
    }

    fn bytes(&self) -> usize {
        self.cached.values().map(|cached| cached.bytes).fold(0, usize::saturating_add)
    }

    /// Drops the weights of a base model.
    pub(super) fn drop_base(&mut self, base_model: &str) {
        self.cached.retain(|key, _| key.base_model != base_model);
    }

    /// Drops the weights whose folder in `weights_dir` was removed, because no checkpoint and no
    /// sampling session refers to it any more.
    pub(super) fn drop_removed(&mut self, weights_dir: &Path) {
        self.cached.retain(|key, _| {
            key.folder.as_ref().is_none_or(|folder| weights_dir.join(folder).is_dir())
        });
    }
}

#[cfg(test)]
mod tests {
    use tinkex_engine::{Engine, EngineOptions};

    use super::*;

    fn key(folder: &str) -> EngineWeights {
        EngineWeights { base_model: "m".to_owned(), folder: Some(folder.to_owned()) }
    }

    #[test]
    fn the_least_recently_used_weights_are_evicted() {
        let engine = Engine::builtin(EngineOptions::default()).unwrap();
        let mut cache = WeightsCache::default();
        for folder in ["a", "b"] {
            cache.insert(&key(folder), engine.base_weights(), 40, 100);
        }
        assert!(cache.get(&key("a")).is_some());
        cache.insert(&key("c"), engine.base_weights(), 40, 100);
        assert!(cache.get(&key("b")).is_none());
        assert!(cache.get(&key("a")).is_some());
        // Weights above the limit are kept while the cache has no other weights.
        cache.insert(&key("d"), engine.base_weights(), 400, 100);
        assert!(cache.get(&key("a")).is_none() && cache.get(&key("d")).is_some());
    }

    #[test]
    fn weights_of_removed_folders_are_dropped() {
        let engine = Engine::builtin(EngineOptions::default()).unwrap();
        let folders = tempfile::tempdir().unwrap();
        std::fs::create_dir(folders.path().join("kept")).unwrap();
        let mut cache = WeightsCache::default();
        for folder in ["kept", "removed"] {
            cache.insert(&key(folder), engine.base_weights(), 1, 100);
        }
        cache.drop_removed(folders.path());
        assert!(cache.get(&key("kept")).is_some() && cache.get(&key("removed")).is_none());
    }
}
