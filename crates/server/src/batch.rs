//! Training data: from the wire into the engine's form, and its output back into that of the wire.

use tinkex_autodiff::{LossProgram, TensorView};
use tinkex_engine::file::ModelConfig;
use tinkex_engine::loss::LossInputs;
use tinkex_engine::train::{Datum, TrainingObjective as Aim, TrainingOutput};
use tinkex_engine::{Error, Result, Trainer};
use tinkex_wire::{
    ForwardBackwardOutput, LossOutputs, LossRecord, PassMode, Shape, TensorData, Tokens, loss_input,
};

use crate::work::Objective;

/// Cells that the sparse tensors of one request have when they are written out.
const MOST_CELLS: usize = 1 << 24;

/// LossInputs that some loss reads, besides the targets.
const READ: [&str; 6] = [
    loss_input::WEIGHTS,
    loss_input::LOGPROBS,
    loss_input::ADVANTAGES,
    loss_input::CLIP_LOW,
    loss_input::CLIP_HIGH,
    loss_input::SEQUENCE_RATIO_MASK,
];

/// Data that can be run through a model.
pub(crate) struct Batch {
    data: Vec<Owned>,
    objective: Objective,
    /// Cells of sparse tensors, which no byte of the request stood for.
    cells: usize,
}

impl Batch {
    /// Takes data over, if a model of this form can run it. What can be wrong with it without
    /// running it is found here.
    pub(crate) fn new(
        data: &[tinkex_wire::Datum],
        objective: Objective,
        model: &ModelConfig,
    ) -> Result<Self> {
        let graph = match &objective {
            Objective::Graph(graph) => Some(&**graph),
            Objective::Loss(_) => None,
        };
        let mut all = Vec::with_capacity(data.len());
        let mut room = MOST_CELLS;
        for (i, datum) in data.iter().enumerate() {
            let owned = Owned::new(datum, graph, &mut room).map_err(|error| error.in_datum(i))?;
            let tensors = owned.graph_inputs();
            owned
                .datum(&tensors)
                .and_then(|datum| datum.check(model, &objective.aim()))
                .map_err(|error| error.in_datum(i))?;
            all.push(owned);
        }
        Ok(Self { data: all, objective, cells: MOST_CELLS - room })
    }

    /// Bytes that it takes beyond those of its request.
    pub(crate) fn spread(&self) -> usize {
        self.cells * size_of::<i64>()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Tokens that a model reads.
    pub(crate) fn tokens(&self) -> usize {
        self.data.iter().map(|datum| datum.tokens.len()).sum()
    }

    /// Runs the data through a model.
    pub(crate) fn run(&self, trainer: &mut Trainer, mode: PassMode) -> Result<TrainingOutput> {
        if self.is_empty() {
            let metrics = vec![("loss:sum".to_owned(), 0.0)];
            return Ok(TrainingOutput { logprobs: Vec::new(), metrics });
        }
        let tensors: Vec<Vec<TensorView<'_>>> = self.data.iter().map(Owned::graph_inputs).collect();
        let mut data = Vec::with_capacity(self.data.len());
        for (i, (owned, tensors)) in self.data.iter().zip(&tensors).enumerate() {
            data.push(owned.datum(tensors).map_err(|error| error.in_datum(i))?);
        }
        let aim = self.objective.aim();
        match mode {
            PassMode::Forward => trainer.forward(&aim, &data),
            PassMode::ForwardBackward => trainer.forward_backward(&aim, &data),
        }
    }

    /// The output as the wire has it: one record for each run of datums with the same columns.
    pub(crate) fn output(&self, output: TrainingOutput) -> ForwardBackwardOutput {
        let mut outputs = LossOutputs::default();
        let mut start = 0;
        while start < output.logprobs.len() {
            let columns = self.data[start].columns;
            let same = self.data[start..].iter().take_while(|d| d.columns == columns).count();
            let rows = &output.logprobs[start..start + same];
            let values = tinkex_wire::TensorValues::Float32(rows.concat().into());
            let trailing = columns.map_or(Shape::SCALAR, |columns| Shape::from([columns]));
            let record = LossRecord::new(same)
                .type_tag(TYPE)
                .field_with_shape("logprobs", values, rows.iter().map(Vec::len), trailing)
                .expect("there is one list of whole rows for each datum");
            outputs.append(LossOutputs::from(record));
            start += same;
        }
        ForwardBackwardOutput {
            loss_fn_output_type: TYPE.to_owned(),
            loss_fn_outputs: outputs,
            metrics: output.metrics.into_iter().collect(),
        }
    }
}

const TYPE: &str = "TorchLossReturn";

impl Objective {
    fn aim(&self) -> Aim<'_> {
        match self {
            Self::Loss(loss) => Aim::Loss(*loss),
            Self::Graph(graph) => Aim::Graph(graph),
        }
    }
}

/// What an engine's datum borrows from.
struct Owned {
    tokens: Tokens,
    targets: Vec<u32>,
    columns: Option<usize>,
    inputs: Vec<(String, TensorData)>,
    /// What a graph reads, and in which shape.
    graph: Vec<(TensorData, Vec<usize>)>,
}

impl Owned {
    /// `room` is how many cells sparse tensors may have yet.
    fn new(
        datum: &tinkex_wire::Datum,
        graph: Option<&LossProgram>,
        room: &mut usize,
    ) -> Result<Self> {
        let invalid = |field: &str, reason: &str| Error::Invalid {
            field: field.to_owned(),
            reason: reason.to_owned(),
        };
        let tokens = datum.model_input().to_tokens();
        let tokens = tokens.ok_or_else(|| invalid("model_input", "it is not text"))?;
        let rows = tokens.len();
        let mut dense = |name: &str, tensor: &TensorData| {
            // Before room is made for it: a few bytes can claim any shape.
            if tensor.row_starts().is_some() && tensor.shape().dims().first() != Some(&rows) {
                let expected = rows;
                let got = tensor.shape().dims().first().copied().unwrap_or(0);
                return Err(Error::Length { field: name.to_owned(), expected, got });
            }
            let dense = tensor.to_dense(*room);
            let dense = dense.map_err(|why| invalid(name, &why.to_string()))?;
            if tensor.row_starts().is_some() {
                *room = room.saturating_sub(dense.values().len());
            }
            Ok(dense)
        };
        let name = loss_input::TARGET_TOKENS;
        let Some(targets) = datum.loss_input(name) else {
            let what = "the loss".to_owned();
            return Err(Error::MissingInput { what, field: name.to_owned() });
        };
        let targets = dense(name, targets)?;
        let columns = match targets.rank() {
            1 => None,
            2 => targets.shape().dims().get(1).copied(),
            _ => return Err(invalid(name, "one or two dimensions were expected")),
        };
        let ids = targets.as_i64().ok_or_else(|| invalid(name, "int64 was expected"))?;
        // One that no vocabulary has is told of by the engine, as any other.
        let ids = ids.iter().map(|id| u32::try_from(*id).unwrap_or(u32::MAX)).collect();
        let mut owned =
            Self { tokens, targets: ids, columns, inputs: Vec::new(), graph: Vec::new() };
        match graph {
            None => {
                for (name, tensor) in datum.loss_inputs().filter(|(n, _)| READ.contains(n)) {
                    owned.inputs.push((name.to_owned(), dense(name, tensor)?));
                }
            }
            Some(graph) => {
                for input in &graph.inputs()[1..] {
                    let Some(tensor) = datum.loss_input(&input.name) else {
                        let what = "the custom loss".to_owned();
                        return Err(Error::MissingInput { what, field: input.name.clone() });
                    };
                    let tensor = dense(&input.name, tensor)?;
                    let shape = match (input.rank, tensor.rank()) {
                        (0, _) if tensor.values().len() == 1 => Vec::new(),
                        (1, 1) => vec![tensor.values().len()],
                        _ => tensor.shape().dims().to_vec(),
                    };
                    owned.graph.push((tensor, shape));
                }
            }
        }
        Ok(owned)
    }

    fn graph_inputs(&self) -> Vec<TensorView<'_>> {
        self.graph.iter().map(|(tensor, shape)| view(tensor, shape)).collect()
    }

    fn datum<'a>(&'a self, graph_inputs: &'a [TensorView<'a>]) -> Result<Datum<'a>> {
        let float = |name: &str| -> Result<Option<&'a [f32]>> {
            let found = self.inputs.iter().find(|(own, _)| own == name);
            let Some((_, tensor)) = found else { return Ok(None) };
            match tensor.as_f32() {
                Some(values) => Ok(Some(values)),
                None => Err(Error::Invalid {
                    field: name.to_owned(),
                    reason: "float32 was expected".to_owned(),
                }),
            }
        };
        let inputs = LossInputs {
            weights: float(loss_input::WEIGHTS)?,
            logprobs: float(loss_input::LOGPROBS)?,
            advantages: float(loss_input::ADVANTAGES)?,
            clip_low: float(loss_input::CLIP_LOW)?,
            clip_high: float(loss_input::CLIP_HIGH)?,
            sequence_ratio_mask: float(loss_input::SEQUENCE_RATIO_MASK)?,
            sampled_mask: None,
        };
        let (tokens, targets, columns) = (&self.tokens[..], &self.targets[..], self.columns);
        Ok(Datum { tokens, targets, columns, inputs, graph_inputs })
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
    fn sparse_tensors_share_one_room_and_what_no_loss_reads_takes_none() {
        let sparse = |width: usize| {
            TensorData::sparse(vec![5_i64, 6], vec![0, 1, 2], vec![0, 1], [2, width]).unwrap()
        };
        let datum = tinkex_wire::Datum::builder(ModelInput::from_tokens(vec![3, 4]))
            .loss_input(loss_input::TARGET_TOKENS, sparse(2))
            .loss_input("nobody_reads_this", sparse(1 << 40))
            .build()
            .unwrap();
        let mut room = 10;
        assert!(Owned::new(&datum, None, &mut room).unwrap().inputs.is_empty());
        assert_eq!(room, 6);
        assert!(Owned::new(&datum, None, &mut room).is_ok());
        assert!(Owned::new(&datum, None, &mut room).is_err(), "there is room for 2 cells, not 4");
    }
}
