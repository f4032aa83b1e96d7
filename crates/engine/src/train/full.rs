//! [`FullTrainer`]: trains all weights of a small model from scratch.
//!
//! All weights are packed again after every step, which is acceptable only for small models. The
//! program that makes the built-in model uses this trainer. Larger models are fine-tuned with an
//! adapter.

use std::collections::BTreeMap;
use std::path::Path;

use super::batch_execution::{BatchExecution, check_gradient};
use super::datum::Datum;
use super::objective::{TrainingObjective, TrainingOutput};
use crate::engine::{Engine, EngineOptions};
use crate::kernel::{Kernel, Lhs, Precision, Rhs, row_ops};
use crate::memory::probe;
use crate::model::{
    AdapterGradients, FusedLinear, GradientSink, Model, NormWeight, SourceTensor, TensorSource,
};
use crate::optim::{Optimizer, OptimizerKind, Parameter, StepParams, StepReport};
use crate::rng::ChaCha8;
use crate::{Error, Result};
use tinkex_weights::{ModelConfig, NamedTensor, TensorSlice, write_tensors};

/// A tensor with its gradient.
#[derive(Debug)]
struct TrainedTensor {
    shape: Vec<usize>,
    weights: Vec<f32>,
    grad: Vec<f32>,
}

/// A model with random initial weights, all of which are trained with Adam.
#[derive(Debug)]
pub struct FullTrainer {
    config: ModelConfig,
    kernel: Kernel,
    memory: usize,
    tensors: BTreeMap<String, TrainedTensor>,
    model: Model,
    optimizer: Optimizer,
}

impl FullTrainer {
    /// Creates a model with random weights. Matrices are uniform: with variance 1 / inputs, divided
    /// by twice the number of layers for projections that add to the residual stream, and within
    /// ±0.05 for the embedding and the unembedding. Norms start at 1, biases at 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the threads cannot be started; [`Error::OutOfMemory`] if the system
    /// refuses memory.
    pub fn new(config: &ModelConfig, seed: u64, options: &EngineOptions) -> Result<Self> {
        let kernel = Kernel::new(options.threads)?;
        // Weights, packed weights, gradients and the two moments of Adam.
        let bytes = config.tensors().fold(0_usize, |sum, (_, shape)| {
            sum.saturating_add(shape.iter().fold(5 * 4, |len, side| len.saturating_mul(*side)))
        });
        probe("training the model's weights", bytes)?;
        let tensors: BTreeMap<String, TrainedTensor> = config
            .tensors()
            .enumerate()
            .map(|(i, (name, shape))| {
                let weights =
                    initial_values(config, &name, &shape, &mut ChaCha8::new(seed, i as u64));
                let grad = vec![0.0; weights.len()];
                (name, TrainedTensor { shape, weights, grad })
            })
            .collect();
        let lengths: Vec<usize> = tensors.values().map(|tensor| tensor.weights.len()).collect();
        Ok(Self {
            model: Model::load(config, &TrainedTensors(&tensors), Precision::F32, kernel.clone())?,
            config: config.clone(),
            memory: options.training_memory,
            optimizer: Optimizer::new(OptimizerKind::Adam, &lengths),
            tensors,
            kernel,
        })
    }

    /// Returns the number of trained parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.tensors.values().map(|tensor| tensor.weights.len()).sum()
    }

    /// Runs a batch forward and backward and adds its gradients to the accumulated ones.
    ///
    /// # Errors
    /// As [`Trainer::forward_backward`](super::Trainer::forward_backward).
    pub fn forward_backward(
        &mut self,
        objective: &TrainingObjective<'_>,
        data: &[Datum<'_>],
    ) -> Result<TrainingOutput> {
        for (i, datum) in data.iter().enumerate() {
            datum.check(&self.config, objective).map_err(|error| error.in_datum(i))?;
        }
        let before: Vec<Vec<f32>> =
            self.tensors.values().map(|tensor| tensor.grad.clone()).collect();
        let mut sink = FullGradients { tensors: &mut self.tensors, config: &self.config };
        let execution = BatchExecution { model: &self.model, lora: None, memory: self.memory };
        let gradients = AdapterGradients::new(&self.model, None);
        let out = execution.run(objective, data, Some(gradients), &mut sink).and_then(|pass| {
            check_gradient(self.tensors.values().flat_map(|tensor| &tensor.grad))?;
            Ok(pass.into_output())
        });
        if out.is_err() {
            for (tensor, before) in self.tensors.values_mut().zip(before) {
                tensor.grad = before;
            }
        }
        out
    }

    /// Updates the weights with the accumulated gradients and resets these to zero.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; [`Error::OutOfMemory`] if the system refuses memory for packing the
    /// new weights, after which the trainer must not be used.
    pub fn optim_step(&mut self, params: &StepParams) -> Result<StepReport> {
        let mut list: Vec<Parameter<'_>> = self
            .tensors
            .iter_mut()
            .map(|(name, tensor)| Parameter {
                name,
                rows: tensor.shape[0],
                columns: tensor.shape.get(1).copied().unwrap_or(1),
                weights: &mut tensor.weights,
                gradient: &tensor.grad,
            })
            .collect();
        let report = self.optimizer.step(params, &mut list)?;
        for tensor in self.tensors.values_mut() {
            tensor.grad.fill(0.0);
        }
        let source = TrainedTensors(&self.tensors);
        self.model = Model::load(&self.config, &source, Precision::F32, self.kernel.clone())?;
        Ok(report)
    }

    /// Returns an engine with the current weights.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system refuses memory for the copy.
    pub fn engine(&self, options: EngineOptions) -> Result<Engine> {
        let source = TrainedTensors(&self.tensors);
        let model = Model::load(&self.config, &source, options.precision, self.kernel.clone())?;
        Ok(Engine::with_model(model, options, None))
    }

    /// Writes the weights, rounded to bf16, to the safetensors file `path`.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be written.
    pub fn save_bf16(&self, path: impl AsRef<Path>) -> Result<()> {
        let rounded: Vec<Vec<half::bf16>> = self
            .tensors
            .values()
            .map(|tensor| tensor.weights.iter().map(|x| half::bf16::from_f32(*x)).collect())
            .collect();
        let out: Vec<NamedTensor<'_>> = self
            .tensors
            .iter()
            .zip(&rounded)
            .map(|((name, tensor), values)| NamedTensor {
                name,
                shape: &tensor.shape,
                values: TensorSlice::Bf16(values),
            })
            .collect();
        Ok(write_tensors(path, &out, &[("format", "pt")])?)
    }
}

/// Returns the initial values of a tensor.
fn initial_values(
    config: &ModelConfig,
    name: &str,
    shape: &[usize],
    rng: &mut ChaCha8,
) -> Vec<f32> {
    let len: usize = shape.iter().product();
    match shape {
        [_, inputs] => {
            #[expect(clippy::cast_precision_loss, reason = "sizes are below 2²⁴")]
            let inputs = *inputs as f32;
            #[expect(clippy::cast_precision_loss, reason = "sizes are below 2²⁴")]
            let layers = config.layers as f32;
            // A uniform number in ±√3 has variance 1. Projections that add to the residual stream
            // start smaller.
            let bound = if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
                (3.0 / inputs).sqrt() / (2.0 * layers).sqrt()
            } else if name.contains("embed") || name.contains("lm_head") {
                0.05
            } else {
                (3.0 / inputs).sqrt()
            };
            (0..len).map(|_| (2.0 * rng.uniform() - 1.0) * bound).collect()
        }
        _ if name.ends_with("bias") => vec![0.0; len],
        _ => vec![1.0; len],
    }
}

/// The trained tensors as the source of a [`Model`].
struct TrainedTensors<'a>(&'a BTreeMap<String, TrainedTensor>);

impl TensorSource for TrainedTensors<'_> {
    fn values(&self, name: &str) -> Result<SourceTensor<'_>> {
        match self.0.get(name) {
            Some(tensor) => Ok(SourceTensor::F32(&tensor.weights)),
            None => Err(Error::invalid(name, "the model has no such tensor")),
        }
    }
}

/// Adds the gradients of all weights to their tensors.
struct FullGradients<'a> {
    tensors: &'a mut BTreeMap<String, TrainedTensor>,
    config: &'a ModelConfig,
}

impl FullGradients<'_> {
    /// Returns the gradient of the tensor `name`; empty if the model does not have it.
    fn grad(&mut self, name: &str) -> &mut [f32] {
        self.tensors.get_mut(name).map_or(&mut [], |tensor| &mut tensor.grad)
    }
}

impl GradientSink for FullGradients<'_> {
    fn is_enabled(&self) -> bool {
        true
    }

    fn linear(&mut self, model: &Model, layer: usize, site: FusedLinear, x: &[f32], grad: &[f32]) {
        let config = self.config;
        let query_width = config.heads * config.head_dim;
        let kv_width = config.kv_heads * config.head_dim;
        let hidden = config.hidden_size;
        let inner = config.intermediate_size;
        let (inputs, parts): (usize, &[(&str, usize)]) = match site {
            FusedLinear::Qkv => (
                hidden,
                &[
                    ("self_attn.q_proj", query_width),
                    ("self_attn.k_proj", kv_width),
                    ("self_attn.v_proj", kv_width),
                ],
            ),
            FusedLinear::O => (query_width, &[("self_attn.o_proj", hidden)]),
            FusedLinear::GateUp => (hidden, &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)]),
            FusedLinear::Down => (inner, &[("mlp.down_proj", hidden)]),
        };
        let stride: usize = parts.iter().map(|(_, outputs)| outputs).sum();
        let count = x.len() / inputs;
        let mut col = 0;
        for (part, outputs) in parts {
            let name = format!("model.layers.{layer}.{part}");
            let lhs = Lhs::columns(&grad[col..], stride);
            let rhs = Rhs::Rows { data: x, stride: inputs };
            let out = self.grad(&format!("{name}.weight"));
            model.kernel.gemm_accumulate((*outputs, count, inputs), lhs, rhs, out, inputs);
            let bias = self.grad(&format!("{name}.bias"));
            if !bias.is_empty() {
                for row in grad.chunks_exact(stride) {
                    row_ops::add(model.kernel.isa(), bias, &row[col..col + outputs]);
                }
            }
            col += outputs;
        }
    }

    fn norm(&mut self, gain: NormWeight, x: &[f32], inverse: f32, grad: &[f32]) {
        let name = match gain {
            NormWeight::Attention(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
            NormWeight::Queries(layer) => format!("model.layers.{layer}.self_attn.q_norm.weight"),
            NormWeight::Keys(layer) => format!("model.layers.{layer}.self_attn.k_norm.weight"),
            NormWeight::Mlp(layer) => {
                format!("model.layers.{layer}.post_attention_layernorm.weight")
            }
            NormWeight::Last => "model.norm.weight".to_owned(),
        };
        for ((out, x), grad) in self.grad(&name).iter_mut().zip(x).zip(grad) {
            *out += x * inverse * grad;
        }
    }

    fn unembedding(&mut self, model: &Model, from: usize, cols: usize, x: &[f32], grad: &[f32]) {
        let hidden = self.config.hidden_size;
        let name = if self.config.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let out = &mut self.grad(name)[from * hidden..(from + cols) * hidden];
        let rhs = Rhs::Rows { data: x, stride: hidden };
        let size = (cols, x.len() / hidden, hidden);
        model.kernel.gemm_accumulate(size, Lhs::columns(grad, cols), rhs, out, hidden);
    }

    fn embedding(&mut self, tokens: &[u32], grad: &[f32]) {
        let hidden = self.config.hidden_size;
        let out = self.grad("model.embed_tokens.weight");
        for (token, grad) in tokens.iter().zip(grad.chunks_exact(hidden)) {
            let start = *token as usize * hidden;
            for (out, grad) in out[start..start + hidden].iter_mut().zip(grad) {
                *out += grad;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::Loss;
    use crate::train::forward_pass::ForwardPass;
    use crate::train::golden;

    #[test]
    fn a_model_larger_than_memory_is_refused() {
        let side = 1 << 24;
        let small = golden::model("llama", 1).config;
        let huge = ModelConfig { hidden_size: side, vocab_size: side, ..small };
        let error = FullTrainer::new(&huge, 1, &EngineOptions::default()).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    }

    /// Compares the gradient of every tensor with finite differences of the loss.
    #[test]
    #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
    fn gradients_of_all_weights_match_finite_differences() {
        for name in golden::MODELS {
            let config = golden::model(name, 1).config;
            let options = EngineOptions { threads: 1, ..EngineOptions::default() };
            let mut trainer = FullTrainer::new(&config, 3, &options).unwrap();
            let data = golden::data(name);
            let examples: Vec<Datum<'_>> = data
                .iter()
                .map(|datum| Datum {
                    tokens: &datum.input,
                    targets: &datum.target,
                    ..Datum::default()
                })
                .collect();
            let objective = TrainingObjective::Loss(Loss::CrossEntropy);
            trainer.forward_backward(&objective, &examples).unwrap();
            let names: Vec<String> = trainer.tensors.keys().cloned().collect();
            for name in names {
                // Differentiate along the gradient: the directional derivative is the gradient's
                // norm.
                let grad = trainer.tensors[&name].grad.clone();
                let norm = grad.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
                if norm < 1e-3 {
                    continue;
                }
                let before = trainer.tensors[&name].weights.clone();
                let step = 2e-3;
                let mut loss = |sign: f64| {
                    let tensor = trainer.tensors.get_mut(&name).unwrap();
                    for ((weight, before), grad) in
                        tensor.weights.iter_mut().zip(&before).zip(&grad)
                    {
                        *weight =
                            (f64::from(*before) + sign * step * f64::from(*grad) / norm) as f32;
                    }
                    let source = TrainedTensors(&trainer.tensors);
                    let kernel = trainer.kernel.clone();
                    trainer.model = Model::load(&config, &source, Precision::F32, kernel).unwrap();
                    let sequences: Vec<_> = examples.iter().map(Datum::sequence).collect();
                    let model = &trainer.model;
                    let pass = ForwardPass::forward(model, None, &sequences, None, &|| false);
                    let (_, found) = pass.unwrap().unwrap();
                    -found.iter().flatten().map(|p| f64::from(*p)).sum::<f64>()
                };
                let slope = (loss(1.0) - loss(-1.0)) / (2.0 * step);
                loss(0.0);
                assert!((slope - norm).abs() < 1e-2 * norm + 1e-2, "{name}: {slope} for {norm}");
            }
        }
    }
}
