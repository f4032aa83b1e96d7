//! Values, how each came from others, and the way back.
//!
//! Every operation is recorded as what it did near the values it met: a list of slopes, or where
//! each number came from. Going back is then four short loops, whatever the operation was.

use crate::array::{Array, Kind, broadcast, cells, strides, walk};

/// The numbers one evaluation may hold, so that a short graph cannot ask for a long memory.
const MOST_CELLS: usize = 1 << 25;

/// A value on the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Var(usize);

#[derive(Debug, Default)]
pub(crate) struct Tape {
    steps: Vec<Step>,
    cells: usize,
}

#[derive(Debug)]
struct Step {
    value: Array,
    /// Whether the loss's slope is wanted here.
    tracked: bool,
    from: Vec<(Var, Link)>,
}

/// How a value moves with one it came from.
#[derive(Debug)]
pub(crate) enum Link {
    /// Each cell with the same cell, by this much.
    Scale(Vec<f64>),
    /// Cell `i` is cell `map[i]`; [`ABSENT`] is from elsewhere.
    Gather(Vec<usize>),
    /// The other way round: cell `i` adds to cell `bucket[i]`, by this much.
    Spread(Vec<usize>, Option<Vec<f64>>),
    /// Sums along a dimension, up to and including each cell: its length and its stride.
    Running(usize, usize),
}

/// No cell.
pub(crate) const ABSENT: usize = usize::MAX;

impl Tape {
    pub(crate) fn get(&self, var: Var) -> &Array {
        &self.steps[var.0].value
    }

    pub(crate) fn shape(&self, var: Var) -> &[usize] {
        &self.get(var).shape
    }

    pub(crate) fn constant(&mut self, value: Array) -> Result<Var, String> {
        self.push(value, false, Vec::new())
    }

    /// A value whose slope will be asked for.
    pub(crate) fn leaf(&mut self, value: Array) -> Result<Var, String> {
        self.push(value, true, Vec::new())
    }

    fn push(&mut self, value: Array, tracked: bool, from: Vec<(Var, Link)>) -> Result<Var, String> {
        self.reserve(value.data.len())?;
        self.steps.push(Step { value, tracked, from });
        Ok(Var(self.steps.len() - 1))
    }

    /// Counts cells that are about to be made.
    fn reserve(&mut self, cells: usize) -> Result<(), String> {
        self.cells = self.cells.saturating_add(cells);
        if self.cells > MOST_CELLS {
            return Err(format!("the graph needs more than {MOST_CELLS} numbers for one datum"));
        }
        Ok(())
    }

    /// Fails before a shape is filled that would not be allowed.
    pub(crate) fn room(&self, shape: &[usize]) -> Result<usize, String> {
        match cells(shape) {
            Some(count) if self.cells.saturating_add(count) <= MOST_CELLS => Ok(count),
            _ => Err(format!("a value of shape {shape:?} is too large")),
        }
    }

    /// A value that came from others; links to values without a slope are dropped.
    pub(crate) fn derive(&mut self, value: Array, from: Vec<(Var, Link)>) -> Result<Var, String> {
        let smooth = value.kind == Kind::Float;
        let from: Vec<_> =
            from.into_iter().filter(|(var, _)| smooth && self.steps[var.0].tracked).collect();
        self.push(value, !from.is_empty(), from)
    }

    /// The same value without a slope.
    pub(crate) fn detach(&mut self, x: Var) -> Result<Var, String> {
        self.constant(self.get(x).clone())
    }

    /// The same cells under another shape.
    pub(crate) fn reshaped(&mut self, x: Var, shape: Vec<usize>) -> Result<Var, String> {
        let count = self.get(x).data.len();
        self.gather(x, (0..count).collect(), shape)
    }

    /// Cells of `x` in another order or number.
    pub(crate) fn gather(
        &mut self,
        x: Var,
        map: Vec<usize>,
        shape: Vec<usize>,
    ) -> Result<Var, String> {
        let source = self.get(x);
        let data = map.iter().map(|&at| source.data[at]).collect();
        let value = Array { shape, data, kind: source.kind };
        self.derive(value, vec![(x, Link::Gather(map))])
    }

    /// `x` stretched to `shape`.
    pub(crate) fn stretched(&mut self, x: Var, shape: &[usize]) -> Result<Var, String> {
        let own = self.shape(x).to_vec();
        if own == shape {
            return Ok(x);
        }
        if broadcast(&own, shape).as_deref() != Some(shape) {
            return Err(format!("shape {own:?} does not stretch to {shape:?}"));
        }
        self.room(shape)?;
        let missing = shape.len() - own.len();
        let own_strides = strides(&own);
        let steps: Vec<isize> = (0..shape.len())
            .map(|i| match i.checked_sub(missing) {
                Some(i) if own[i] != 1 => own_strides[i].cast_signed(),
                _ => 0,
            })
            .collect();
        self.gather(x, walk(shape, 0, &steps), shape.to_vec())
    }

    /// A value and its slope, cell by cell.
    pub(crate) fn unary(
        &mut self,
        x: Var,
        kind: Kind,
        f: impl Fn(f64) -> (f64, f64),
    ) -> Result<Var, String> {
        let source = self.get(x);
        let (data, slope) = source.data.iter().map(|&value| f(value)).unzip();
        let value = Array { shape: source.shape.clone(), data, kind };
        self.derive(value, vec![(x, Link::Scale(slope))])
    }

    /// A value and both slopes, cell by cell, after stretching to a common shape.
    pub(crate) fn binary(
        &mut self,
        a: Var,
        b: Var,
        kind: Kind,
        f: impl Fn(f64, f64) -> (f64, f64, f64),
    ) -> Result<Var, String> {
        let (sa, sb) = (self.shape(a), self.shape(b));
        let shape = broadcast(sa, sb)
            .ok_or_else(|| format!("shapes {sa:?} and {sb:?} do not fit together"))?;
        let (a, b) = (self.stretched(a, &shape)?, self.stretched(b, &shape)?);
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
        self.derive(value, vec![(a, Link::Scale(by_a)), (b, Link::Scale(by_b))])
    }

    /// The slope of `top` (one number) by `of`.
    pub(crate) fn gradient(&self, top: Var, of: Var) -> Vec<f64> {
        let mut slopes: Vec<Option<Vec<f64>>> = Vec::new();
        slopes.resize_with(self.steps.len(), || None);
        slopes[top.0] = Some(vec![1.0; self.get(top).data.len()]);
        for at in (0..=top.0).rev() {
            if at == of.0 {
                continue;
            }
            let Some(above) = slopes[at].take() else { continue };
            for (var, link) in &self.steps[at].from {
                let count = self.get(*var).data.len();
                let below = slopes[var.0].get_or_insert_with(|| vec![0.0; count]);
                link.back(&above, below);
            }
        }
        let count = self.get(of).data.len();
        slopes[of.0].take().unwrap_or_else(|| vec![0.0; count])
    }
}

impl Link {
    /// Adds to `below` what `above` means for it.
    fn back(&self, above: &[f64], below: &mut [f64]) {
        match self {
            Self::Scale(slope) => {
                for ((below, above), slope) in below.iter_mut().zip(above).zip(slope) {
                    *below += times(*above, *slope);
                }
            }
            Self::Gather(map) => {
                for (above, &at) in above.iter().zip(map) {
                    if at != ABSENT {
                        below[at] += above;
                    }
                }
            }
            Self::Spread(bucket, slope) => {
                for (i, (below, &at)) in below.iter_mut().zip(bucket).enumerate() {
                    *below += times(above[at], slope.as_ref().map_or(1.0, |slope| slope[i]));
                }
            }
            Self::Running(length, stride) => {
                let block = length * stride;
                for start in (0..below.len()).step_by(block.max(1)) {
                    for offset in 0..*stride {
                        let mut total = 0.0;
                        for i in (0..*length).rev() {
                            let at = start + i * stride + offset;
                            total += above[at];
                            below[at] += total;
                        }
                    }
                }
            }
        }
    }
}

/// A product in which zero wins.
fn times(a: f64, b: f64) -> f64 {
    if a == 0.0 || b == 0.0 { 0.0 } else { a * b }
}
