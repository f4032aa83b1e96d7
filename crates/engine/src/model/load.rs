//! Loads tensors and packs them into a [`Model`].

use tinkex_weights::{
    BlockFormat, DType, GgufModel, ModelConfig, ModelFolder, StoredTensor, TensorFile,
};

use super::read_ahead::ReadAhead;
use super::{Layer, Linear, Model};
use crate::Result;
use crate::kernel::{Isa, Kernel, MatrixSource, Panels, ReadRows, WeightFormat, row_ops};
use crate::memory::probe;
use crate::quantization::WeightStorage;

/// Provides tensors by name.
pub(crate) trait TensorSource: Sync {
    /// Returns tensor `name`.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) if there is no such tensor.
    fn values(&self, name: &str) -> Result<SourceTensor<'_>>;

    /// Returns whether matrices that are not quantized keep the precision in which they are stored,
    /// instead of the precision that the caller asks for.
    fn keeps_precision(&self) -> bool {
        false
    }
}

/// A tensor in memory or in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SourceTensor<'a> {
    #[cfg_attr(
        not(feature = "builtin-model-tools"),
        expect(dead_code, reason = "only the built-in model is trained in memory")
    )]
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

impl TensorSource for GgufModel {
    fn values(&self, name: &str) -> Result<SourceTensor<'_>> {
        Ok(SourceTensor::Stored(self.tensor(name)?))
    }

    fn keeps_precision(&self) -> bool {
        true
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
        storage: impl Into<WeightStorage>,
        kernel: Kernel,
    ) -> Result<Self> {
        let storage = storage.into();
        let mut bytes = 0_usize;
        let mut tensors = Vec::new();
        for (name, shape) in config.tensors() {
            if let [rows, cols] = *shape {
                let matrix = Matrix::new(source, &name, rows, cols, storage)?;
                bytes = bytes.saturating_add(matrix.bytes());
                if let SourceTensor::Stored(tensor) = matrix.tensor {
                    // Embedding and unembedding are packed after the layers.
                    let layer = name.split('.').find_map(|part| part.parse::<usize>().ok());
                    tensors.push((layer.unwrap_or(usize::MAX), tensor));
                }
            }
        }
        probe("the model's weights", bytes)?;
        // The layers are packed in order. Within a layer, reading in the order of the file is faster.
        tensors.sort_by_key(|(layer, tensor)| (*layer, tensor.position()));
        let tensors: Vec<StoredTensor<'_>> =
            tensors.into_iter().map(|(_, tensor)| tensor).collect();
        ReadAhead::run(&tensors, |progress| {
            Self::load_weights(config, source, storage, kernel, progress)
        })
    }

    /// Packs the weights.
    fn load_weights(
        config: &ModelConfig,
        source: &impl TensorSource,
        storage: WeightStorage,
        kernel: Kernel,
        progress: &ReadAhead<'_>,
    ) -> Result<Self> {
        let query_width = config.heads * config.head_dim;
        let kv_width = config.kv_heads * config.head_dim;
        let hidden = config.hidden_size;
        let inner = config.intermediate_size;
        let pack = |name: &str, rows: usize| -> Result<Panels> {
            let matrix = Matrix::new(source, name, rows, hidden, storage)?;
            pack(&kernel, hidden, &[matrix], progress)
        };
        let layers = kernel.pool().map(config.layers, |index| {
            let loader = LayerLoader {
                source,
                storage,
                kernel: &kernel,
                progress,
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
    storage: WeightStorage,
    kernel: &'a Kernel,
    progress: &'a ReadAhead<'a>,
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
        for &(name, outputs) in parts {
            let name = format!("{}{name}.weight", self.prefix);
            matrices.push(Matrix::new(self.source, &name, outputs, inputs, self.storage)?);
        }
        let weights = pack(self.kernel, inputs, &matrices, self.progress)?;
        let mut biases = Vec::new();
        if bias {
            for (name, outputs) in parts {
                biases.extend(self.vector(&format!("{name}.bias"), *outputs)?);
            }
        }
        Ok(Linear { weights, bias: bias.then_some(biases) })
    }
}

/// A matrix to pack, and the format in which it is packed.
struct Matrix<'a> {
    tensor: SourceTensor<'a>,
    rows: usize,
    cols: usize,
    format: WeightFormat,
    /// Format that the values are quantized to while they are read.
    quantized: Option<BlockFormat>,
}

impl<'a> Matrix<'a> {
    fn new(
        source: &'a impl TensorSource,
        name: &str,
        rows: usize,
        cols: usize,
        storage: WeightStorage,
    ) -> Result<Self> {
        let tensor = source.values(name)?;
        // Weights in memory are trained, and not quantized.
        let (stored, quantization) = match tensor {
            SourceTensor::Stored(tensor) => (tensor.dtype(), storage.quantization),
            SourceTensor::F32(_) => (DType::F32, None),
        };
        // Rounding errors of the embedding and of the unembedding affect the result more than
        // rounding errors of one layer.
        let is_embedding = !name.contains(".layers.");
        let quantized = quantization
            .filter(|_| !matches!(stored, DType::Block(_)))
            .and_then(|to| to.block_format(cols, is_embedding));
        let format = match (stored, quantized) {
            (DType::Block(format), _) | (_, Some(format)) => weight_format(format),
            (DType::F32, None) if source.keeps_precision() => WeightFormat::F32,
            (DType::F16, None) if source.keeps_precision() => WeightFormat::F16,
            (DType::Bf16, None) if source.keeps_precision() => WeightFormat::Bf16,
            (_, None) => storage.precision.into(),
        };
        Ok(Self { tensor, rows, cols, format, quantized })
    }

    /// Returns the size of the packed matrix in bytes.
    fn bytes(&self) -> usize {
        self.format.matrix_bytes(self.rows, self.cols)
    }

    /// Waits until rows of a stored tensor are in the page cache.
    fn wait(&self, progress: &ReadAhead<'_>, first: usize, rows: usize) {
        if let SourceTensor::Stored(tensor) = &self.tensor {
            progress.wait_for_rows(tensor, first, rows);
        }
    }

    /// Reads whole rows, from row `first` on, as f32.
    fn read_values(&self, first: usize, out: &mut [f32]) -> Result<()> {
        self.tensor.read(first * self.cols, out)
    }

    /// Returns whether rows are read as bytes of the packed format, instead of f32.
    fn is_stored(&self) -> bool {
        let is_bf16 = |tensor: &StoredTensor<'_>| tensor.dtype() == DType::Bf16;
        self.format.is_quantized()
            || self.format == WeightFormat::Bf16
                && matches!(&self.tensor, SourceTensor::Stored(tensor) if is_bf16(tensor))
    }

    /// Reads whole rows, from row `first` on, as the bytes of the file, or quantizes them.
    fn read_stored(&self, isa: Isa, first: usize, out: &mut [u8]) -> Result<()> {
        match (self.tensor, self.quantized) {
            (SourceTensor::Stored(tensor), None) => Ok(tensor.read_rows(first, out)?),
            (SourceTensor::Stored(tensor), Some(format)) => {
                let encode = |format, values: &[f32], out: &mut [u8]| {
                    row_ops::encode(isa, format, values, out);
                };
                Ok(tensor.read_rows_as(format, first, out, encode)?)
            }
            (SourceTensor::F32(_), _) => unreachable!("values in memory are not stored"),
        }
    }
}

/// Packs matrices with `cols` inputs, one below the other.
fn pack(
    kernel: &Kernel,
    cols: usize,
    matrices: &[Matrix<'_>],
    progress: &ReadAhead<'_>,
) -> Result<Panels> {
    let values: Vec<_> = matrices
        .iter()
        .map(|matrix| {
            move |first: usize, out: &mut [f32]| {
                matrix.wait(progress, first, out.len() / cols);
                matrix.read_values(first, out)
            }
        })
        .collect();
    let stored: Vec<_> = matrices
        .iter()
        .map(|matrix| {
            move |first: usize, out: &mut [u8]| {
                matrix.wait(progress, first, out.len() / matrix.format.row_bytes(cols));
                matrix.read_stored(kernel.isa(), first, out)
            }
        })
        .collect();
    let sources: Vec<MatrixSource<'_, crate::Error>> = matrices
        .iter()
        .zip(values.iter().zip(&stored))
        .map(|(matrix, (values, stored))| MatrixSource {
            rows: matrix.rows,
            format: matrix.format,
            read: if matrix.is_stored() {
                ReadRows::Stored(stored)
            } else {
                ReadRows::Values(values)
            },
        })
        .collect();
    Panels::stack(kernel, cols, &sources)
}

/// Returns the format of packed weights for blocks of a file.
fn weight_format(format: BlockFormat) -> WeightFormat {
    match format {
        BlockFormat::Q8_0 => WeightFormat::Q8_0,
        BlockFormat::Q4_0 => WeightFormat::Q4_0,
        BlockFormat::Q4K => WeightFormat::Q4K,
        BlockFormat::Q6K => WeightFormat::Q6K,
    }
}
