//! Tape for reverse-mode differentiation.
//!
//! Every operation appends its value, and the derivative of that value with respect to each
//! operand. All derivatives have one of four forms ([`LocalGradient`]), so the backward pass needs
//! four loops and no code per operation.

use crate::array::{Array, ElementKind, broadcast, element_count, strided_indices, strides};

/// Maximum number of elements of all values of one evaluation. Without this limit a graph of a few
/// nodes could exhaust memory.
const MAX_ELEMENTS: usize = 1 << 25;

/// Handle of a value on the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Var(usize);

/// Values of one evaluation, in the order of their computation.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    entries: Vec<TapeEntry>,
    /// Number of elements of all entries.
    elements: usize,
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
    /// Element `i` is element `map[i]` of the operand.
    Gather(Vec<usize>),
    /// Element `i` of the operand contributes to element `targets[i]`, with slope `slopes[i]`, or
    /// 1 without slopes.
    Reduce(Vec<usize>, Option<Vec<f64>>),
    /// Running sums along a dimension.
    CumulativeSum { length: usize, stride: usize },
}

impl Tape {
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
        self.add_elements(value.data.len())?;
        self.entries.push(TapeEntry { value, tracked, operands });
        Ok(Var(self.entries.len() - 1))
    }

    /// Adds to the number of elements. Fails if it exceeds the limit.
    fn add_elements(&mut self, elements: usize) -> Result<(), String> {
        self.elements = self.elements.saturating_add(elements);
        if self.elements > MAX_ELEMENTS {
            return Err(format!("the evaluation holds more than {MAX_ELEMENTS} elements"));
        }
        Ok(())
    }

    /// Checks that a value of this shape is within the limit, before it is allocated. Returns its
    /// number of elements.
    pub(crate) fn check_size(&self, shape: &[usize]) -> Result<usize, String> {
        match element_count(shape) {
            Some(count) if self.elements.saturating_add(count) <= MAX_ELEMENTS => Ok(count),
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
        self.constant(self.get(x).clone())
    }

    /// Copies a value under another shape with the same number of elements.
    pub(crate) fn reshaped(&mut self, x: Var, shape: Vec<usize>) -> Result<Var, String> {
        let count = self.get(x).data.len();
        self.gather(x, (0..count).collect(), shape)
    }

    /// Returns the elements of `x` at the positions `map`.
    pub(crate) fn gather(
        &mut self,
        x: Var,
        map: Vec<usize>,
        shape: Vec<usize>,
    ) -> Result<Var, String> {
        let source = self.get(x);
        let data = map.iter().map(|&at| source.data[at]).collect();
        let value = Array { shape, data, kind: source.kind };
        self.derive(value, vec![(x, LocalGradient::Gather(map))])
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
        self.gather(x, strided_indices(shape, 0, &repeated), shape.to_vec())
    }

    /// Applies `f`, which returns a value and its slope, to every element.
    pub(crate) fn unary(
        &mut self,
        x: Var,
        kind: ElementKind,
        f: impl Fn(f64) -> (f64, f64),
    ) -> Result<Var, String> {
        let source = self.get(x);
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
        let (sa, sb) = (self.shape(a), self.shape(b));
        let shape = broadcast(sa, sb)
            .ok_or_else(|| format!("shapes {sa:?} and {sb:?} cannot be broadcast together"))?;
        let (a, b) = (self.broadcast_to(a, &shape)?, self.broadcast_to(b, &shape)?);
        let count = self.get(a).data.len();
        let mut data = Vec::with_capacity(count);
        let (mut by_a, mut by_b) = (Vec::with_capacity(count), Vec::with_capacity(count));
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
    /// Propagates `gradient`, the gradient of the value, to `operand`, the gradient of the operand.
    fn accumulate(&self, gradient: &[f64], operand: &mut [f64]) {
        match self {
            Self::Elementwise(slopes) => {
                for ((operand, gradient), slope) in operand.iter_mut().zip(gradient).zip(slopes) {
                    *operand += product(*gradient, *slope);
                }
            }
            Self::Gather(map) => {
                for (gradient, &source) in gradient.iter().zip(map) {
                    operand[source] += gradient;
                }
            }
            Self::Reduce(targets, slopes) => {
                for (i, (operand, &target)) in operand.iter_mut().zip(targets).enumerate() {
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
