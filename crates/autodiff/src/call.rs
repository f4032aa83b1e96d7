//! Arguments of one operation, by position or by keyword.

use std::rc::Rc;

use crate::array::{Array, ElementKind};
use crate::tape::{Tape, Var};

/// Value of a node or of an argument.
#[derive(Clone, Debug)]
pub(crate) enum NodeValue {
    Tensor(Var),
    Number(f64, ElementKind),
    /// List, in shared memory: copies of lists of references to lists would grow exponentially.
    List(Rc<Vec<Self>>),
    Text(String),
    None,
    Slice([Option<i64>; 3]),
    Ellipsis,
    DType(ElementKind),
    /// Device, layout or memory format: has no effect on the result.
    Ignored,
}

impl NodeValue {
    /// Creates a list.
    pub(crate) fn list(items: Vec<Self>) -> Self {
        Self::List(Rc::new(items))
    }
}

/// Position of an argument that can only be passed by keyword.
pub(crate) const KEYWORD_ONLY: usize = usize::MAX;

/// Keyword arguments that have no effect on the result.
const IGNORED: [&str; 9] = [
    "_stacklevel",
    "device",
    "layout",
    "memory_format",
    "inplace",
    "non_blocking",
    "copy",
    "size_average",
    "reduce",
];

/// Arguments of one operation. The operation takes the arguments that it supports;
/// [`finish`](Self::finish) rejects the remaining ones.
pub(crate) struct CallArgs<'a> {
    pub(crate) tape: &'a mut Tape,
    args: Vec<Option<NodeValue>>,
    kwargs: Vec<(&'a str, Option<NodeValue>)>,
}

impl<'a> CallArgs<'a> {
    pub(crate) fn new(
        tape: &'a mut Tape,
        args: Vec<NodeValue>,
        kwargs: Vec<(&'a str, NodeValue)>,
    ) -> Self {
        let args = args.into_iter().map(Some).collect();
        let kwargs = kwargs.into_iter().map(|(name, value)| (name, Some(value))).collect();
        Self { tape, args, kwargs }
    }

    /// Takes the argument with this keyword or at this position. Python's `None` counts as absent.
    pub(crate) fn optional(&mut self, position: usize, name: &str) -> Option<NodeValue> {
        let by_name = self
            .kwargs
            .iter_mut()
            .find(|(key, value)| value.is_some() && (*key == name || alias(key) == name));
        let value = match by_name {
            Some((_, value)) => value.take(),
            None => self.args.get_mut(position).and_then(Option::take),
        };
        value.filter(|value| !matches!(value, NodeValue::None))
    }

    pub(crate) fn required(&mut self, position: usize, name: &str) -> Result<NodeValue, String> {
        self.optional(position, name).ok_or_else(|| format!("argument {name} is missing"))
    }

    /// Takes all arguments from this position on. `f(x, 1, 2)` and `f(x, (1, 2))` are equivalent.
    pub(crate) fn rest(&mut self, position: usize, name: &str) -> Option<Vec<NodeValue>> {
        let mut all: Vec<NodeValue> =
            self.args.iter_mut().skip(position).filter_map(Option::take).collect();
        if all.is_empty() {
            all.extend(self.optional(KEYWORD_ONLY, name));
        }
        match all.as_slice() {
            [] => None,
            [NodeValue::List(_)] => match all.pop() {
                Some(NodeValue::List(items)) => Some(Rc::unwrap_or_clone(items)),
                _ => None,
            },
            _ => Some(all),
        }
    }

    /// Takes a tensor. A number becomes a constant scalar tensor.
    pub(crate) fn tensor(&mut self, position: usize, name: &str) -> Result<Var, String> {
        let value = self.required(position, name)?;
        self.var(&value, name)
    }

    pub(crate) fn optional_tensor(
        &mut self,
        position: usize,
        name: &str,
    ) -> Result<Option<Var>, String> {
        self.optional(position, name).map(|value| self.var(&value, name)).transpose()
    }

    /// Returns the tensor of a value. A number becomes a constant scalar tensor.
    pub(crate) fn var(&mut self, value: &NodeValue, name: &str) -> Result<Var, String> {
        match value {
            NodeValue::Tensor(var) => Ok(*var),
            NodeValue::Number(number, kind) => self.tape.constant(Array::scalar(*number, *kind)),
            other => Err(format!("argument {name} is {}, not a tensor", describe(other))),
        }
    }

    pub(crate) fn optional_number(
        &mut self,
        position: usize,
        name: &str,
    ) -> Result<Option<f64>, String> {
        match self.optional(position, name) {
            None => Ok(None),
            Some(NodeValue::Number(number, _)) => Ok(Some(number)),
            Some(other) => Err(format!("argument {name} is {}, not a number", describe(&other))),
        }
    }

    pub(crate) fn flag(
        &mut self,
        position: usize,
        name: &str,
        default: bool,
    ) -> Result<bool, String> {
        Ok(self.optional_number(position, name)?.map_or(default, |number| number != 0.0))
    }

    pub(crate) fn optional_text(
        &mut self,
        position: usize,
        name: &str,
    ) -> Result<Option<String>, String> {
        match self.optional(position, name) {
            None => Ok(None),
            Some(NodeValue::Text(text)) => Ok(Some(text)),
            Some(other) => Err(format!("argument {name} is {}, not a string", describe(&other))),
        }
    }

    /// Takes the element type, always a keyword argument.
    pub(crate) fn dtype(&mut self) -> Result<Option<ElementKind>, String> {
        match self.optional(KEYWORD_ONLY, "dtype") {
            None => Ok(None),
            Some(NodeValue::DType(kind)) => Ok(Some(kind)),
            Some(other) => Err(format!("argument dtype is {}, not a dtype", describe(&other))),
        }
    }

    /// Fails if an argument was not taken: ignoring it would change the loss.
    pub(crate) fn finish(self) -> Result<(), String> {
        let ignored = |value: &NodeValue| matches!(value, NodeValue::None | NodeValue::Ignored);
        let extra = self.args.iter().flatten().filter(|value| !ignored(value)).count();
        if extra > 0 {
            return Err(format!("too many positional arguments: {extra} are not supported"));
        }
        for (name, value) in &self.kwargs {
            if let Some(value) = value
                && !ignored(value)
                && !IGNORED.contains(name)
            {
                return Err(format!("argument {name} is not supported"));
            }
        }
        Ok(())
    }
}

/// Maps torch's alternative keyword names to the names that the operations take.
fn alias(name: &str) -> &str {
    match name {
        "self" => "input",
        "axis" => "dim",
        "keepdims" => "keepdim",
        "exponent" => "other",
        other => other,
    }
}

/// Returns the type of a value with its article, for error messages.
pub(crate) fn describe(value: &NodeValue) -> &'static str {
    match value {
        NodeValue::Tensor(_) => "a tensor",
        NodeValue::Number(..) => "a number",
        NodeValue::List(_) => "a list",
        NodeValue::Text(_) => "a string",
        NodeValue::None => "None",
        NodeValue::Slice(_) => "a slice",
        NodeValue::Ellipsis => "an ellipsis",
        NodeValue::DType(_) => "a dtype",
        NodeValue::Ignored => "a device, layout or memory format",
    }
}

/// Returns an integer argument, such as a dimension or a size.
pub(crate) fn integer(value: &NodeValue) -> Result<i64, String> {
    match value {
        #[expect(clippy::cast_possible_truncation, reason = "integral and below 2^53")]
        NodeValue::Number(number, ElementKind::Int | ElementKind::Bool) if number.abs() < 9e15 => {
            Ok(*number as i64)
        }
        NodeValue::Number(number, _) => {
            Err(format!("{number} is not an integer, or is out of range"))
        }
        other => Err(format!("{} is not an integer", describe(other))),
    }
}

/// Returns a dimension of a tensor of this rank. Negative dimensions count from the end.
pub(crate) fn dimension(value: &NodeValue, rank: usize) -> Result<usize, String> {
    let dim = integer(value)?;
    // Torch accepts dimensions 0 and -1 of a scalar.
    let limit = i64::try_from(rank.max(1)).unwrap_or(i64::MAX);
    let from_start = if dim < 0 { dim + limit } else { dim };
    match usize::try_from(from_start) {
        Ok(dim) if from_start < limit => Ok(dim),
        _ => Err(format!("dimension {dim} is out of range for a tensor of rank {rank}")),
    }
}

/// Returns the dimensions in ascending order. Without a value, or with an empty list, returns all.
pub(crate) fn dimensions(value: Option<NodeValue>, rank: usize) -> Result<Vec<usize>, String> {
    let mut dims = match value {
        None => (0..rank).collect(),
        Some(NodeValue::List(items)) if items.is_empty() => (0..rank).collect(),
        Some(NodeValue::List(items)) => {
            items.iter().map(|item| dimension(item, rank)).collect::<Result<Vec<_>, _>>()?
        }
        Some(one) => vec![dimension(&one, rank)?],
    };
    dims.sort_unstable();
    if dims.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err("a dimension is listed twice".to_owned());
    }
    dims.retain(|&dim| dim < rank);
    Ok(dims)
}
