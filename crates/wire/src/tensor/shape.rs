//! [`Shape`]: dimensions of a tensor.

use std::fmt;

use crate::InvalidInput;

/// Dimensions of a tensor, outermost first.
///
/// A shape without dimensions is a [scalar](Shape::SCALAR). JSON distinguishes it from a missing
/// shape ([`Shape::UNSPECIFIED`]), protobuf does not.
///
/// ```
/// use tinkex_wire::Shape;
///
/// assert_eq!(Shape::from([2, 3]).element_count(), Some(6));
/// assert_eq!(Shape::from([usize::MAX, 2]).element_count(), None);
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape(Dims);

// Store one and two dimensions inline: nearly all tensors of the API have no more.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Dims {
    Unspecified,
    Scalar,
    One([usize; 1]),
    Two([usize; 2]),
    More(Vec<usize>),
}

impl Shape {
    /// Missing shape: a vector of any length.
    pub const UNSPECIFIED: Self = Self(Dims::Unspecified);

    /// Shape of a scalar.
    pub const SCALAR: Self = Self(Dims::Scalar);

    /// Returns the dimensions; empty for a scalar and an unspecified shape.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        match &self.0 {
            Dims::Unspecified | Dims::Scalar => &[],
            Dims::One(dims) => dims,
            Dims::Two(dims) => dims,
            Dims::More(dims) => dims,
        }
    }

    /// Appends an innermost dimension.
    pub(crate) fn push(&mut self, dim: usize) {
        match &mut self.0 {
            Dims::Unspecified | Dims::Scalar => self.0 = Dims::One([dim]),
            Dims::One([a]) => self.0 = Dims::Two([*a, dim]),
            Dims::Two([a, b]) => self.0 = Dims::More(vec![*a, *b, dim]),
            Dims::More(dims) => dims.push(dim),
        }
    }

    /// Returns the product of the dimensions, or `None` if it exceeds `isize::MAX`. Returns 1 for a
    /// scalar and an unspecified shape.
    #[must_use]
    pub fn element_count(&self) -> Option<usize> {
        // A zero dimension makes the tensor empty even if the product of the others overflows.
        if self.dims().contains(&0) {
            return Some(0);
        }
        let elements = self.dims().iter().try_fold(1_usize, |n, d| n.checked_mul(*d))?;
        (elements <= isize::MAX.unsigned_abs()).then_some(elements)
    }

    /// Checks that the shape has `values` elements.
    pub(super) fn validate(&self, values: usize) -> Result<(), InvalidInput> {
        match self.element_count() {
            _ if *self == Self::UNSPECIFIED => Ok(()),
            Some(elements) if elements == values => Ok(()),
            Some(elements) => Err(InvalidInput::new(
                "shape",
                format!("{self:?} has {elements} elements but there are {values} values"),
            )),
            None => Err(InvalidInput::new("shape", format!("{self:?} has too many elements"))),
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
            return f.write_str("unspecified");
        }
        f.debug_list().entries(self.dims()).finish()
    }
}
