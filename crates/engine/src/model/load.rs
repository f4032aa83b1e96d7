//! From a folder of tensors to packed weights.

use super::{Layer, Linear, Model};
use crate::Result;
use crate::file::{ModelConfig, ModelFolder, TensorFile};
use crate::kernel::{Kernel, Panels, Precision};

/// Where weights come from.
pub(crate) trait Source: Sync {
    /// All values of the tensor `name`.
    fn values(&self, name: &str) -> Result<std::borrow::Cow<'_, [f32]>>;
}

impl Source for ModelFolder {
    fn values(&self, name: &str) -> Result<std::borrow::Cow<'_, [f32]>> {
        self.tensor(name)?.to_f32()
    }
}

impl Source for TensorFile {
    fn values(&self, name: &str) -> Result<std::borrow::Cow<'_, [f32]>> {
        self.tensor(name)?.to_f32()
    }
}

impl Model {
    /// Reads and packs the weights of a folder that was checked when it was opened.
    pub(crate) fn load(
        config: &ModelConfig,
        source: &impl Source,
        precision: Precision,
        kernel: Kernel,
    ) -> Result<Self> {
        let heads = config.heads * config.head_dim;
        let keys = config.kv_heads * config.head_dim;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let pack = |name: &str, rows: usize| -> Result<Panels> {
            Ok(Panels::from_rows(&source.values(name)?, rows, hidden, precision))
        };
        let layers = kernel.pool().map(config.layers, |index| {
            let load = Loader { source, precision, prefix: format!("model.layers.{index}.") };
            {
                let norm = |name: &str| load.vector(name);
                let qk = |name: &str| config.qk_norm.then(|| load.vector(name)).transpose();
                Ok(Layer {
                    attention_norm: norm("input_layernorm.weight")?,
                    qkv: load.linear(
                        &[
                            ("self_attn.q_proj", heads),
                            ("self_attn.k_proj", keys),
                            ("self_attn.v_proj", keys),
                        ],
                        hidden,
                        config.qkv_bias,
                    )?,
                    query_norm: qk("self_attn.q_norm.weight")?,
                    key_norm: qk("self_attn.k_norm.weight")?,
                    o: load.linear(&[("self_attn.o_proj", hidden)], heads, config.o_bias)?,
                    mlp_norm: norm("post_attention_layernorm.weight")?,
                    gate_up: load.linear(
                        &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)],
                        hidden,
                        config.mlp_bias,
                    )?,
                    down: load.linear(&[("mlp.down_proj", hidden)], inner, config.mlp_bias)?,
                })
            }
        });
        let layers = layers.into_iter().collect::<Result<Vec<Layer>>>()?;
        #[expect(clippy::cast_possible_truncation, reason = "computing is done in f32")]
        let frequencies =
            config.rope.frequencies(config.head_dim).into_iter().map(|x| x as f32).collect();
        Ok(Self {
            embedding: pack("model.embed_tokens.weight", config.vocab_size)?,
            layers,
            norm: source.values("model.norm.weight")?.into_owned(),
            unembedding: if config.tied {
                None
            } else {
                Some(pack("lm_head.weight", config.vocab_size)?)
            },
            frequencies,
            config: config.clone(),
            kernel,
        })
    }
}

struct Loader<'a, S> {
    source: &'a S,
    precision: Precision,
    prefix: String,
}

impl<S: Source> Loader<'_, S> {
    fn vector(&self, name: &str) -> Result<Vec<f32>> {
        Ok(self.source.values(&format!("{}{name}", self.prefix))?.into_owned())
    }

    /// Products of the same input, stacked.
    fn linear(&self, parts: &[(&str, usize)], inputs: usize, bias: bool) -> Result<Linear> {
        let mut matrices = Vec::with_capacity(parts.len());
        for (name, _) in parts {
            matrices.push(self.source.values(&format!("{}{name}.weight", self.prefix))?);
        }
        let rows = parts.iter().map(|(_, outputs)| outputs).sum();
        let weights = Panels::pack(rows, inputs, self.precision, |mut row, out| {
            for (matrix, (_, outputs)) in matrices.iter().zip(parts) {
                if row < *outputs {
                    out.copy_from_slice(&matrix[row * inputs..(row + 1) * inputs]);
                    return;
                }
                row -= outputs;
            }
        });
        let mut biases = Vec::new();
        if bias {
            for (name, _) in parts {
                biases.extend(self.vector(&format!("{name}.bias"))?);
            }
        }
        Ok(Linear { weights, bias: bias.then_some(biases) })
    }
}
