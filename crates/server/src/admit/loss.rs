//! Losses of the caller's own.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use tinkex_engine::loss::graph::{Arg, Graph, GraphInput, Node, Op};
use tinkex_wire::codec::json;
use tinkex_wire::{ApiRequest as _, CreateCustomLoss, RequestId};

use super::{Intake, Next, digest, session, submit};
use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{Kind, Line, Request, loss_id};

const MOST_BYTES: usize = 1 << 20;
const MOST_NODES: usize = 4_096;
const DEEPEST: usize = 32;

/// Takes a loss in: it is checked here, and there is nothing to run.
pub(crate) fn create_custom_loss(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    if body.len() > MOST_BYTES {
        return Err(ApiError::bad(format!(
            "graph: {} bytes are more than {MOST_BYTES}",
            body.len()
        )));
    }
    let call: CreateCustomLoss = json::decode(&body)?;
    call.validate()?;
    let seq = u64::from(call.custom_loss_seq_id);
    let graph = Arc::new(graph(&call)?);
    let mut store = shared.store();
    session(&mut store, &call.session_id)?;
    let id = loss_id(&call.session_id, seq);
    let line = Line::Losses(call.session_id.clone());
    let intake = Intake {
        kind: Kind::CreateCustomLoss,
        session: call.session_id,
        line,
        seq: Some(seq),
        digest: digest::of_bytes(&body),
        seed: 0,
        samples: 0,
        body,
        facts: Vec::new(),
        next: Next::Learn(id, graph),
    };
    submit(shared, store, intake)
}

pub(super) fn again(row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    let call: CreateCustomLoss = json::decode(body)?;
    Ok(Next::Learn(loss_id(&row.session, row.seq), Arc::new(graph(&call)?)))
}

fn graph(call: &CreateCustomLoss) -> Result<Graph, ApiError> {
    if call.graph.nodes.len() > MOST_NODES {
        let n = call.graph.nodes.len();
        return Err(ApiError::bad(format!("graph: {n} nodes are more than {MOST_NODES}")));
    }
    let inputs = call
        .inputs
        .iter()
        .map(|input| GraphInput { name: input.name.clone(), rank: input.rank.into() })
        .collect();
    let nodes = call.graph.nodes.iter().map(node).collect::<Result<Vec<Node>, ApiError>>()?;
    Ok(Graph::new(inputs, nodes)?)
}

fn node(node: &tinkex_wire::Node) -> Result<Node, ApiError> {
    let within = |why: String| ApiError::bad(format!("graph, node {:?}: {why}", node.name));
    let op = match node.op {
        tinkex_wire::Op::Placeholder => Op::Placeholder,
        tinkex_wire::Op::CallFunction => Op::CallFunction,
        tinkex_wire::Op::CallMethod => Op::CallMethod,
        tinkex_wire::Op::Output => Op::Output,
        tinkex_wire::Op::GetAttr | tinkex_wire::Op::CallModule => Op::Other,
    };
    let args = node.args.iter().map(|a| arg(&a.0, 0)).collect::<Result<_, _>>().map_err(within)?;
    let kwargs = node
        .kwargs
        .iter()
        .map(|(name, a)| Ok((name.clone(), arg(&a.0, 0)?)))
        .collect::<Result<_, _>>()
        .map_err(within)?;
    Ok(Node { op, name: node.name.clone(), target: node.target.clone(), args, kwargs })
}

fn arg(value: &Value, depth: usize) -> Result<Arg, String> {
    if depth > DEEPEST {
        return Err(format!("an argument is nested more than {DEEPEST} deep"));
    }
    let all = |items: &[Value]| {
        items.iter().map(|item| arg(item, depth + 1)).collect::<Result<Vec<Arg>, String>>()
    };
    Ok(match value {
        Value::Null => Arg::None,
        Value::Bool(flag) => Arg::Bool(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => Arg::Int(whole),
            (None, Some(float)) => Arg::Float(float),
            (None, None) => return Err(format!("{number} is out of range")),
        },
        Value::String(text) => Arg::Text(text.clone()),
        Value::Array(items) => Arg::List(all(items)?),
        Value::Object(fields) => {
            let mut fields = fields.iter();
            let (Some((key, value)), None) = (fields.next(), fields.next()) else {
                return Err("an argument that is an object has exactly one key".to_owned());
            };
            match (key.as_str(), value) {
                ("ref", Value::String(name)) => Arg::Ref(name.clone()),
                ("tuple", Value::Array(items)) => Arg::Tuple(all(items)?),
                ("dict", Value::Object(entries)) => {
                    let entry =
                        |(key, value): (&String, &Value)| Ok((key.clone(), arg(value, depth + 1)?));
                    Arg::Dict(entries.iter().map(entry).collect::<Result<_, String>>()?)
                }
                ("slice", Value::Array(items)) => {
                    let [start, stop, step] = <[Arg; 3]>::try_from(all(items)?)
                        .map_err(|_| "a slice has three parts".to_owned())?;
                    Arg::Slice(Box::new([start, stop, step]))
                }
                ("ellipsis", _) => Arg::Ellipsis,
                ("float", Value::String(name)) => Arg::Float(match name.as_str() {
                    "inf" => f64::INFINITY,
                    "-inf" => f64::NEG_INFINITY,
                    "nan" => f64::NAN,
                    other => return Err(format!("{other:?} is not a float")),
                }),
                ("dtype", Value::String(name)) => Arg::DType(name.clone()),
                ("device" | "layout" | "memory_format", Value::String(name)) => {
                    Arg::Place(name.clone())
                }
                (other, _) => return Err(format!("{other:?} is no kind of argument")),
            }
        }
    })
}
