//! Data of the wire in the engine's form, and the engine's output in that of the wire.

use tinkex_engine::loss::Inputs;
use tinkex_engine::loss::graph::{Graph, Tensor, Values};
use tinkex_engine::train::{Datum, Objective as Aim, Output};
use tinkex_engine::{Error, Result, Trainer};
use tinkex_wire::{
    ForwardBackwardOutput, LossOutputs, LossRecord, Mode, Shape, TensorData, Tokens, loss_input,
};

use crate::work::{Objective, Pass};

/// Cells of one dense tensor.
const MOST_CELLS: usize = 1 << 28;

/// Runs data through a model.
pub(super) fn run(trainer: &mut Trainer, pass: &Pass) -> Result<Output> {
    let graph = match &pass.objective {
        Objective::Graph(graph) => Some(&**graph),
        Objective::Loss(_) => None,
    };
    let mut owned = Vec::with_capacity(pass.data.len());
    for (i, datum) in pass.data.iter().enumerate() {
        owned.push(Owned::new(datum, graph).map_err(|error| error.in_datum(i))?);
    }
    if owned.is_empty() {
        return Ok(Output { logprobs: Vec::new(), metrics: vec![("loss:sum".to_owned(), 0.0)] });
    }
    let tensors: Vec<Vec<Tensor<'_>>> = owned.iter().map(Owned::graph_inputs).collect();
    let mut data = Vec::with_capacity(owned.len());
    for (i, (owned, tensors)) in owned.iter().zip(&tensors).enumerate() {
        data.push(owned.datum(tensors).map_err(|error| error.in_datum(i))?);
    }
    let aim = match &pass.objective {
        Objective::Loss(loss) => Aim::Loss(*loss),
        Objective::Graph(graph) => Aim::Graph(graph),
    };
    match pass.mode {
        Mode::Forward => trainer.forward(&aim, &data),
        Mode::ForwardBackward => trainer.forward_backward(&aim, &data),
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
    fn new(datum: &tinkex_wire::Datum, graph: Option<&Graph>) -> Result<Self> {
        let invalid = |field: &str, reason: &str| Error::Invalid {
            field: field.to_owned(),
            reason: reason.to_owned(),
        };
        let tokens = datum.model_input().to_tokens();
        let tokens = tokens.ok_or_else(|| invalid("model_input", "it is not text"))?;
        let dense = |name: &str, tensor: &TensorData| {
            tensor.to_dense(MOST_CELLS).map_err(|why| invalid(name, &why.to_string()))
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
                for (name, tensor) in
                    datum.loss_inputs().filter(|(n, _)| *n != loss_input::TARGET_TOKENS)
                {
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

    fn graph_inputs(&self) -> Vec<Tensor<'_>> {
        self.graph.iter().map(|(tensor, shape)| view(tensor, shape)).collect()
    }

    fn datum<'a>(&'a self, graph_inputs: &'a [Tensor<'a>]) -> Result<Datum<'a>> {
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
        let inputs = Inputs {
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

fn view<'a>(tensor: &'a TensorData, shape: &'a [usize]) -> Tensor<'a> {
    let values = match tensor.values() {
        tinkex_wire::Values::Float32(values) => Values::F32(values),
        tinkex_wire::Values::Int64(values) => Values::I64(values),
    };
    Tensor { shape, values }
}

/// The output as the wire has it: one record for each run of datums with the same columns.
pub(super) fn output(pass: &Pass, output: Output) -> ForwardBackwardOutput {
    let columns: Vec<Option<usize>> = pass
        .data
        .iter()
        .map(|datum| {
            let targets = datum.loss_input(loss_input::TARGET_TOKENS)?;
            if targets.rank() == 2 { targets.shape().dims().get(1).copied() } else { None }
        })
        .collect();
    let mut outputs = LossOutputs::default();
    let mut start = 0;
    while start < output.logprobs.len() {
        let same = columns[start..].iter().take_while(|c| **c == columns[start]).count();
        let rows = &output.logprobs[start..start + same];
        let values = tinkex_wire::Values::Float32(rows.concat().into());
        let trailing = columns[start].map_or(Shape::SCALAR, |columns| Shape::from([columns]));
        let record = LossRecord::new(same)
            .type_tag(TYPE)
            .field_of("logprobs", values, rows.iter().map(Vec::len), trailing)
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

const TYPE: &str = "TorchLossReturn";
