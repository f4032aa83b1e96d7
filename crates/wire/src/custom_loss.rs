//! Losses written by the caller and run on the server, as a graph of tensor operations.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::future::SubmitResponse;
use crate::ids::{LossId, SessionId};
use crate::request::{json_output, json_request};
use crate::{InvalidInput, JsonObject};

/// Inputs a loss may have, `logprobs` included.
pub const MAX_CUSTOM_LOSS_INPUTS: usize = 16;

/// Uploads a loss.
///
/// ```
/// use tinkex_wire::{Arg, ApiRequest, CreateCustomLoss, CustomLossInput, Graph, Node};
///
/// let graph = Graph::new(vec![
///     Node::placeholder("logprobs"),
///     Node::function("neg", "operator.neg", [Arg::node("logprobs")]),
///     Node::method("sum_1", "sum", [Arg::node("neg")]),
///     Node::output(Arg::tuple([Arg::node("sum_1"), Arg::dict([("custom/nll:sum", Arg::node("sum_1"))])])),
/// ]);
/// let upload = CreateCustomLoss {
///     session_id: "s".into(),
///     custom_loss_seq_id: 0,
///     name: "nll".to_owned(),
///     inputs: vec![CustomLossInput { name: "logprobs".to_owned(), rank: 1 }],
///     graph,
/// };
/// upload.validate()?;
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_custom_loss")]
pub struct CreateCustomLoss {
    /// The session that may use it.
    pub session_id: SessionId,
    /// Its number within the session, from 0.
    pub custom_loss_seq_id: u32,
    /// A name for people.
    pub name: String,
    /// What it reads for each datum; `logprobs` first.
    pub inputs: Vec<CustomLossInput>,
    /// What it computes.
    pub graph: Graph,
}

/// Something a custom loss reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CustomLossInput {
    /// The name of the loss input.
    pub name: String,
    /// How many dimensions it has: 0, 1 or 2.
    pub rank: u8,
}

/// A loss was uploaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_custom_loss")]
pub struct CustomLossCreated {
    /// What to call it in [`LossConfig::custom`](crate::LossConfig::uploaded).
    pub loss_id: LossId,
}

impl CreateCustomLoss {
    fn check_all(&self) -> Result<(), InvalidInput> {
        if self.graph.format != format_one() {
            let why = format!("{} is not known, only 1 is", self.graph.format);
            return Err(InvalidInput::new("graph.format", why));
        }
        let mut names = std::collections::BTreeSet::new();
        if let Some(node) = self.graph.nodes.iter().find(|node| !names.insert(&*node.name)) {
            let why = format!("two nodes are called {:?}", node.name);
            return Err(InvalidInput::new("graph.nodes", why));
        }
        let wrong = |why: String| Err(InvalidInput::new("inputs", why));
        match self.inputs.first() {
            Some(first) if first.name == "logprobs" && (1..=2).contains(&first.rank) => {}
            _ => return wrong("the first must be `logprobs`, of rank 1 or 2".to_owned()),
        }
        if self.inputs.len() > MAX_CUSTOM_LOSS_INPUTS {
            return wrong(format!("{} are more than {MAX_CUSTOM_LOSS_INPUTS}", self.inputs.len()));
        }
        for (i, input) in self.inputs.iter().enumerate() {
            if !is_input_name(&input.name) {
                return wrong(format!("{:?} does not match [a-z_][a-z0-9_]{{0,63}}", input.name));
            }
            if input.rank > 2 {
                return wrong(format!(
                    "{} has rank {}, at most 2 is allowed",
                    input.name, input.rank
                ));
            }
            if self.inputs[..i].iter().any(|other| other.name == input.name) {
                return wrong(format!("{} is listed twice", input.name));
            }
        }
        Ok(())
    }
}

/// Whether a custom loss may read an input of this name: `[a-z_][a-z0-9_]{0,63}`.
#[must_use]
pub fn is_input_name(name: &str) -> bool {
    let tail = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    name.len() <= 64
        && name.bytes().all(tail)
        && name.bytes().next().is_some_and(|first| !first.is_ascii_digit())
}

/// Whether a custom loss may report a metric of this name:
/// `custom/` and 1 to 64 of `[a-z0-9_./-]`, then `:sum` or `:mean`.
#[must_use]
pub fn is_metric_name(name: &str) -> bool {
    let inside = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_./-".contains(&c);
    name.strip_prefix("custom/")
        .and_then(|rest| rest.strip_suffix(":sum").or_else(|| rest.strip_suffix(":mean")))
        .is_some_and(|key| (1..=64).contains(&key.len()) && key.bytes().all(inside))
}

/// What a custom loss computes: nodes, in the order they run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// The version of this form: 1.
    #[serde(default = "format_one")]
    pub format: u32,
    /// The nodes.
    pub nodes: Vec<Node>,
}

fn format_one() -> u32 {
    1
}

impl Graph {
    /// A graph of these nodes.
    #[must_use]
    pub fn new(nodes: Vec<Node>) -> Self {
        Self { format: format_one(), nodes }
    }
}

/// One step of a [`Graph`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What kind of step.
    pub op: Op,
    /// What other nodes call it.
    pub name: String,
    /// Which input, function or method.
    pub target: String,
    /// Its arguments.
    #[serde(default)]
    pub args: Vec<Arg>,
    /// Its named arguments.
    #[serde(default)]
    pub kwargs: std::collections::BTreeMap<String, Arg>,
}

/// What kind of step a [`Node`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Reads an input.
    Placeholder,
    /// Reads a constant of the traced program; not used in uploads.
    GetAttr,
    /// Calls a function by its qualified name.
    CallFunction,
    /// Calls a method of its first argument.
    CallMethod,
    /// Calls a module; not used in uploads.
    CallModule,
    /// Returns the loss and its metrics.
    Output,
}

impl Node {
    fn new(op: Op, name: &str, target: &str, args: Vec<Arg>) -> Self {
        let (name, target) = (name.to_owned(), target.to_owned());
        Self { op, name, target, args, kwargs: std::collections::BTreeMap::new() }
    }

    /// Reads an input.
    #[must_use]
    pub fn placeholder(input: &str) -> Self {
        Self::new(Op::Placeholder, input, input, Vec::new())
    }

    /// Calls a function, such as `torch.exp` or `operator.mul`.
    #[must_use]
    pub fn function(name: &str, target: &str, args: impl Into<Vec<Arg>>) -> Self {
        Self::new(Op::CallFunction, name, target, args.into())
    }

    /// Calls a method of the first argument, such as `sum`.
    #[must_use]
    pub fn method(name: &str, target: &str, args: impl Into<Vec<Arg>>) -> Self {
        Self::new(Op::CallMethod, name, target, args.into())
    }

    /// Returns the loss and its metrics, as a pair.
    #[must_use]
    pub fn output(value: Arg) -> Self {
        Self::new(Op::Output, "output", "output", vec![value])
    }

    /// The same with a named argument.
    #[must_use]
    pub fn kwarg(mut self, name: &str, value: impl Into<Arg>) -> Self {
        self.kwargs.insert(name.to_owned(), value.into());
        self
    }
}

/// An argument of a [`Node`]: plain JSON, or an object with one key for what JSON has no form for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Arg(pub Value);

impl Arg {
    /// The value of another node.
    #[must_use]
    pub fn node(name: &str) -> Self {
        Self(json!({ "ref": name }))
    }

    /// A tuple.
    #[must_use]
    pub fn tuple(items: impl IntoIterator<Item = Self>) -> Self {
        let items: Vec<Value> = items.into_iter().map(|item| item.0).collect();
        Self(json!({ "tuple": items }))
    }

    /// A map from texts.
    #[must_use]
    pub fn dict<'a>(entries: impl IntoIterator<Item = (&'a str, Self)>) -> Self {
        let entries: JsonObject =
            entries.into_iter().map(|(key, value)| (key.to_owned(), value.0)).collect();
        Self(json!({ "dict": entries }))
    }

    /// A range of indices.
    #[must_use]
    pub fn slice(start: Option<i64>, stop: Option<i64>, step: Option<i64>) -> Self {
        Self(json!({ "slice": [start, stop, step] }))
    }

    /// All remaining dimensions.
    #[must_use]
    pub fn ellipsis() -> Self {
        Self(json!({ "ellipsis": true }))
    }

    /// Nothing.
    #[must_use]
    pub fn null() -> Self {
        Self(Value::Null)
    }

    /// Where a tensor lives, such as `cpu`.
    #[must_use]
    pub fn device(name: &str) -> Self {
        Self(json!({ "device": name }))
    }

    /// How a tensor is stored, such as `strided`.
    #[must_use]
    pub fn layout(name: &str) -> Self {
        Self(json!({ "layout": name }))
    }

    /// How a tensor's dimensions follow each other, such as `contiguous_format`.
    #[must_use]
    pub fn memory_format(name: &str) -> Self {
        Self(json!({ "memory_format": name }))
    }

    /// A type of numbers, such as `float32`.
    #[must_use]
    pub fn dtype(name: &str) -> Self {
        Self(json!({ "dtype": name }))
    }
}

impl From<f64> for Arg {
    fn from(number: f64) -> Self {
        let odd = if number.is_nan() {
            "nan"
        } else if number == f64::INFINITY {
            "inf"
        } else if number == f64::NEG_INFINITY {
            "-inf"
        } else {
            return Self(json!(number));
        };
        Self(json!({ "float": odd }))
    }
}

impl From<i64> for Arg {
    fn from(number: i64) -> Self {
        Self(json!(number))
    }
}

impl From<i32> for Arg {
    fn from(number: i32) -> Self {
        Self(json!(number))
    }
}

impl From<bool> for Arg {
    fn from(flag: bool) -> Self {
        Self(json!(flag))
    }
}

impl From<&str> for Arg {
    fn from(text: &str) -> Self {
        Self(json!(text))
    }
}

impl From<Vec<Self>> for Arg {
    fn from(items: Vec<Self>) -> Self {
        Self(items.into_iter().map(|item| item.0).collect())
    }
}

json_request! {
    CreateCustomLoss: CreateCustomLoss => SubmitResponse, check CreateCustomLoss::check_all;
}

json_output! {
    CreateCustomLoss: "CreateCustomLoss" => CustomLossCreated = "create_custom_loss";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_json_has_no_form_for() {
        for (arg, text) in [
            (Arg::from(f64::NAN), r#"{"float":"nan"}"#),
            (Arg::from(f64::NEG_INFINITY), r#"{"float":"-inf"}"#),
            (Arg::from(1.0), "1.0"),
            (Arg::slice(Some(1), None, None), r#"{"slice":[1,null,null]}"#),
            (Arg::ellipsis(), r#"{"ellipsis":true}"#),
            (Arg::dtype("float32"), r#"{"dtype":"float32"}"#),
            (Arg::from(vec![Arg::from(1), Arg::from(true)]), "[1,true]"),
        ] {
            assert_eq!(serde_json::to_string(&arg).unwrap(), text);
        }
    }
}
