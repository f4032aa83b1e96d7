//! [`Shape`]: the dimensions of a tensor.

use std::fmt;

use crate::InvalidInput;

/// The dimensions of a tensor, outermost first.
///
/// A list of no dimensions is a [scalar](Shape::SCALAR). That is not the same as dimensions that
/// were never [stated](Shape::UNSPECIFIED), though protobuf cannot tell the two apart.
///
/// ```
/// use tinkex_wire::Shape;
///
/// assert_eq!(Shape::from([2, 3]).element_count(), Some(6));
/// assert_eq!(Shape::from([usize::MAX, 2]).element_count(), None);
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape(Dims);

// Nearly every tensor of the API has one or two dimensions; those need no allocation.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Dims {
    Unspecified,
    Scalar,
    One([usize; 1]),
    Two([usize; 2]),
    More(Vec<usize>),
}

impl Shape {
    /// Nothing was said: a vector of however many numbers there are.
    pub const UNSPECIFIED: Self = Self(Dims::Unspecified);

    /// One number without a dimension.
    pub const SCALAR: Self = Self(Dims::Scalar);

    /// The dimensions; empty for a scalar, and if unstated.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        match &self.0 {
            Dims::Unspecified | Dims::Scalar => &[],
            Dims::One(dims) => dims,
            Dims::Two(dims) => dims,
            Dims::More(dims) => dims,
        }
    }

    /// Adds an innermost dimension; the first one states the shape.
    pub(crate) fn push(&mut self, dim: usize) {
        match &mut self.0 {
            Dims::Unspecified | Dims::Scalar => self.0 = Dims::One([dim]),
            Dims::One([a]) => self.0 = Dims::Two([*a, dim]),
            Dims::Two([a, b]) => self.0 = Dims::More(vec![*a, *b, dim]),
            Dims::More(dims) => dims.push(dim),
        }
    }

    /// The product of the dimensions, unless no memory could hold that many cells; 1 if unstated.
    #[must_use]
    pub fn element_count(&self) -> Option<usize> {
        // A zero anywhere makes the tensor empty, whatever the other dimensions claim.
        if self.dims().contains(&0) {
            return Some(0);
        }
        let cells = self.dims().iter().try_fold(1_usize, |n, d| n.checked_mul(*d))?;
        (cells <= isize::MAX.unsigned_abs()).then_some(cells)
    }

    /// Whether `values` numbers fill this shape.
    pub(super) fn check(&self, values: usize) -> Result<(), InvalidInput> {
        match self.element_count() {
            _ if *self == Self::UNSPECIFIED => Ok(()),
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
            [] => Dims::Scalar,
            [a] => Dims::One([a]),
            [a, b] => Dims::Two([a, b]),
            _ => Dims::More(dims.into()),
        })
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Self::from(&dims[..])
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::UNSPECIFIED {
            return f.write_str("unstated");
        }
        f.debug_list().entries(self.dims()).finish()
    }
}
