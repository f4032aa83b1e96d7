//! Supported operations, by the names that torch's tracer gives them.

use crate::graph::NodeOp;

/// Reason given for a node whose operation is not listed here.
pub(crate) const NOT_SUPPORTED: &str = "the operation is not supported";

/// Operation that a node's target names.
pub(crate) struct SupportedOperation<'a> {
    pub(crate) name: &'a str,
    /// Whether the result also replaces the value of the receiver.
    pub(crate) in_place: bool,
}

/// Functions of Python's `operator` module.
pub(crate) const OPERATORS: [&str; 21] = [
    "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pos", "abs", "pow", "matmul",
    "getitem", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert",
];

/// Functions of torch and methods of its tensors.
pub(crate) const FUNCTIONS: [&str; 107] = [
    "abs",
    "absolute",
    "add",
    "all",
    "amax",
    "amin",
    "any",
    "bool",
    "cat",
    "clamp",
    "clip",
    "clone",
    "concat",
    "contiguous",
    "cumsum",
    "detach",
    "dim",
    "div",
    "divide",
    "double",
    "eq",
    "exp",
    "expand",
    "expand_as",
    "expm1",
    "flatten",
    "flip",
    "float",
    "full_like",
    "gather",
    "ge",
    "gelu",
    "gt",
    "huber_loss",
    "index_select",
    "int",
    "isfinite",
    "isinf",
    "isnan",
    "l1_loss",
    "le",
    "log",
    "log1p",
    "log_sigmoid",
    "log_softmax",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logsigmoid",
    "logsumexp",
    "long",
    "lt",
    "masked_fill",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mse_loss",
    "mul",
    "multiply",
    "nan_to_num",
    "ndimension",
    "ne",
    "neg",
    "negative",
    "nelement",
    "norm",
    "numel",
    "ones_like",
    "permute",
    "pow",
    "prod",
    "reciprocal",
    "relu",
    "requires_grad",
    "reshape",
    "roll",
    "rsqrt",
    "sigmoid",
    "sign",
    "size",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "sub",
    "subtract",
    "sum",
    "t",
    "T",
    "tanh",
    "to",
    "transpose",
    "true_divide",
    "type_as",
    "unsqueeze",
    "var",
    "view",
    "where",
    "zeros_like",
];

/// Returns the operation that a node's target names, if it is supported.
pub(crate) fn lookup(op: NodeOp, target: &str) -> Option<SupportedOperation<'_>> {
    let (name, is_method) = match op {
        NodeOp::CallMethod => (target, true),
        NodeOp::CallFunction if target == "getattr" => {
            return Some(SupportedOperation { name: "getattr", in_place: false });
        }
        NodeOp::CallFunction => {
            let (module, name) = target.rsplit_once('.')?;
            if module == "operator" {
                let in_place = false;
                return OPERATORS.contains(&name).then_some(SupportedOperation { name, in_place });
            }
            if module != "torch" && !module.starts_with("torch.") {
                return None;
            }
            (name, false)
        }
        _ => return None,
    };
    let (name, in_place) = match name.strip_suffix('_') {
        Some("requires_grad") if is_method => ("requires_grad", false),
        _ if name == "requires_grad" => return None,
        Some(name) => (name, true),
        None => (name, false),
    };
    FUNCTIONS.contains(&name).then_some(SupportedOperation { name, in_place })
}

/// Maps synonyms to one name.
pub(crate) fn canonical(name: &str) -> &str {
    match name {
        "multiply" => "mul",
        "subtract" => "sub",
        "divide" | "true_divide" | "truediv" => "div",
        "negative" => "neg",
        "absolute" => "abs",
        "ndimension" => "dim",
        "nelement" => "numel",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlisted_names_are_not_supported() {
        for (op, target) in [
            (NodeOp::CallMethod, "item"),
            (NodeOp::CallMethod, "backward"),
            (NodeOp::CallMethod, "requires_grad"),
            (NodeOp::CallFunction, "torch.rand_like"),
            (NodeOp::CallFunction, "os.system"),
            (NodeOp::CallFunction, "operator.call"),
            (NodeOp::CallFunction, "torchvision.exp"),
            (NodeOp::CallFunction, "exp"),
        ] {
            assert!(lookup(op, target).is_none(), "{target}");
        }
        assert!(lookup(NodeOp::CallFunction, "torch._C._nn.log_sigmoid").is_some());
        assert!(lookup(NodeOp::CallMethod, "clamp_").unwrap().in_place);
        assert!(!lookup(NodeOp::CallMethod, "requires_grad_").unwrap().in_place);
    }
}
