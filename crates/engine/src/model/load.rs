//! Loads tensors and packs them into a [`Model`].

use tinkex_weights::{ModelConfig, ModelFolder, StoredTensor, TensorFile};

use super::{Layer, Linear, Model};
use crate::kernel::{Kernel, Panels, Precision};
use crate::memory::probe;
use crate::{Error, Result};

/// Provides tensors by name.
pub(crate) trait TensorSource: Sync {
    /// Returns the values of tensor `name`.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) if there is no such tensor.
    fn values(&self, name: &str) -> Result<SourceTensor<'_>>;
}

/// The values of a tensor, converted to f32 when they are read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SourceTensor<'a> {
    F32(&'a [f32]),
    Stored(StoredTensor<'a>),
}

impl SourceTensor<'_> {
    /// Reads elements from index `start` on into `out`. Stored elements must be finite.
    fn read(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let range = start..start + out.len();
        match self {
            Self::F32(values) => out.copy_from_slice(&values[range]),
            Self::Stored(tensor) => {
                tensor.read_f32(range, out)?;
                tensor.check_finite(start, out)?;
            }
        }
        Ok(())
    }

    /// Returns all `len` values.
    fn all(&self, len: usize) -> Result<Vec<f32>> {
        let mut out = vec![0.0; len];
        self.read(0, &mut out)?;
        Ok(out)
    }
}

impl TensorSource for ModelFolder {
    fn values(&self, name: &str) -> Result<SourceTensor<'_>> {
        Ok(SourceTensor::Stored(self.tensor(name)?))
    }
}

impl TensorSource for TensorFile {
    fn values(&self, name: &str) -> Result<SourceTensor<'_>> {
        Ok(SourceTensor::Stored(self.tensor(name)?))
    }
}

impl Model {
    /// Loads and packs the weights of a model.
    ///
    /// The shapes and types of the tensors must have been checked against `config`.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) if a tensor is missing, cannot be read, or contains a
    /// value that is not finite, or
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system cannot provide the memory.
    pub(crate) fn load(
        config: &ModelConfig,
        source: &impl TensorSource,
        precision: Precision,
        kernel: Kernel,
    ) -> Result<Self> {
        let bytes = config.tensors().fold(0_usize, |sum, (_, shape)| {
            let len = shape.iter().fold(precision.bytes(), |len, side| len.saturating_mul(*side));
            sum.saturating_add(len)
        });
        probe("the model's weights", bytes)?;
        let query_width = config.heads * config.head_dim;
        let kv_width = config.kv_heads * config.head_dim;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let pack = |name: &str, rows: usize| -> Result<Panels> {
            let values = source.values(name)?;
            let read = |first: usize, out: &mut [f32]| values.read(first * hidden, out);
            Panels::pack(&kernel, rows, hidden, precision, read)
        };
        let layers = kernel.pool().map(config.layers, |index| {
            let loader = LayerLoader {
                source,
                precision,
                kernel: &kernel,
                prefix: format!("model.layers.{index}."),
            };
            let norm = |name: &str| loader.vector(name, hidden);
            let qk = |name: &str| {
                config.qk_norm.then(|| loader.vector(name, config.head_dim)).transpose()
            };
            Ok(Layer {
                attention_norm: norm("input_layernorm.weight")?,
                qkv: loader.linear(
                    &[
                        ("self_attn.q_proj", query_width),
                        ("self_attn.k_proj", kv_width),
                        ("self_attn.v_proj", kv_width),
                    ],
                    hidden,
                    config.qkv_bias,
                )?,
                query_norm: qk("self_attn.q_norm.weight")?,
                key_norm: qk("self_attn.k_norm.weight")?,
                o: loader.linear(&[("self_attn.o_proj", hidden)], query_width, config.o_bias)?,
                mlp_norm: norm("post_attention_layernorm.weight")?,
                gate_up: loader.linear(
                    &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)],
                    hidden,
                    config.mlp_bias,
                )?,
                down: loader.linear(&[("mlp.down_proj", hidden)], inner, config.mlp_bias)?,
            })
        });
        let layers = layers.into_iter().collect::<Result<Vec<Layer>>>()?;
        #[expect(clippy::cast_possible_truncation, reason = "activations are f32")]
        let frequencies =
            config.rope.frequencies(config.head_dim).into_iter().map(|x| x as f32).collect();
        Ok(Self {
            embedding: pack("model.embed_tokens.weight", config.vocab_size)?,
            layers,
            norm: source.values("model.norm.weight")?.all(hidden)?,
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

/// Loads the tensors of one layer, whose names start with `prefix`.
struct LayerLoader<'a, S> {
    source: &'a S,
    precision: Precision,
    kernel: &'a Kernel,
    prefix: String,
}

impl<S: TensorSource> LayerLoader<'_, S> {
    /// Loads the tensor `name`, a vector of `len` elements.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        self.source.values(&format!("{}{name}", self.prefix))?.all(len)
    }

    /// Loads linear layers with the same input into one stacked matrix.
    fn linear(&self, parts: &[(&str, usize)], inputs: usize, bias: bool) -> Result<Linear> {
        let mut matrices = Vec::with_capacity(parts.len());
        for (name, _) in parts {
            matrices.push(self.source.values(&format!("{}{name}.weight", self.prefix))?);
        }
        let rows = parts.iter().map(|(_, outputs)| outputs).sum();
        let read = |mut first: usize, mut out: &mut [f32]| {
            // The rows may belong to several of the stacked matrices.
            for (matrix, (_, outputs)) in matrices.iter().zip(parts) {
                if first < *outputs {
                    let len = out.len().min((outputs - first) * inputs);
                    let (own, rest) = out.split_at_mut(len);
                    matrix.read(first * inputs, own)?;
                    (out, first) = (rest, *outputs);
                }
                first -= outputs;
            }
            Ok::<_, Error>(())
        };
        let weights = Panels::pack(self.kernel, rows, inputs, self.precision, read)?;
        let mut biases = Vec::new();
        if bias {
            for (name, outputs) in parts {
                biases.extend(self.vector(&format!("{name}.bias"), *outputs)?);
            }
        }
        Ok(Linear { weights, bias: bias.then_some(biases) })
    }
}
