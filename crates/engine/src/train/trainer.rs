//! [`Trainer`]: trains a LoRA adapter.

use std::path::Path;
use std::sync::Arc;

use super::batch_execution::{BatchExecution, check_gradient};
use super::datum::Datum;
use super::objective::{TrainingObjective, TrainingOutput};
use super::pass::{MicroBatch, PassProgress};
use crate::Result;
use crate::lora::{Adapter, LoraConfig, PackedLora};
use crate::model::{AdapterGradients, DiscardGradients, Model};
use crate::optim::{Optimizer, OptimizerKind, Parameter, StepParams, StepReport};
use tinkex_weights::{
    AdapterFile, NamedTensor, TensorFile, TensorSlice, write_folder, write_tensors,
};

/// File name of the optimizer state in an adapter folder.
const OPTIMIZER: &str = "optimizer.safetensors";

/// File name of the accumulated gradients in an adapter folder.
const GRADIENTS: &str = "gradients.safetensors";

/// A LoRA adapter with its accumulated gradients and its optimizer.
///
/// After an error, weights, gradients and optimizer state are unchanged.
#[derive(Debug)]
pub struct Trainer {
    model: Arc<Model>,
    /// Name of the base model.
    base: Arc<str>,
    /// Memory limit in bytes for the activations of a pass.
    memory: usize,
    adapter: Adapter,
    /// The current weights of `adapter`, packed for computation.
    packed: Arc<PackedLora>,
    /// Accumulated gradients of A and B of each pair of `adapter`.
    grads: Vec<[Vec<f32>; 2]>,
    optimizer: Optimizer,
}

impl Trainer {
    pub(crate) fn new(
        model: Arc<Model>,
        base: Arc<str>,
        memory: usize,
        adapter: Adapter,
        kind: OptimizerKind,
    ) -> Self {
        let lengths: Vec<usize> =
            adapter.pairs.iter().flat_map(|pair| [pair.a.len(), pair.b.len()]).collect();
        Self {
            packed: Arc::new(adapter.packed(&model.config)),
            grads: adapter.zero_gradients(),
            optimizer: Optimizer::new(kind, &lengths),
            model,
            base,
            memory,
            adapter,
        }
    }

    /// Returns the configuration of the adapter.
    #[must_use]
    pub fn config(&self) -> &LoraConfig {
        &self.adapter.config
    }

    /// Returns the kind of the optimizer.
    #[must_use]
    pub fn optimizer(&self) -> OptimizerKind {
        self.optimizer.kind()
    }

    /// Returns the number of optimizer steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Returns the number of trained parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.adapter.pairs.iter().map(|pair| pair.a.len() + pair.b.len()).sum()
    }

    /// Returns the name of every adapted module with its row-major matrices A (`rank × inputs`) and
    /// B (`outputs × rank`).
    pub fn tensors(&self) -> impl Iterator<Item = (String, &[f32], &[f32])> {
        self.adapter.pairs.iter().map(|pair| (pair.target.name(), &pair.a[..], &pair.b[..]))
    }

    /// Returns the accumulated gradients.
    #[cfg(test)]
    pub(crate) fn gradients(&self) -> Vec<f32> {
        self.grads.iter().flatten().flatten().copied().collect()
    }

    /// Returns the number of layers of the model.
    #[cfg(test)]
    pub(crate) fn model_layers(&self) -> usize {
        self.model.layers.len()
    }

    /// Sets all B matrices to NaN.
    #[cfg(test)]
    pub(crate) fn fill_b_with_nan(&mut self) {
        self.adapter.pairs.iter_mut().for_each(|pair| pair.b.fill(f32::NAN));
        self.packed = Arc::new(self.adapter.packed(&self.model.config));
    }

    /// Returns the current weights of the adapter, packed for computation.
    pub(crate) fn packed(&self) -> Arc<PackedLora> {
        self.packed.clone()
    }

    /// Runs a batch forward and backward and adds its gradients to the accumulated ones.
    ///
    /// The gradients are sums over all targets of all data; nothing is averaged.
    ///
    /// # Errors
    /// - [`Error::Datum`](crate::Error::Datum) if a datum is invalid, or its loss is not finite.
    /// - [`Error::NonFiniteResult`](crate::Error::NonFiniteResult) if a gradient is not finite.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system refuses memory.
    pub fn forward_backward(
        &mut self,
        objective: &TrainingObjective<'_>,
        data: &[Datum<'_>],
    ) -> Result<TrainingOutput> {
        self.check(objective, data)?;
        let gradients = AdapterGradients::new(&self.model, Some(&self.packed));
        let pass = self.execution().run(objective, data, Some(gradients), &mut DiscardGradients)?;
        self.finish_pass(pass)
    }

    /// Runs a batch forward only.
    ///
    /// # Errors
    /// As [`forward_backward`](Self::forward_backward).
    pub fn forward(
        &self,
        objective: &TrainingObjective<'_>,
        data: &[Datum<'_>],
    ) -> Result<TrainingOutput> {
        self.check(objective, data)?;
        let pass = self.execution().run(objective, data, None, &mut DiscardGradients)?;
        Ok(pass.into_output())
    }

    /// Begins a pass over data with these input tokens. The pass accumulates gradients if
    /// `backward` is true.
    ///
    /// A pass that is executed one micro-batch at a time has the bits of
    /// [`forward_backward`](Self::forward_backward) or [`forward`](Self::forward), however it is
    /// divided, if the weights do not change between its micro-batches:
    ///
    /// ```
    /// # use tinkex_engine::{Engine, EngineOptions, LoraConfig, loss::Loss, optim::OptimizerKind};
    /// # use tinkex_engine::train::Datum;
    /// # let engine = Engine::builtin(EngineOptions::default())?;
    /// # let mut trainer = engine.create_trainer(LoraConfig::default(), OptimizerKind::Adam)?;
    /// # let data = [Datum { tokens: &[5, 6], targets: &[6, 7], ..Datum::default() }];
    /// let tokens: Vec<&[u32]> = data.iter().map(|datum| datum.tokens).collect();
    /// let mut pass = trainer.begin_pass(&tokens, true);
    /// while let Some(batch) = trainer.next_micro_batch(&pass, 256) {
    ///     let part: Vec<Datum<'_>> = batch.data().iter().map(|i| data[*i]).collect();
    ///     let advanced =
    ///         trainer.run_micro_batch(pass, &Loss::CrossEntropy.into(), &batch, &part, &|| false)?;
    ///     pass = advanced.expect("the micro-batch is not interrupted");
    /// }
    /// let output = trainer.finish_pass(pass)?;
    /// # assert_eq!(output.logprobs.len(), 1);
    /// # Ok::<_, tinkex_engine::Error>(())
    /// ```
    #[must_use]
    pub fn begin_pass(&self, tokens: &[&[u32]], backward: bool) -> PassProgress {
        let gradients = backward.then(|| AdapterGradients::new(&self.model, Some(&self.packed)));
        PassProgress::new(tokens, gradients)
    }

    /// Returns the next micro-batch of a pass; `None` if all data are done. The micro-batch has at
    /// most `max_rows` rows and fits the memory limit, unless a single sequence, or sequences with
    /// a common prefix, exceed them.
    #[must_use]
    pub fn next_micro_batch(&self, pass: &PassProgress, max_rows: usize) -> Option<MicroBatch> {
        pass.next(max_rows.min(self.execution().max_rows(pass.gradients.is_some())))
    }

    /// Executes a micro-batch of a pass. `data` are the data that `batch` names, in that order.
    /// The trainer does not change until [`finish_pass`](Self::finish_pass).
    ///
    /// `interrupt` is called before every layer. Returns `None` if it returned true: the pass must
    /// then be begun again, or continue from a copy of `pass`.
    ///
    /// # Errors
    /// As [`forward_backward`](Self::forward_backward). The pass has then failed.
    ///
    /// # Panics
    /// If `data` has another length than `batch`.
    pub fn run_micro_batch(
        &self,
        pass: PassProgress,
        objective: &TrainingObjective<'_>,
        batch: &MicroBatch,
        data: &[Datum<'_>],
        interrupt: &dyn Fn() -> bool,
    ) -> Result<Option<PassProgress>> {
        assert_eq!(batch.data().len(), data.len(), "one datum for each index of the micro-batch");
        for (index, datum) in batch.data().iter().zip(data) {
            let checked = datum.check(&self.model.config, objective);
            checked.map_err(|error| error.in_datum(*index))?;
        }
        let sink = &mut DiscardGradients;
        self.execution().advance(pass, objective, batch, data, sink, interrupt)
    }

    /// Ends a pass whose data are all done: adds its gradients to the accumulated ones.
    ///
    /// # Errors
    /// [`Error::NonFiniteResult`](crate::Error::NonFiniteResult) if a gradient is not finite.
    pub fn finish_pass(&mut self, pass: PassProgress) -> Result<TrainingOutput> {
        if let Some(gradients) = &pass.gradients {
            let mut sums = self.grads.clone();
            self.adapter.add_gradients(gradients, &mut sums);
            check_gradient(sums.iter().flatten().flatten())?;
            self.grads = sums;
        }
        Ok(pass.into_output())
    }

    fn execution(&self) -> BatchExecution<'_> {
        BatchExecution { model: &self.model, lora: Some(&self.packed), memory: self.memory }
    }

    /// Checks that every datum is valid for the model and the objective.
    fn check(&self, objective: &TrainingObjective<'_>, data: &[Datum<'_>]) -> Result<()> {
        for (i, datum) in data.iter().enumerate() {
            let checked = datum.check(&self.model.config, objective);
            checked.map_err(|error| error.in_datum(i))?;
        }
        Ok(())
    }

    /// Updates the weights with the accumulated gradients and resets these to zero.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn optim_step(&mut self, params: &StepParams) -> Result<StepReport> {
        let names = self.names();
        let rank = self.adapter.config.rank;
        let mut tensors = Vec::with_capacity(names.len());
        let pairs = self.adapter.pairs.iter_mut().zip(&self.grads);
        for ((pair, [grad_a, grad_b]), [name_a, name_b]) in pairs.zip(&names) {
            tensors.push(Parameter {
                name: name_a,
                rows: rank,
                columns: pair.inputs,
                weights: &mut pair.a,
                gradient: grad_a,
            });
            tensors.push(Parameter {
                name: name_b,
                rows: pair.outputs,
                columns: rank,
                weights: &mut pair.b,
                gradient: grad_b,
            });
        }
        let report = self.optimizer.step(params, &mut tensors)?;
        self.discard_gradient();
        self.packed = Arc::new(self.adapter.packed(&self.model.config));
        Ok(report)
    }

    /// Resets the accumulated gradients to zero. The weights and the optimizer do not change.
    pub fn discard_gradient(&mut self) {
        for grad in self.grads.iter_mut().flatten() {
            grad.fill(0.0);
        }
    }

    /// Writes the adapter to a PEFT folder, atomically replacing it.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) if a file cannot be written. An existing folder is then
    /// unchanged.
    pub fn save(&self, folder: &Path) -> Result<()> {
        write_folder(folder, |folder| self.adapter.save(folder, &self.base))
    }

    /// Writes the adapter and the optimizer state to a folder, atomically replacing it.
    /// [`Engine::resume_trainer`](crate::Engine::resume_trainer) continues from it.
    ///
    /// Accumulated gradients are not saved.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_with_optimizer(&self, folder: &Path) -> Result<()> {
        let names = self.names();
        let shapes = self.shapes();
        let tensors = named(&names, &shapes);
        write_folder(folder, |folder| {
            self.adapter.save(folder, &self.base)?;
            self.optimizer.save(folder.join(OPTIMIZER), &tensors)
        })
    }

    /// As [`save_with_optimizer`](Self::save_with_optimizer), and also writes the accumulated
    /// gradients. [`load_gradients`](Self::load_gradients) reads them.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_with_gradients(&self, folder: &Path) -> Result<()> {
        let names = self.names();
        let shapes = self.shapes();
        let tensors = named(&names, &shapes);
        let gradients: Vec<NamedTensor<'_>> = tensors
            .iter()
            .zip(self.grads.iter().flatten())
            .map(|((name, shape), values)| NamedTensor {
                name,
                shape,
                values: TensorSlice::F32(values),
            })
            .collect();
        write_folder(folder, |folder| {
            self.adapter.save(folder, &self.base)?;
            self.optimizer.save(folder.join(OPTIMIZER), &tensors)?;
            Ok(write_tensors(folder.join(GRADIENTS), &gradients, &[])?)
        })
    }

    /// Replaces the accumulated gradients by the gradients in a folder that
    /// [`save_with_gradients`](Self::save_with_gradients) wrote. Returns false if the folder has no
    /// gradients.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) if the file cannot be read or belongs to another
    /// adapter. The gradients are then unchanged.
    pub fn load_gradients(&mut self, folder: &Path) -> Result<bool> {
        let path = folder.join(GRADIENTS);
        if !path.is_file() {
            return Ok(false);
        }
        let file = TensorFile::open(&path)?;
        let mut gradients = Vec::with_capacity(self.grads.len());
        for (names, shapes) in self.names().iter().zip(self.shapes()) {
            let read =
                |matrix: usize| file.tensor(&names[matrix])?.with_shape(&shapes[matrix])?.to_f32();
            gradients.push([read(0)?, read(1)?]);
        }
        self.grads = gradients;
        Ok(true)
    }

    /// Returns whether a folder contains optimizer state, as
    /// [`save_with_optimizer`](Self::save_with_optimizer) writes it.
    #[must_use]
    pub fn has_optimizer_state(folder: &Path) -> bool {
        folder.join(OPTIMIZER).is_file()
    }

    /// Creates a trainer with the adapter in `folder` and a new optimizer. The rank of
    /// [`OptimizerKind::Dimuon`] is replaced by the rank of the adapter.
    pub(crate) fn load(
        model: Arc<Model>,
        base: Arc<str>,
        memory: usize,
        folder: &Path,
        kind: OptimizerKind,
    ) -> Result<Self> {
        let adapter = Adapter::from_file(&model.config, AdapterFile::load(folder)?, 0)?;
        let kind = match kind {
            OptimizerKind::Dimuon { .. } => OptimizerKind::Dimuon { rank: adapter.config.rank },
            other => other,
        };
        Ok(Self::new(model, base, memory, adapter, kind))
    }

    /// Replaces the optimizer state by the one saved in the folder.
    pub(crate) fn load_optimizer(&mut self, folder: &Path) -> Result<()> {
        let names = self.names();
        let shapes = self.shapes();
        let kind = self.optimizer.kind();
        self.optimizer = Optimizer::load(folder.join(OPTIMIZER), kind, &named(&names, &shapes))?;
        Ok(())
    }

    /// Returns the tensor names of A and B of every pair.
    fn names(&self) -> Vec<[String; 2]> {
        let name = |pair: &crate::lora::AdapterPair| {
            let module = pair.target.name();
            ["A", "B"].map(|matrix| format!("{module}.lora_{matrix}.weight"))
        };
        self.adapter.pairs.iter().map(name).collect()
    }

    /// Returns the shapes of A and B of every pair.
    fn shapes(&self) -> Vec<[[usize; 2]; 2]> {
        let rank = self.adapter.config.rank;
        self.adapter.pairs.iter().map(|pair| [[rank, pair.inputs], [pair.outputs, rank]]).collect()
    }
}

/// Returns the name and shape of every tensor, in the order of the optimizer's tensors.
fn named<'a>(
    names: &'a [[String; 2]],
    shapes: &'a [[[usize; 2]; 2]],
) -> Vec<(&'a str, &'a [usize])> {
    names
        .iter()
        .flatten()
        .zip(shapes.iter().flatten())
        .map(|(name, shape)| (name.as_str(), &shape[..]))
        .collect()
}
