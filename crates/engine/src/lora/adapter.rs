//! [`Adapter`]: the trained weights of a LoRA adapter, by target module.

use super::{Delta, LayerDeltas, PackedLora};
use crate::kernel::Kernel;
use crate::model::{AdapterGradients, LayerGradients};
use crate::rng::ChaCha8;
use crate::{Error, Result};
use tinkex_weights::ModelConfig;

/// Configuration of a new LoRA adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank of the A and B matrices: 1 to 256, and at most the model's hidden size. Defaults to 32.
    pub rank: usize,
    /// Scale numerator: a delta is multiplied by `alpha / rank`. Defaults to 32.
    pub alpha: f32,
    /// Seed of the initial A matrices. Equal seeds give equal adapters. Defaults to 0.
    pub seed: u64,
    /// Whether to train the query, key, value and output projections. Defaults to true.
    pub attention: bool,
    /// Whether to train the gate, up and down projections of the MLP. Defaults to true.
    pub mlp: bool,
    /// Whether to train the unembedding (`lm_head`). Defaults to true.
    pub unembedding: bool,
}

impl Default for LoraConfig {
    /// Returns rank 32, alpha 32 and seed 0, with all modules trained.
    fn default() -> Self {
        Self { rank: 32, alpha: 32.0, seed: 0, attention: true, mlp: true, unembedding: true }
    }
}

/// A linear layer of a decoder layer that can be adapted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerModule {
    Query,
    Key,
    Value,
    Output,
    Gate,
    Up,
    Down,
}

impl LayerModule {
    pub(crate) const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// Returns the module's name within its layer.
    fn suffix(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::Output => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    pub(super) fn in_attention(self) -> bool {
        matches!(self, Self::Query | Self::Key | Self::Value | Self::Output)
    }

    /// Returns the numbers of inputs and outputs.
    fn size(self, config: &ModelConfig) -> (usize, usize) {
        let queries = config.heads * config.head_dim;
        let keys = config.kv_heads * config.head_dim;
        let hidden = config.hidden_size;
        let inner = config.intermediate_size;
        match self {
            Self::Query => (hidden, queries),
            Self::Key | Self::Value => (hidden, keys),
            Self::Output => (queries, hidden),
            Self::Gate | Self::Up => (hidden, inner),
            Self::Down => (inner, hidden),
        }
    }
}

/// A module of the model that can be adapted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetModule {
    Layer(usize, LayerModule),
    Unembedding,
}

impl TargetModule {
    /// Returns all target modules of a model, in the order of the forward pass.
    pub(crate) fn all(config: &ModelConfig) -> impl Iterator<Item = Self> + use<> {
        (0..config.layers)
            .flat_map(|layer| LayerModule::ALL.map(|layer_module| Self::Layer(layer, layer_module)))
            .chain([Self::Unembedding])
    }

    /// Returns the module's name, for example `model.layers.0.self_attn.q_proj` or `lm_head`.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Layer(layer, layer_module) => {
                format!("model.layers.{layer}.{}", layer_module.suffix())
            }
            Self::Unembedding => "lm_head".to_owned(),
        }
    }

    /// Returns the numbers of inputs and outputs.
    pub(crate) fn size(self, config: &ModelConfig) -> (usize, usize) {
        match self {
            Self::Layer(_, layer_module) => layer_module.size(config),
            Self::Unembedding => (config.hidden_size, config.vocab_size),
        }
    }
}

/// The A and B matrices of one target module, row-major.
#[derive(Clone, Debug)]
pub(crate) struct AdapterPair {
    pub(crate) target: TargetModule,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// `rank × inputs`.
    pub(crate) a: Vec<f32>,
    /// `outputs × rank`.
    pub(crate) b: Vec<f32>,
}

/// The weights of an adapter.
#[derive(Clone, Debug)]
pub(crate) struct Adapter {
    pub(crate) config: LoraConfig,
    pub(crate) pairs: Vec<AdapterPair>,
}

impl Adapter {
    /// Creates an adapter with A uniform in ±1/√inputs and B zero, so that it does not change the
    /// model's output yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank or alpha out of range, or if no module would be trained.
    pub(crate) fn new(model: &ModelConfig, config: LoraConfig) -> Result<Self> {
        check(model, &config)?;
        let wanted = |target: &TargetModule| match target {
            TargetModule::Layer(_, layer_module) if layer_module.in_attention() => config.attention,
            TargetModule::Layer(..) => config.mlp,
            TargetModule::Unembedding => config.unembedding,
        };
        let pairs = TargetModule::all(model)
            .filter(wanted)
            .map(|target| {
                let (inputs, outputs) = target.size(model);
                // Each module has its own random stream, so that its initial values do not depend
                // on which other modules are trained.
                let mut rng = ChaCha8::new(config.seed, hash(&target.name()));
                #[expect(clippy::cast_precision_loss, reason = "widths are below 2²⁴")]
                let bound = 1.0 / (inputs as f32).sqrt();
                let a = (0..config.rank * inputs)
                    .map(|_| (2.0 * rng.uniform() - 1.0) * bound)
                    .collect();
                AdapterPair { target, inputs, outputs, a, b: vec![0.0; outputs * config.rank] }
            })
            .collect();
        Ok(Self { config, pairs })
    }

    /// Packs the adapter for computation.
    pub(crate) fn packed(&self, model: &ModelConfig) -> PackedLora {
        use LayerModule::{Down, Gate, Key, Output, Query, Up, Value};
        let size: usize = self.pairs.iter().map(|pair| pair.a.len() + pair.b.len()).sum();
        let kernel = &Kernel::for_packing(size * size_of::<f32>());
        let layers = (0..model.layers).map(|layer| LayerDeltas {
            qkv: self.delta(kernel, model, layer, &[Query, Key, Value]),
            o: self.delta(kernel, model, layer, &[Output]),
            gate_up: self.delta(kernel, model, layer, &[Gate, Up]),
            down: self.delta(kernel, model, layer, &[Down]),
        });
        PackedLora {
            layers: layers.collect(),
            unembedding: self.pair(TargetModule::Unembedding).map(|pair| {
                let parts = [(&pair.a[..], &pair.b[..])];
                Delta::new(kernel, self.config.rank, self.scale(), pair.inputs, &parts)
            }),
        }
    }

    /// Returns the factor `alpha / rank` of the deltas.
    #[expect(clippy::cast_precision_loss, reason = "ranks are small")]
    fn scale(&self) -> f32 {
        self.config.alpha / self.config.rank as f32
    }

    fn pair(&self, target: TargetModule) -> Option<&AdapterPair> {
        self.pairs.iter().find(|pair| pair.target == target)
    }

    /// Returns the delta of several modules with the same input. Modules that are not adapted have
    /// zero matrices. Returns `None` if none of them is adapted.
    fn delta(
        &self,
        kernel: &Kernel,
        model: &ModelConfig,
        layer: usize,
        layer_modules: &[LayerModule],
    ) -> Option<Delta> {
        let pairs: Vec<Option<&AdapterPair>> = layer_modules
            .iter()
            .map(|layer_module| self.pair(TargetModule::Layer(layer, *layer_module)))
            .collect();
        if pairs.iter().all(Option::is_none) {
            return None;
        }
        let rank = self.config.rank;
        let zeros: Vec<(Vec<f32>, Vec<f32>)> = layer_modules
            .iter()
            .map(|layer_module| {
                let (inputs, outputs) = layer_module.size(model);
                (vec![0.0; inputs * rank], vec![0.0; outputs * rank])
            })
            .collect();
        let parts: Vec<(&[f32], &[f32])> = pairs
            .iter()
            .zip(&zeros)
            .map(|(pair, zeros)| match pair {
                Some(pair) => (&pair.a[..], &pair.b[..]),
                None => (&zeros.0[..], &zeros.1[..]),
            })
            .collect();
        Some(Delta::new(kernel, rank, self.scale(), layer_modules[0].size(model).0, &parts))
    }

    /// Adds the gradients of a backward pass to `sums`, which contains the gradients of A and B of
    /// each pair.
    pub(crate) fn add_gradients(&self, grads: &AdapterGradients, sums: &mut [[Vec<f32>; 2]]) {
        let rank = self.config.rank;
        for (pair, sums) in self.pairs.iter().zip(sums) {
            let (grad, part) = match pair.target {
                TargetModule::Layer(layer, layer_module) => {
                    let LayerGradients { qkv, o, gate_up, down } = &grads.layers[layer];
                    match layer_module {
                        LayerModule::Query => (qkv, 0),
                        LayerModule::Key => (qkv, 1),
                        LayerModule::Value => (qkv, 2),
                        LayerModule::Output => (o, 0),
                        LayerModule::Gate => (gate_up, 0),
                        LayerModule::Up => (gate_up, 1),
                        LayerModule::Down => (down, 0),
                    }
                }
                TargetModule::Unembedding => (&grads.unembedding, 0),
            };
            let Some(grad) = grad else { continue };
            let len = rank * pair.inputs;
            for (sum, grad) in sums[0].iter_mut().zip(&grad.a[part * len..(part + 1) * len]) {
                *sum += grad;
            }
            for (sum, grad) in sums[1].iter_mut().zip(&grad.b[part]) {
                *sum += grad;
            }
        }
    }

    /// Returns zero gradients of A and B of each pair.
    pub(crate) fn zero_gradients(&self) -> Vec<[Vec<f32>; 2]> {
        let zeros = |pair: &AdapterPair| [vec![0.0; pair.a.len()], vec![0.0; pair.b.len()]];
        self.pairs.iter().map(zeros).collect()
    }
}

/// Checks the ranges of a configuration and that it trains at least one module.
pub(super) fn check(model: &ModelConfig, config: &LoraConfig) -> Result<()> {
    let max_rank = model.hidden_size.min(256);
    if !(1..=max_rank).contains(&config.rank) {
        let reason = match config.rank {
            0 => format!("0, expected 1 to {max_rank}"),
            rank => format!("{rank} exceeds max LoRA rank, expected 1 to {max_rank}"),
        };
        return Err(Error::invalid("rank", reason));
    }
    if !config.alpha.is_finite() {
        return Err(Error::invalid("alpha", format!("{} is not finite", config.alpha)));
    }
    if !(config.attention || config.mlp || config.unembedding) {
        let reason = "no module would be trained; enable attention, mlp or unembedding";
        return Err(Error::invalid("lora", reason));
    }
    Ok(())
}

/// Returns the FNV-1a hash, which is stable across machines and versions.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
