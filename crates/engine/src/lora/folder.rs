//! Conversion between [`Adapter`] and PEFT folders.

use std::path::Path;

use super::adapter::{Adapter, AdapterPair, LoraConfig, TargetModule, check};
use crate::{Error, Result};
use tinkex_weights::{AdapterFile, LoraPairRef, ModelConfig, PeftConfig};

impl LoraConfig {
    /// Checks that an adapter can be loaded into a model, without loading the model. Returns the
    /// configuration that the adapter has, with seed 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the rank is out of range, or the adapter has no module, or a module that
    /// the model does not have; [`Error::Shape`] if a pair does not fit its module.
    pub fn of_adapter(model: &ModelConfig, file: AdapterFile) -> Result<Self> {
        let config = Adapter::from_file(model, file, 0)?.config;
        check(model, &config)?;
        Ok(config)
    }
}

impl Adapter {
    /// Creates an adapter from a file. `seed` is only recorded in its configuration.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the file adapts no module, or a module that the model does not
    /// have;
    /// [`Error::Shape`] if a pair does not fit its module.
    pub(crate) fn from_file(model: &ModelConfig, file: AdapterFile, seed: u64) -> Result<Self> {
        let mut targets: Vec<TargetModule> = TargetModule::all(model).collect();
        let mut pairs = Vec::with_capacity(file.pairs.len());
        for pair in file.pairs {
            let Some(at) = targets.iter().position(|target| target.name() == pair.module) else {
                let reason = format!("the model has no module {}", pair.module);
                return Err(Error::invalid("adapter", reason));
            };
            let target = targets.remove(at);
            let (inputs, outputs) = target.size(model);
            if (inputs, outputs) != (pair.inputs, pair.outputs) {
                return Err(Error::Shape {
                    what: format!("adapter of {}", pair.module),
                    expected: vec![outputs, inputs],
                    got: vec![pair.outputs, pair.inputs],
                });
            }
            pairs.push(AdapterPair { target, inputs, outputs, a: pair.a, b: pair.b });
        }
        if pairs.is_empty() {
            return Err(Error::invalid("adapter", "the file contains no LoRA matrices"));
        }
        // Sort in the order of the forward pass, like new adapters.
        let order: Vec<TargetModule> = TargetModule::all(model).collect();
        pairs.sort_by_key(|pair| order.iter().position(|target| *target == pair.target));
        let adapts_layers = |in_attention: bool| {
            pairs.iter().any(|pair| match pair.target {
                TargetModule::Layer(_, module) => module.in_attention() == in_attention,
                TargetModule::Unembedding => false,
            })
        };
        let config = LoraConfig {
            rank: file.config.rank,
            #[expect(clippy::cast_possible_truncation, reason = "adapters are f32")]
            alpha: file.config.alpha as f32,
            seed,
            attention: adapts_layers(true),
            mlp: adapts_layers(false),
            unembedding: pairs.iter().any(|pair| pair.target == TargetModule::Unembedding),
        };
        Ok(Self { config, pairs })
    }

    /// Writes the two files of a PEFT adapter into an existing folder.
    pub(crate) fn save(&self, folder: &Path, base_model: &str) -> Result<()> {
        let modules: Vec<String> = self.pairs.iter().map(|pair| pair.target.name()).collect();
        let mut suffixes: Vec<String> = modules
            .iter()
            .filter_map(|module| module.rsplit('.').next())
            .map(str::to_owned)
            .collect();
        suffixes.sort();
        suffixes.dedup();
        let config = PeftConfig {
            rank: self.config.rank,
            alpha: f64::from(self.config.alpha),
            base_model: base_model.to_owned(),
            target_modules: suffixes,
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
        Ok(AdapterFile::save(folder, &config, &pairs)?)
    }
}
