//! Dense arrays of `f64`, and arithmetic on shapes.

/// Element type, in the order of promotion: an operation on two types yields the later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ElementKind {
    Bool,
    Int,
    Float,
}

impl ElementKind {
    /// Returns the kind that torch's type `name` belongs to.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "float" | "float16" | "float32" | "float64" | "double" | "half" | "bfloat16" => {
                Some(Self::Float)
            }
            "int" | "long" | "short" | "int8" | "int16" | "int32" | "int64" | "uint8" => {
                Some(Self::Int)
            }
            "bool" => Some(Self::Bool),
            _ => None,
        }
    }

    /// Converts `value` to this type.
    pub(crate) fn cast(self, value: f64) -> f64 {
        match self {
            Self::Float => value,
            Self::Int => value.trunc(),
            Self::Bool => f64::from(value != 0.0),
        }
    }
}

/// Array in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f64>,
    pub(crate) kind: ElementKind,
}

impl Array {
    pub(crate) fn scalar(value: f64, kind: ElementKind) -> Self {
        Self { shape: Vec::new(), data: vec![value], kind }
    }
}

/// Returns the number of elements of a shape, or `None` on overflow.
pub(crate) fn element_count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |n, &size| n.checked_mul(size))
}

/// Returns the row-major strides of a shape, in elements.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

/// Returns the shape that two shapes broadcast to by torch's rule, or `None` if they do not fit.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size = |shape: &[usize], i: usize| {
        let missing = rank - shape.len();
        if i < missing { 1 } else { shape[i - missing] }
    };
    (0..rank)
        .map(|i| match (size(a, i), size(b, i)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}

/// Regular view of an array: its positions are computed instead of stored, so that a view of
/// millions of elements needs no memory.
#[derive(Clone, Debug)]
pub(crate) struct StridedView {
    shape: Vec<usize>,
    start: usize,
    /// Distance of neighbours in each dimension. 0 repeats a dimension.
    strides: Vec<isize>,
}

impl StridedView {
    /// Creates the view of this shape that begins at position `start` and has these strides.
    pub(crate) fn new(shape: Vec<usize>, start: usize, strides: Vec<isize>) -> Self {
        Self { shape, start, strides }
    }

    /// Creates the view of the first `count` positions.
    pub(crate) fn contiguous(count: usize) -> Self {
        Self::new(vec![count], 0, vec![1])
    }

    /// Returns the number of positions.
    pub(crate) fn len(&self) -> usize {
        element_count(&self.shape).unwrap_or(0)
    }

    /// Returns the positions that the view visits, in row-major order.
    pub(crate) fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        let mut at = self.start;
        let mut index = vec![0_usize; self.shape.len()];
        (0..self.len()).map(move |_| {
            let position = at;
            for i in (0..self.shape.len()).rev() {
                index[i] += 1;
                at = at.wrapping_add_signed(self.strides[i]);
                if index[i] < self.shape[i] {
                    break;
                }
                let back = self.strides[i].wrapping_mul(index[i].cast_signed());
                at = at.wrapping_add_signed(back.wrapping_neg());
                index[i] = 0;
            }
            position
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_broadcast_as_in_torch() {
        assert_eq!(broadcast(&[3, 1], &[4]), Some(vec![3, 4]));
        assert_eq!(broadcast(&[], &[2]), Some(vec![2]));
        assert_eq!(broadcast(&[0], &[1]), Some(vec![0]));
        assert_eq!(broadcast(&[2], &[3]), None);
    }

    #[test]
    fn strided_views_transpose_and_repeat() {
        let positions = |shape: &[usize], start, strides: &[isize]| -> Vec<usize> {
            let view = StridedView::new(shape.to_vec(), start, strides.to_vec());
            assert_eq!(view.len(), view.positions().count());
            view.positions().collect()
        };
        assert_eq!(positions(&[3, 2], 0, &[1, 3]), [0, 3, 1, 4, 2, 5]);
        assert_eq!(positions(&[2, 3], 0, &[0, 1]), [0, 1, 2, 0, 1, 2]);
        assert_eq!(positions(&[3], 2, &[-1]), [2, 1, 0]);
        assert_eq!(positions(&[], 0, &[]), [0]);
        assert!(positions(&[0, 2], 0, &[2, 1]).is_empty());
        assert_eq!(StridedView::contiguous(3).positions().collect::<Vec<_>>(), [0, 1, 2]);
    }
}
