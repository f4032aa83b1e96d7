//! [`Shape`]: the dimensions of a tensor.

use std::fmt;

use crate::InvalidInput;

/// The dimensions of a tensor, outermost first.
///
/// No dimensions at all means that none were stated: the tensor is a scalar if it holds one
/// number, else a vector of however many it holds.
///
/// ```
/// use tinkex_wire::Shape;
///
/// assert_eq!(Shape::from([2, 3]).cells(), Some(6));
/// assert_eq!(Shape::from([usize::MAX, 2]).cells(), None);
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape(Dims);

// Nearly every tensor of the API has one or two dimensions; those need no allocation.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Dims {
    None,
    One([usize; 1]),
    Two([usize; 2]),
    More(Box<[usize]>),
}

impl Shape {
    /// No dimensions given.
    pub const UNSTATED: Self = Self(Dims::None);

    /// The dimensions; empty if unstated.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        match &self.0 {
            Dims::None => &[],
            Dims::One(dims) => dims,
            Dims::Two(dims) => dims,
            Dims::More(dims) => dims,
        }
    }

    /// The product of the dimensions, unless no memory could hold that many cells. Unstated
    /// dimensions make one cell.
    #[must_use]
    pub fn cells(&self) -> Option<usize> {
        // A zero anywhere makes the tensor empty, whatever the other dimensions claim.
        if self.dims().contains(&0) {
            return Some(0);
        }
        let cells = self.dims().iter().try_fold(1_usize, |n, d| n.checked_mul(*d))?;
        (cells <= isize::MAX.unsigned_abs()).then_some(cells)
    }

    /// Whether `values` numbers fill this shape.
    pub(super) fn check(&self, values: usize) -> Result<(), InvalidInput> {
        match self.cells() {
            _ if self.dims().is_empty() => Ok(()),
            Some(cells) if cells == values => Ok(()),
            Some(cells) => Err(InvalidInput::new(
                "shape",
                format!("{self:?} has {cells} cells but there are {values} values"),
            )),
            None => Err(InvalidInput::new("shape", format!("{self:?} has too many cells"))),
        }
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self::from(&dims[..])
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Self(match *dims {
            [] => Dims::None,
            [a] => Dims::One([a]),
            [a, b] => Dims::Two([a, b]),
            _ => Dims::More(dims.into()),
        })
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.dims()).finish()
    }
}
