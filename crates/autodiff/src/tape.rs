//! Tape for reverse-mode differentiation.
//!
//! Every operation appends its value, and the derivative of that value with respect to each
//! operand. All derivatives have one of four forms ([`LocalGradient`]), so the backward pass needs
//! four loops and no code per operation.

use crate::array::{Array, ElementKind, StridedView, broadcast, element_count, strides};

/// Maximum number of dimensions of a value, as in PyTorch.
const MAX_RANK: usize = 64;

/// Number of 8-byte words that an entry needs besides its elements: the entry itself, its shape, and
/// the vectors of its operands.
const ENTRY_WORDS: usize = 32;

/// Bytes of a word: a value, a slope or an index.
const WORD: usize = 8;

/// Handle of a value on the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Var(usize);

/// Values of one evaluation, in the order of their computation.
#[derive(Debug)]
pub(crate) struct Tape {
    entries: Vec<TapeEntry>,
    /// Number of 8-byte words that the evaluation holds: values, slopes, indices, items of lists,
    /// and the gradients that the backward pass will allocate.
    words: usize,
    /// Maximum of `words`. Without it a graph of a few nodes could exhaust memory.
    max_words: usize,
}

#[derive(Debug)]
struct TapeEntry {
    value: Array,
    /// Whether a gradient flows from the value to the leaf.
    tracked: bool,
    operands: Vec<(Var, LocalGradient)>,
}

/// Derivative of a value with respect to one operand.
#[derive(Debug)]
pub(crate) enum LocalGradient {
    /// Element `i` depends on element `i` of the operand, with slope `slopes[i]`.
    Elementwise(Vec<f64>),
    /// Element `i` is the element of the operand at the `i`-th of these positions.
    Gather(Positions),
    /// Element `i` of the operand contributes to the element at the `i`-th of these positions, with
    /// slope `slopes[i]`, or 1 without slopes.
    Reduce(StridedView, Option<Vec<f64>>),
    /// Running sums along a dimension.
    CumulativeSum { length: usize, stride: usize },
}

/// Positions in an array, in any order.
#[derive(Debug)]
pub(crate) enum Positions {
    Strided(StridedView),
    Listed(Vec<usize>),
}

impl From<StridedView> for Positions {
    fn from(view: StridedView) -> Self {
        Self::Strided(view)
    }
}

impl From<Vec<usize>> for Positions {
    fn from(list: Vec<usize>) -> Self {
        Self::Listed(list)
    }
}

impl Positions {
    fn len(&self) -> usize {
        match self {
            Self::Strided(view) => view.len(),
            Self::Listed(list) => list.len(),
        }
    }

    /// Calls `visit` for each position.
    fn for_each(&self, visit: impl FnMut(usize)) {
        match self {
            Self::Strided(view) => view.positions().for_each(visit),
            Self::Listed(list) => list.iter().copied().for_each(visit),
        }
    }
}

impl Tape {
    /// Creates an empty tape whose evaluation may hold `max_bytes` bytes.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { entries: Vec::new(), words: 0, max_words: max_bytes / WORD }
    }

    pub(crate) fn get(&self, var: Var) -> &Array {
        &self.entries[var.0].value
    }

    pub(crate) fn shape(&self, var: Var) -> &[usize] {
        &self.get(var).shape
    }

    /// Appends a value through which no gradient flows.
    pub(crate) fn constant(&mut self, value: Array) -> Result<Var, String> {
        self.push(value, false, Vec::new())
    }

    /// Appends the value that the gradient is computed for.
    pub(crate) fn leaf(&mut self, value: Array) -> Result<Var, String> {
        self.push(value, true, Vec::new())
    }

    fn push(
        &mut self,
        value: Array,
        tracked: bool,
        operands: Vec<(Var, LocalGradient)>,
    ) -> Result<Var, String> {
        if value.shape.len() > MAX_RANK {
            return Err(format!("a tensor has at most {MAX_RANK} dimensions"));
        }
        let count = value.data.len();
        let locals: usize = operands.iter().map(|(_, local)| local.words()).sum();
        let gradient = if tracked { count } else { 0 };
        self.reserve(count.saturating_add(locals).saturating_add(gradient + ENTRY_WORDS))?;
        self.entries.push(TapeEntry { value, tracked, operands });
        Ok(Var(self.entries.len() - 1))
    }

    /// Counts words that the evaluation holds until its end.
    ///
    /// # Errors
    /// Fails if the evaluation holds more than its limit.
    pub(crate) fn reserve(&mut self, words: usize) -> Result<(), String> {
        self.check_words(words)?;
        self.words += words;
        Ok(())
    }

    /// Checks that `words` more words are within the limit, before they are allocated.
    pub(crate) fn check_words(&self, words: usize) -> Result<(), String> {
        if self.words.saturating_add(words) <= self.max_words {
            Ok(())
        } else {
            let limit = (self.max_words * WORD) >> 20;
            Err(format!("the evaluation needs more than {limit} MiB of memory"))
        }
    }

    /// Checks that a value of this shape is within the limit, before it is allocated. Returns its
    /// number of elements.
    pub(crate) fn check_size(&self, shape: &[usize]) -> Result<usize, String> {
        match element_count(shape) {
            Some(count) if self.check_words(count).is_ok() => Ok(count),
            _ => Err(format!("a tensor of shape {shape:?} is too large")),
        }
    }

    /// Appends a value computed from others. Only floats that depend on the leaf are tracked.
    pub(crate) fn derive(
        &mut self,
        value: Array,
        operands: Vec<(Var, LocalGradient)>,
    ) -> Result<Var, String> {
        let is_float = value.kind == ElementKind::Float;
        let operands: Vec<_> = operands
            .into_iter()
            .filter(|(var, _)| is_float && self.entries[var.0].tracked)
            .collect();
        self.push(value, !operands.is_empty(), operands)
    }

    /// Copies a value as a constant.
    pub(crate) fn detach(&mut self, x: Var) -> Result<Var, String> {
        self.check_words(self.get(x).data.len())?;
        self.constant(self.get(x).clone())
    }

    /// Copies a value under another shape with the same number of elements.
    pub(crate) fn reshaped(&mut self, x: Var, shape: Vec<usize>) -> Result<Var, String> {
        self.gather(x, StridedView::contiguous(self.get(x).data.len()), shape)
    }

    /// Returns the elements of `x` at these positions.
    pub(crate) fn gather(
        &mut self,
        x: Var,
        positions: impl Into<Positions>,
        shape: Vec<usize>,
    ) -> Result<Var, String> {
        let positions = positions.into();
        self.check_words(positions.len())?;
        let source = self.get(x);
        let mut data = Vec::with_capacity(positions.len());
        positions.for_each(|at| data.push(source.data[at]));
        let value = Array { shape, data, kind: source.kind };
        self.derive(value, vec![(x, LocalGradient::Gather(positions))])
    }

    /// Broadcasts `x` to `shape`.
    pub(crate) fn broadcast_to(&mut self, x: Var, shape: &[usize]) -> Result<Var, String> {
        let source_shape = self.shape(x).to_vec();
        if source_shape == shape {
            return Ok(x);
        }
        if broadcast(&source_shape, shape).as_deref() != Some(shape) {
            return Err(format!("shape {source_shape:?} cannot be broadcast to {shape:?}"));
        }
        self.check_size(shape)?;
        let missing = shape.len() - source_shape.len();
        let source_strides = strides(&source_shape);
        let repeated: Vec<isize> = (0..shape.len())
            .map(|i| match i.checked_sub(missing) {
                Some(i) if source_shape[i] != 1 => source_strides[i].cast_signed(),
                _ => 0,
            })
            .collect();
        self.gather(x, StridedView::new(shape.to_vec(), 0, repeated), shape.to_vec())
    }

    /// Applies `f`, which returns a value and its slope, to every element.
    pub(crate) fn unary(
        &mut self,
        x: Var,
        kind: ElementKind,
        f: impl Fn(f64) -> (f64, f64),
    ) -> Result<Var, String> {
        let source = self.get(x);
        self.check_words(2 * source.data.len())?;
        let (data, slope) = source.data.iter().map(|&value| f(value)).unzip();
        let value = Array { shape: source.shape.clone(), data, kind };
        self.derive(value, vec![(x, LocalGradient::Elementwise(slope))])
    }

    /// Applies `f`, which returns a value and its slopes with respect to both operands, to every
    /// pair of elements after broadcasting.
    pub(crate) fn binary(
        &mut self,
        a: Var,
        b: Var,
        kind: ElementKind,
        f: impl Fn(f64, f64) -> (f64, f64, f64),
    ) -> Result<Var, String> {
        let sa = self.shape(a);
        let sb = self.shape(b);
        let shape = broadcast(sa, sb)
            .ok_or_else(|| format!("shapes {sa:?} and {sb:?} cannot be broadcast together"))?;
        let a = self.broadcast_to(a, &shape)?;
        let b = self.broadcast_to(b, &shape)?;
        let count = self.get(a).data.len();
        self.check_words(3 * count)?;
        let mut data = Vec::with_capacity(count);
        let mut by_a = Vec::with_capacity(count);
        let mut by_b = Vec::with_capacity(count);
        for (&x, &y) in self.get(a).data.iter().zip(&self.get(b).data) {
            let (value, dx, dy) = f(x, y);
            data.push(value);
            by_a.push(dx);
            by_b.push(dy);
        }
        let value = Array { shape, data, kind };
        self.derive(
            value,
            vec![(a, LocalGradient::Elementwise(by_a)), (b, LocalGradient::Elementwise(by_b))],
        )
    }

    /// Returns the gradient of the scalar `loss` with respect to `leaf`.
    pub(crate) fn gradient(&self, loss: Var, leaf: Var) -> Vec<f64> {
        let mut gradients: Vec<Option<Vec<f64>>> = Vec::new();
        gradients.resize_with(self.entries.len(), || None);
        gradients[loss.0] = Some(vec![1.0; self.get(loss).data.len()]);
        for i in (leaf.0 + 1..=loss.0).rev() {
            let Some(gradient) = gradients[i].take() else { continue };
            for (operand, local) in &self.entries[i].operands {
                let count = self.get(*operand).data.len();
                let accumulated = gradients[operand.0].get_or_insert_with(|| vec![0.0; count]);
                local.accumulate(&gradient, accumulated);
            }
        }
        let count = self.get(leaf).data.len();
        gradients[leaf.0].take().unwrap_or_else(|| vec![0.0; count])
    }
}

impl LocalGradient {
    /// Returns the number of words of slopes and positions.
    fn words(&self) -> usize {
        match self {
            Self::Elementwise(slopes) | Self::Reduce(_, Some(slopes)) => slopes.len(),
            Self::Gather(Positions::Listed(list)) => list.len(),
            Self::Gather(Positions::Strided(_))
            | Self::Reduce(_, None)
            | Self::CumulativeSum { .. } => 0,
        }
    }

    /// Propagates `gradient`, the gradient of the value, to `operand`, the gradient of the operand.
    fn accumulate(&self, gradient: &[f64], operand: &mut [f64]) {
        match self {
            Self::Elementwise(slopes) => {
                for ((operand, gradient), slope) in operand.iter_mut().zip(gradient).zip(slopes) {
                    *operand += product(*gradient, *slope);
                }
            }
            Self::Gather(positions) => {
                let mut gradient = gradient.iter();
                positions.for_each(|at| operand[at] += gradient.next().copied().unwrap_or(0.0));
            }
            Self::Reduce(targets, slopes) => {
                let targets = targets.positions();
                for (i, (operand, target)) in operand.iter_mut().zip(targets).enumerate() {
                    let slope = slopes.as_ref().map_or(1.0, |slopes| slopes[i]);
                    *operand += product(gradient[target], slope);
                }
            }
            Self::CumulativeSum { length, stride } => {
                let block = length * stride;
                for start in (0..operand.len()).step_by(block.max(1)) {
                    for offset in 0..*stride {
                        let mut total = 0.0;
                        for i in (0..*length).rev() {
                            let at = start + i * stride + offset;
                            total += gradient[at];
                            operand[at] += total;
                        }
                    }
                }
            }
        }
    }
}

/// Multiplies two slopes, with 0 · ∞ = 0: an operand that was not selected contributes nothing,
/// even where its own slope is infinite. PyTorch computes NaN there.
fn product(a: f64, b: f64) -> f64 {
    if a == 0.0 || b == 0.0 { 0.0 } else { a * b }
}
