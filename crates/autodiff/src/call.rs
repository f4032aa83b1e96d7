//! The arguments of one call, taken by place or by name.

use crate::array::{Array, Kind};
use crate::tape::{Tape, Var};

/// What a node or an argument stands for.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Tensor(Var),
    Number(f64, Kind),
    List(Vec<Self>),
    Text(String),
    None,
    Slice([Option<i64>; 3]),
    Ellipsis,
    DType(Kind),
    /// A device and the like, which no result depends on.
    Ignored,
}

/// Names that change no result.
const IDLE: [&str; 9] = [
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

pub(crate) struct Call<'a> {
    pub(crate) tape: &'a mut Tape,
    args: Vec<Option<Value>>,
    kwargs: Vec<(&'a str, Option<Value>)>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(tape: &'a mut Tape, args: Vec<Value>, kwargs: Vec<(&'a str, Value)>) -> Self {
        let args = args.into_iter().map(Some).collect();
        let kwargs = kwargs.into_iter().map(|(name, value)| (name, Some(value))).collect();
        Self { tape, args, kwargs }
    }

    /// The argument at place `at` or of this name; `None` counts as not given.
    pub(crate) fn optional(&mut self, at: usize, name: &str) -> Option<Value> {
        let by_name = self
            .kwargs
            .iter_mut()
            .find(|(key, value)| value.is_some() && (*key == name || alias(key) == name));
        let value = match by_name {
            Some((_, value)) => value.take(),
            None => self.args.get_mut(at).and_then(Option::take),
        };
        value.filter(|value| !matches!(value, Value::None))
    }

    pub(crate) fn needed(&mut self, at: usize, name: &str) -> Result<Value, String> {
        self.optional(at, name).ok_or_else(|| format!("the argument {name} is missing"))
    }

    /// Everything from place `at` on: `f(x, 1, 2)` and `f(x, (1, 2))` are the same.
    pub(crate) fn rest(&mut self, at: usize, name: &str) -> Option<Vec<Value>> {
        let mut all: Vec<Value> = self.args.iter_mut().skip(at).filter_map(Option::take).collect();
        if all.is_empty() {
            all.extend(self.optional(usize::MAX, name));
        }
        match all.as_slice() {
            [] => None,
            [Value::List(_)] => match all.pop() {
                Some(Value::List(items)) => Some(items),
                _ => None,
            },
            _ => Some(all),
        }
    }

    /// A tensor; a number becomes one.
    pub(crate) fn tensor(&mut self, at: usize, name: &str) -> Result<Var, String> {
        let value = self.needed(at, name)?;
        self.var(&value, name)
    }

    pub(crate) fn optional_tensor(&mut self, at: usize, name: &str) -> Result<Option<Var>, String> {
        self.optional(at, name).map(|value| self.var(&value, name)).transpose()
    }

    pub(crate) fn var(&mut self, value: &Value, name: &str) -> Result<Var, String> {
        match value {
            Value::Tensor(var) => Ok(*var),
            Value::Number(number, kind) => self.tape.constant(Array::number(*number, *kind)),
            other => Err(format!("the argument {name} is {}, not a tensor", describe(other))),
        }
    }

    pub(crate) fn optional_number(&mut self, at: usize, name: &str) -> Result<Option<f64>, String> {
        match self.optional(at, name) {
            None => Ok(None),
            Some(Value::Number(number, _)) => Ok(Some(number)),
            Some(other) => Err(format!("the argument {name} is {}", describe(&other))),
        }
    }

    pub(crate) fn flag(&mut self, at: usize, name: &str, default: bool) -> Result<bool, String> {
        Ok(self.optional_number(at, name)?.map_or(default, |number| number != 0.0))
    }

    pub(crate) fn optional_text(
        &mut self,
        at: usize,
        name: &str,
    ) -> Result<Option<String>, String> {
        match self.optional(at, name) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(format!("the argument {name} is {}", describe(&other))),
        }
    }

    /// A type of numbers asked for by name.
    pub(crate) fn dtype(&mut self) -> Result<Option<Kind>, String> {
        match self.optional(usize::MAX, "dtype") {
            None => Ok(None),
            Some(Value::DType(kind)) => Ok(Some(kind)),
            Some(other) => Err(format!("dtype is {}", describe(&other))),
        }
    }

    /// Fails if something was given that nobody asked for: ignoring it would change the loss.
    pub(crate) fn finish(self) -> Result<(), String> {
        let idle = |value: &Value| matches!(value, Value::None | Value::Ignored);
        let over = self.args.iter().flatten().filter(|value| !idle(value)).count();
        if over > 0 {
            return Err(format!("{over} arguments too many"));
        }
        for (name, value) in &self.kwargs {
            if let Some(value) = value
                && !idle(value)
                && !IDLE.contains(name)
            {
                return Err(format!("the argument {name} is not supported"));
            }
        }
        Ok(())
    }
}

/// What else torch calls an argument.
fn alias(name: &str) -> &str {
    match name {
        "self" => "input",
        "axis" => "dim",
        "keepdims" => "keepdim",
        "exponent" => "other",
        other => other,
    }
}

pub(crate) fn describe(value: &Value) -> &'static str {
    match value {
        Value::Tensor(_) => "a tensor",
        Value::Number(..) => "a number",
        Value::List(_) => "a list",
        Value::Text(_) => "a text",
        Value::None => "nothing",
        Value::Slice(_) => "a slice",
        Value::Ellipsis => "an ellipsis",
        Value::DType(_) => "a type",
        Value::Ignored => "a device",
    }
}

/// A whole number, such as a dimension or a size.
pub(crate) fn whole(value: &Value) -> Result<i64, String> {
    match value {
        #[expect(clippy::cast_possible_truncation, reason = "checked to be whole and small")]
        Value::Number(number, Kind::Int | Kind::Bool) if number.abs() < 9e15 => Ok(*number as i64),
        other => Err(format!("{} is not a whole number", describe(other))),
    }
}

/// A dimension of an array of this rank; negative ones count from the end.
pub(crate) fn dimension(value: &Value, rank: usize) -> Result<usize, String> {
    let dim = whole(value)?;
    // A single number has one dimension to those who ask.
    let sides = i64::try_from(rank.max(1)).unwrap_or(i64::MAX);
    let from_start = if dim < 0 { dim + sides } else { dim };
    match usize::try_from(from_start) {
        Ok(dim) if from_start < sides => Ok(dim),
        _ => Err(format!("dimension {dim} of a tensor of rank {rank}")),
    }
}

/// One dimension or several, without repetition; all of them if none is given.
pub(crate) fn dimensions(value: Option<Value>, rank: usize) -> Result<Vec<usize>, String> {
    let mut dims = match value {
        None => (0..rank).collect(),
        Some(Value::List(items)) if items.is_empty() => (0..rank).collect(),
        Some(Value::List(items)) => {
            items.iter().map(|item| dimension(item, rank)).collect::<Result<Vec<_>, _>>()?
        }
        Some(one) => vec![dimension(&one, rank)?],
    };
    dims.sort_unstable();
    if dims.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err("a dimension is given twice".to_owned());
    }
    dims.retain(|&dim| dim < rank);
    Ok(dims)
}
