//! Which operations may be used, by the names that tracing gives them.

use super::node::Op;

/// An operation that may be used.
pub(super) struct Known<'a> {
    pub(super) name: &'a str,
    /// Whether the result takes the place of what it was called on.
    pub(super) in_place: bool,
}

/// Python's operators.
pub(super) const OPERATORS: [&str; 21] = [
    "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pos", "abs", "pow", "matmul",
    "getitem", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert",
];

/// Functions and methods of torch.
pub(super) const FUNCTIONS: [&str; 107] = [
    "abs",
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
    "ne",
    "neg",
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
    "divide",
    "negative",
    "absolute",
    "ndimension",
    "nelement",
];

/// The operation behind a target, if it is one of ours.
pub(super) fn known(op: Op, target: &str) -> Option<Known<'_>> {
    let (name, method) = match op {
        Op::CallMethod => (target, true),
        Op::CallFunction if target == "getattr" => {
            return Some(Known { name: "getattr", in_place: false });
        }
        Op::CallFunction => {
            let (module, name) = target.rsplit_once('.')?;
            if module == "operator" {
                let in_place = false;
                return OPERATORS.contains(&name).then_some(Known { name, in_place });
            }
            if module != "torch" && !module.starts_with("torch.") {
                return None;
            }
            (name, false)
        }
        _ => return None,
    };
    let (name, in_place) = match name.strip_suffix('_') {
        Some("requires_grad") if method => ("requires_grad", false),
        _ if name == "requires_grad" => return None,
        Some(name) => (name, true),
        None => (name, false),
    };
    FUNCTIONS.contains(&name).then_some(Known { name, in_place })
}

/// One name for each operation.
pub(super) fn canonical(name: &str) -> &str {
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
    fn names_outside_the_list_are_unknown() {
        for (op, target) in [
            (Op::CallMethod, "item"),
            (Op::CallMethod, "backward"),
            (Op::CallMethod, "requires_grad"),
            (Op::CallFunction, "torch.rand_like"),
            (Op::CallFunction, "os.system"),
            (Op::CallFunction, "operator.call"),
            (Op::CallFunction, "torchvision.exp"),
            (Op::CallFunction, "exp"),
        ] {
            assert!(known(op, target).is_none(), "{target}");
        }
        assert!(known(Op::CallFunction, "torch._C._nn.log_sigmoid").is_some());
        assert!(known(Op::CallMethod, "clamp_").unwrap().in_place);
        assert!(!known(Op::CallMethod, "requires_grad_").unwrap().in_place);
    }
}
