//! Training data, validated once at admission and converted to the engine's form.

use tinkex_autodiff::{LossProgram, TensorView};
use tinkex_engine::loss::LossInputs;
use tinkex_engine::train::{Datum, MicroBatch, PassProgress, TrainingObjective, TrainingOutput};
use tinkex_engine::{Error, Result, Trainer};
use tinkex_store::error::ServerError;
use tinkex_store::history::sequence_hash;
use tinkex_weights::ModelConfig;
use tinkex_wire::{
    ForwardBackwardOutput, LossOutputs, LossRecord, PassMode, Shape, TensorData, Tokens, loss_input,
};

use crate::fault::engine_error;
use crate::operation::PassObjective;

/// Maximum number of elements of all sparse tensors of one request, after conversion to dense.
const MAX_SPARSE_ELEMENTS: usize = 1 << 24;

/// Training data that a model can execute.
///
/// Holding a value of this type proves that every datum passed the checks that need no execution:
/// chunk types, tensor types and shapes, token ranges, and the inputs that the loss requires.
pub(crate) struct TrainingData {
    data: Vec<OwnedDatum>,
    objective: PassObjective,
    /// Number of dense elements that sparse tensors were converted to.
    sparse_elements: usize,
}

impl TrainingData {
    /// Validates `data` for the loss `objective` and a base model with configuration `model`.
    ///
    /// # Errors
    /// Returns [`ServerError::Invalid`] that names the first invalid datum.
    pub(crate) fn new(
        data: &[tinkex_wire::Datum],
        objective: PassObjective,
        model: &ModelConfig,
    ) -> std::result::Result<Self, ServerError> {
        let graph = match &objective {
            PassObjective::Graph(graph) => Some(&**graph),
            PassObjective::Loss(_) => None,
        };
        let mut validated = Vec::with_capacity(data.len());
        let mut remaining = MAX_SPARSE_ELEMENTS;
        for (i, datum) in data.iter().enumerate() {
            let Some(tokens) = datum.model_input().to_tokens() else {
                return Err(unsupported_chunk(
                    &format!("data[{i}].model_input"),
                    datum.model_input(),
                ));
            };
            let owned = OwnedDatum::new(datum, tokens, graph, model.vocab_size, &mut remaining);
            let owned = owned.map_err(|error| engine_error(error.in_datum(i)))?;
            let tensors = owned.graph_inputs();
            owned
                .datum(&tensors)
                .check(model, &objective.as_engine())
                .map_err(|error| engine_error(error.in_datum(i)))?;
            validated.push(owned);
        }
        let sparse_elements = MAX_SPARSE_ELEMENTS - remaining;
        Ok(Self { data: validated, objective, sparse_elements })
    }

    /// Returns the memory beyond the request body, in bytes: the sparse tensors after conversion to
    /// dense.
    pub(crate) fn extra_bytes(&self) -> usize {
        self.sparse_elements * size_of::<i64>()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Returns the number of input tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.data.iter().map(|datum| datum.tokens.len()).sum()
    }

    /// Returns the hashes of the sequences that have an advantage, with the advantage of their last
    /// token. A sequence consists of the input tokens of a datum and its last target token, so it
    /// equals the prompt and completion of a sample.
    pub(crate) fn advantages(&self) -> Vec<(i64, f32)> {
        let advantage = |datum: &OwnedDatum| {
            let advantages = datum.inputs.advantages.as_ref()?.as_f32()?;
            let last = advantages.iter().rposition(|advantage| *advantage != 0.0);
            let index = last.unwrap_or(advantages.len().checked_sub(1)?);
            let sequence = datum.tokens.iter().chain(datum.targets.last()).copied();
            Some((sequence_hash(sequence), advantages[index]))
        };
        self.data.iter().filter_map(advantage).collect()
    }

    /// Runs the data through a model. A [`PassMode::ForwardBackward`] pass accumulates gradients.
    /// `interrupt` is called before every layer. Returns `None`, with the model unchanged, if it
    /// returned true.
    pub(crate) fn run(
        &self,
        trainer: &mut Trainer,
        mode: PassMode,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<Option<TrainingOutput>> {
        let mut pass = self.begin(trainer, mode);
        while let Some(batch) = trainer.next_micro_batch(&pass, usize::MAX) {
            match self.run_micro_batch(trainer, pass, &batch, interrupt)? {
                Some(advanced) => pass = advanced,
                None => return Ok(None),
            }
        }
        trainer.finish_pass(pass).map(Some)
    }

    /// Begins a pass over the data.
    pub(crate) fn begin(&self, trainer: &Trainer, mode: PassMode) -> PassProgress {
        let tokens: Vec<&[u32]> = self.data.iter().map(|datum| &*datum.tokens).collect();
        // Without data, the accumulated gradients must not change.
        let backward = mode == PassMode::ForwardBackward && !self.is_empty();
        trainer.begin_pass(&tokens, backward)
    }

    /// Executes a micro-batch of a pass; see [`Trainer::run_micro_batch`].
    pub(crate) fn run_micro_batch(
        &self,
        trainer: &Trainer,
        pass: PassProgress,
        batch: &MicroBatch,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<Option<PassProgress>> {
        let owned: Vec<&OwnedDatum> = batch.data().iter().map(|index| &self.data[*index]).collect();
        let tensors: Vec<Vec<TensorView<'_>>> =
            owned.iter().map(|datum| datum.graph_inputs()).collect();
        let data: Vec<Datum<'_>> =
            owned.iter().zip(&tensors).map(|(owned, tensors)| owned.datum(tensors)).collect();
        trainer.run_micro_batch(pass, &self.objective.as_engine(), batch, &data, interrupt)
    }

    /// Converts the engine's output to the wire form: one record per group of consecutive datums
    /// with the same number of target columns.
    pub(crate) fn to_wire_output(&self, output: TrainingOutput) -> ForwardBackwardOutput {
        let mut outputs = LossOutputs::default();
        let mut start = 0;
        while start < output.logprobs.len() {
            let columns = self.data[start].columns;
            let count = self.data[start..].iter().take_while(|d| d.columns == columns).count();
            let rows = &output.logprobs[start..start + count];
            let values = tinkex_wire::TensorValues::Float32(rows.concat().into());
            let trailing = columns.map_or(Shape::SCALAR, |columns| Shape::from([columns]));
            let record = LossRecord::new(count)
                .type_tag(OUTPUT_TYPE)
                .field_with_shape("logprobs", values, rows.iter().map(Vec::len), trailing)
                .expect("the engine returns one list of whole rows per datum");
            outputs.append(LossOutputs::from(record));
            start += count;
        }
        ForwardBackwardOutput::default()
            .loss_fn_output_type(OUTPUT_TYPE)
            .loss_fn_outputs(outputs)
            .metrics(output.metrics.into_iter().collect())
    }
}

/// Name of the output type in the protocol.
const OUTPUT_TYPE: &str = "TorchLossReturn";

/// Returns the error for a model input in which not every chunk is text.
pub(crate) fn unsupported_chunk(field: &str, input: &tinkex_wire::ModelInput) -> ServerError {
    let kind =
        input.chunks.iter().map(tinkex_wire::InputChunk::kind).find(|kind| *kind != "encoded_text");
    let kind = kind.unwrap_or("unknown");
    ServerError::invalid(format!("{field}: chunk type {kind} is not supported by this server"))
}

impl PassObjective {
    fn as_engine(&self) -> TrainingObjective<'_> {
        match self {
            Self::Loss(loss) => TrainingObjective::Loss(*loss),
            Self::Graph(graph) => TrainingObjective::Graph(graph),
        }
    }
}

/// The buffers that an engine [`Datum`] borrows.
struct OwnedDatum {
    tokens: Tokens,
    targets: Vec<u32>,
    /// Number of target columns; `None` for one-dimensional targets.
    columns: Option<usize>,
    inputs: FloatInputs,
    /// Inputs of a custom loss and the shapes in which it reads them.
    graph: Vec<(TensorData, Vec<usize>)>,
}

/// Float inputs of the built-in losses.
#[derive(Default)]
struct FloatInputs {
    weights: Option<TensorData>,
    logprobs: Option<TensorData>,
    advantages: Option<TensorData>,
    clip_low: Option<TensorData>,
    clip_high: Option<TensorData>,
    sequence_ratio_mask: Option<TensorData>,
}

impl FloatInputs {
    /// Returns the slot of the input `name`; `None` if no built-in loss reads it.
    fn slot(&mut self, name: &str) -> Option<&mut Option<TensorData>> {
        Some(match name {
            loss_input::WEIGHTS => &mut self.weights,
            loss_input::LOGPROBS => &mut self.logprobs,
            loss_input::ADVANTAGES => &mut self.advantages,
            loss_input::CLIP_LOW => &mut self.clip_low,
            loss_input::CLIP_HIGH => &mut self.clip_high,
            loss_input::SEQUENCE_RATIO_MASK => &mut self.sequence_ratio_mask,
            _ => return None,
        })
    }

    fn as_engine(&self) -> LossInputs<'_> {
        fn floats(tensor: &Option<TensorData>) -> Option<&[f32]> {
            tensor.as_ref().and_then(TensorData::as_f32)
        }
        LossInputs {
            weights: floats(&self.weights),
            logprobs: floats(&self.logprobs),
            advantages: floats(&self.advantages),
            clip_low: floats(&self.clip_low),
            clip_high: floats(&self.clip_high),
            sequence_ratio_mask: floats(&self.sequence_ratio_mask),
            sampled_mask: None,
        }
    }
}

impl OwnedDatum {
    /// Converts a datum for a model with `vocab` tokens. Subtracts the dense size of the datum's
    /// sparse tensors from `remaining`, the number of elements that the request may still use.
    fn new(
        datum: &tinkex_wire::Datum,
        tokens: Tokens,
        graph: Option<&LossProgram>,
        vocab: usize,
        remaining: &mut usize,
    ) -> Result<Self> {
        let invalid = |field: &str, reason: &str| Error::Invalid {
            field: field.to_owned(),
            reason: reason.to_owned(),
        };
        let rows = tokens.len();
        let mut to_dense = |name: &str, tensor: &TensorData| {
            // Check the shape before allocating: a few bytes can claim any number of rows.
            if tensor.row_starts().is_some() && tensor.shape().dims().first() != Some(&rows) {
                let expected = rows;
                let got = tensor.shape().dims().first().copied().unwrap_or(0);
                return Err(Error::Length { field: name.to_owned(), expected, got });
            }
            let dense = tensor.to_dense(*remaining);
            let dense = dense.map_err(|error| invalid(name, &error.to_string()))?;
            if tensor.row_starts().is_some() {
                *remaining = remaining.saturating_sub(dense.values().len());
            }
            Ok(dense)
        };
        let name = loss_input::TARGET_TOKENS;
        let Some(targets) = datum.loss_input(name) else {
            let what = "the loss".to_owned();
            return Err(Error::MissingInput { what, field: name.to_owned() });
        };
        let targets = to_dense(name, targets)?;
        let columns = match targets.rank() {
            1 => None,
            2 => targets.shape().dims().get(1).copied(),
            _ => return Err(invalid(name, "expected one or two dimensions")),
        };
        let ids = targets.as_i64().ok_or_else(|| invalid(name, "expected int64"))?;
        let targets: Result<Vec<u32>, usize> = ids
            .iter()
            .enumerate()
            .map(|(index, id)| u32::try_from(*id).map_err(|_| index))
            .collect();
        // The engine checks whether ids that fit the type are in the vocabulary.
        let targets = targets.map_err(|index| Error::TokenOutOfRange {
            field: name.to_owned(),
            index,
            token: ids[index],
            vocab,
        })?;
        let mut inputs = FloatInputs::default();
        let mut graph_inputs = Vec::new();
        match graph {
            None => {
                for (name, tensor) in datum.loss_inputs() {
                    let Some(slot) = inputs.slot(name) else { continue };
                    let tensor = to_dense(name, tensor)?;
                    if tensor.as_f32().is_none() {
                        return Err(invalid(name, "expected float32"));
                    }
                    *slot = Some(tensor);
                }
            }
            Some(graph) => {
                // The first input is the log-probabilities, which the engine computes.
                for input in &graph.inputs()[1..] {
                    let Some(tensor) = datum.loss_input(&input.name) else {
                        let what = "the custom loss".to_owned();
                        return Err(Error::MissingInput { what, field: input.name.clone() });
                    };
                    let tensor = to_dense(&input.name, tensor)?;
                    let shape = match (input.rank, tensor.rank()) {
                        (0, _) if tensor.values().len() == 1 => Vec::new(),
                        (1, 1) => vec![tensor.values().len()],
                        _ => tensor.shape().dims().to_vec(),
                    };
                    graph_inputs.push((tensor, shape));
                }
            }
        }
        Ok(Self { tokens, targets, columns, inputs, graph: graph_inputs })
    }

    fn graph_inputs(&self) -> Vec<TensorView<'_>> {
        self.graph.iter().map(|(tensor, shape)| view(tensor, shape)).collect()
    }

    fn datum<'a>(&'a self, graph_inputs: &'a [TensorView<'a>]) -> Datum<'a> {
        Datum {
            tokens: &self.tokens,
            targets: &self.targets,
            columns: self.columns,
            inputs: self.inputs.as_engine(),
            graph_inputs,
        }
    }
}

fn view<'a>(tensor: &'a TensorData, shape: &'a [usize]) -> TensorView<'a> {
    match tensor.values() {
        tinkex_wire::TensorValues::Float32(values) => TensorView::f32(shape, values),
        tinkex_wire::TensorValues::Int64(values) => TensorView::i64(shape, values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinkex_wire::ModelInput;

    #[test]
    fn sparse_tensors_share_one_limit_and_unread_inputs_do_not_count() {
        let sparse = |width: usize| {
            TensorData::sparse(vec![5_i64, 6], vec![0, 1, 2], vec![0, 1], [2, width]).unwrap()
        };
        let datum = tinkex_wire::Datum::builder(ModelInput::from_tokens(vec![3, 4]))
            .loss_input(loss_input::TARGET_TOKENS, sparse(2))
            .loss_input("unread", sparse(1 << 40))
            .build()
            .unwrap();
        let convert = |remaining: &mut usize| {
            let tokens = datum.model_input().to_tokens().unwrap();
            OwnedDatum::new(&datum, tokens, None, 100, remaining)
        };
        let mut remaining = 10;
        assert!(convert(&mut remaining).is_ok());
        assert_eq!(remaining, 6);
        assert!(convert(&mut remaining).is_ok());
        assert!(convert(&mut remaining).is_err(), "2 elements remain, 4 are needed");
    }
}
