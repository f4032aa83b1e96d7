//! The steps of a graph.

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What kind of step.
    pub op: Op,
    /// What other nodes call it.
    pub name: String,
    /// Which input, function or method.
    pub target: String,
    /// Its arguments; a method's first is what it is called on.
    pub args: Vec<Arg>,
    /// Its named arguments.
    pub kwargs: Vec<(String, Arg)>,
}

/// What kind of step a [`Node`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads an input.
    Placeholder,
    /// Calls a function by its qualified name.
    CallFunction,
    /// Calls a method of its first argument.
    CallMethod,
    /// Returns the loss and its metrics.
    Output,
    /// Something of the traced program that a loss may not use, such as a module.
    Other,
}

/// An argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// Nothing.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A text.
    Text(String),
    /// The value of another node.
    Ref(String),
    /// A list.
    List(Vec<Self>),
    /// A tuple.
    Tuple(Vec<Self>),
    /// A map from texts.
    Dict(Vec<(String, Self)>),
    /// A range of indices: start, stop, step.
    Slice(Box<[Self; 3]>),
    /// All remaining dimensions.
    Ellipsis,
    /// A type of numbers, such as `float32`.
    DType(String),
    /// A device, a layout or a memory format, none of which mean anything here.
    Place(String),
}

impl Arg {
    /// The value of the node `name`.
    #[must_use]
    pub fn node(name: &str) -> Self {
        Self::Ref(name.to_owned())
    }
}

impl Node {
    fn new(op: Op, name: &str, target: &str, args: Vec<Arg>) -> Self {
        let (name, target) = (name.to_owned(), target.to_owned());
        Self { op, name, target, args, kwargs: Vec::new() }
    }

    /// Reads an input.
    #[must_use]
    pub fn placeholder(input: &str) -> Self {
        Self::new(Op::Placeholder, input, input, Vec::new())
    }

    /// Calls a function, such as `torch.exp` or `operator.mul`.
    #[must_use]
    pub fn function(name: &str, target: &str, args: Vec<Arg>) -> Self {
        Self::new(Op::CallFunction, name, target, args)
    }

    /// Calls a method of the first argument, such as `sum`.
    #[must_use]
    pub fn method(name: &str, target: &str, args: Vec<Arg>) -> Self {
        Self::new(Op::CallMethod, name, target, args)
    }

    /// Returns the loss and its metrics, as a pair.
    #[must_use]
    pub fn output(value: Arg) -> Self {
        Self::new(Op::Output, "output", "output", vec![value])
    }

    /// The same with a named argument.
    #[must_use]
    pub fn kwarg(mut self, name: &str, value: Arg) -> Self {
        self.kwargs.push((name.to_owned(), value));
        self
    }
}
