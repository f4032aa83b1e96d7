//! Adapters as PEFT folders.

use super::adapter::{Adapter, LoraConfig, Pair, Place};
use crate::file::{AdapterFile, HeadName, LoraPairRef, ModelConfig, PeftConfig};
use crate::{Error, Result};
use std::path::Path;

impl Adapter {
    /// From a file, whose pairs must fit the model.
    pub(crate) fn from_file(model: &ModelConfig, file: AdapterFile, seed: u64) -> Result<Self> {
        let mut places: Vec<Place> = Place::all(model).collect();
        let mut pairs = Vec::with_capacity(file.pairs.len());
        for pair in file.pairs {
            let Some(at) = places.iter().position(|place| place.module() == pair.module) else {
                let why = format!("the model has no module {} to adapt", pair.module);
                return Err(Error::invalid("adapter", why));
            };
            let place = places.remove(at);
            let (inputs, outputs) = place.size(model);
            if (inputs, outputs) != (pair.inputs, pair.outputs) {
                return Err(Error::Shape {
                    what: format!("the adapter of {}", pair.module),
                    expected: vec![outputs, inputs],
                    got: vec![pair.outputs, pair.inputs],
                });
            }
            pairs.push(Pair { place, inputs, outputs, a: pair.a, b: pair.b });
        }
        if pairs.is_empty() {
            return Err(Error::invalid("adapter", "it adapts nothing"));
        }
        // In the order of use, as fresh adapters are.
        let order: Vec<Place> = Place::all(model).collect();
        pairs.sort_by_key(|pair| order.iter().position(|place| *place == pair.place));
        let has = |wanted: fn(Place) -> bool| pairs.iter().any(|pair| wanted(pair.place));
        let config = LoraConfig {
            rank: file.config.rank,
            #[expect(clippy::cast_possible_truncation, reason = "computing is done in f32")]
            alpha: file.config.alpha as f32,
            seed,
            attention: has(
                |place| matches!(place, Place::Layer(_, target) if target.in_attention()),
            ),
            mlp: has(|place| matches!(place, Place::Layer(_, target) if !target.in_attention())),
            unembedding: has(|place| place == Place::Unembedding),
        };
        Ok(Self { config, pairs })
    }

    /// Writes the two files of a PEFT adapter into a folder that exists.
    pub(crate) fn save(&self, folder: &Path, base_model: &str, head: HeadName) -> Result<()> {
        let modules: Vec<String> = self.pairs.iter().map(|pair| pair.place.module()).collect();
        let mut targets: Vec<String> = modules
            .iter()
            .filter_map(|module| module.rsplit('.').next())
            .map(str::to_owned)
            .collect();
        targets.sort();
        targets.dedup();
        let config = PeftConfig {
            rank: self.config.rank,
            alpha: f64::from(self.config.alpha),
            base_model: base_model.to_owned(),
            target_modules: targets,
        };
        let pairs: Vec<LoraPairRef<'_>> = self
            .pairs
            .iter()
            .zip(&modules)
            .map(|(pair, module)| LoraPairRef {
                module,
                inputs: pair.inputs,
                outputs: pair.outputs,
                a: &pair.a,
                b: &pair.b,
            })
            .collect();
        AdapterFile::save(folder, &config, &pairs, head)
    }
}
