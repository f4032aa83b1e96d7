//! Upload of custom losses that the server executes.
//!
//! The graph itself is defined by the `tinkex-autodiff` crate, which also evaluates it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tinkex_autodiff::validate_inputs;

pub use tinkex_autodiff::{GraphArg, GraphInput, GraphNode, LossGraph, NodeOp};

use crate::InvalidInput;
use crate::future::SubmitResponse;
use crate::ids::{LossId, SessionId};
use crate::request::{json_output, json_request};

/// Request that uploads a custom loss.
///
/// ```
/// use tinkex_wire::{ApiRequest, CreateCustomLoss, GraphArg, GraphInput, GraphNode, LossGraph};
///
/// let graph = LossGraph::new(vec![
///     GraphNode::placeholder("logprobs"),
///     GraphNode::function("neg", "operator.neg", [GraphArg::node("logprobs")]),
///     GraphNode::method("total", "sum", [GraphArg::node("neg")]),
///     GraphNode::output(GraphArg::node("total"), [("custom/nll:sum", GraphArg::node("total"))]),
/// ]);
/// let upload = CreateCustomLoss {
///     session_id: "s".into(),
///     custom_loss_seq_id: 0,
///     name: "nll".to_owned(),
///     inputs: vec![GraphInput::new("logprobs", 1)],
///     graph,
/// };
/// upload.validate()?;
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_custom_loss")]
pub struct CreateCustomLoss {
    /// Session that may use the loss.
    pub session_id: SessionId,
    /// Sequence number of the upload within the session, from 0.
    pub custom_loss_seq_id: u32,
    /// Display name.
    pub name: String,
    /// Tensors that the loss reads for each datum; `logprobs` first.
    pub inputs: Vec<GraphInput>,
    /// Operations that compute the loss.
    pub graph: LossGraph,
}

/// Response to [`CreateCustomLoss`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "create_custom_loss")]
pub struct CustomLossCreated {
    /// Identifier for [`LossConfig::custom`](crate::LossConfig::custom).
    pub loss_id: LossId,
}

impl CreateCustomLoss {
    /// Checks the format, the node names and the inputs. The server checks the operations, because
    /// the supported ones depend on it.
    fn check_all(&self) -> Result<(), InvalidInput> {
        let format = self.graph.format;
        let known = LossGraph::FORMAT;
        if format != known {
            let reason = format!("{format} is unknown, expected {known}");
            return Err(InvalidInput::new("graph.format", reason));
        }
        let mut names = BTreeSet::new();
        if let Some(node) = self.graph.nodes.iter().find(|node| !names.insert(&*node.name)) {
            let reason = format!("two nodes have the name {:?}", node.name);
            return Err(InvalidInput::new("graph.nodes", reason));
        }
        validate_inputs(&self.inputs)
            .map_err(|error| InvalidInput::new("inputs", error.to_string()))
    }
}

json_request! {
    CreateCustomLoss: CreateCustomLoss => SubmitResponse, validate CreateCustomLoss::check_all;
}

json_output! {
    CreateCustomLoss: "CreateCustomLoss" => CustomLossCreated = "create_custom_loss";
}
