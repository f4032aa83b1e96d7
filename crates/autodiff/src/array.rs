//! Small dense arrays, and arithmetic on their shapes.

/// What an array's numbers are, from narrow to wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Bool,
    Int,
    Float,
}

impl Kind {
    /// By torch's name of a type.
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

    /// What `value` is when held as this.
    pub(crate) fn hold(self, value: f64) -> f64 {
        match self {
            Self::Float => value,
            Self::Int => value.trunc(),
            Self::Bool => truth(value != 0.0),
        }
    }
}

pub(crate) fn truth(yes: bool) -> f64 {
    if yes { 1.0 } else { 0.0 }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f64>,
    pub(crate) kind: Kind,
}

impl Array {
    pub(crate) fn number(value: f64, kind: Kind) -> Self {
        Self { shape: Vec::new(), data: vec![value], kind }
    }
}

/// How many cells a shape has, if that is a number.
pub(crate) fn cells(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |n, &side| n.checked_mul(side))
}

/// Steps between neighbours along each dimension.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

/// The shape that two shapes stretch to, by torch's rule.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let side = |shape: &[usize], i: usize| {
        let missing = rank - shape.len();
        if i < missing { 1 } else { shape[i - missing] }
    };
    (0..rank)
        .map(|i| match (side(a, i), side(b, i)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}

/// For each cell of `to`, in order, the position given by walking `from` with these strides.
///
/// A stride of 0 stays in place: that is how a side of 1 is stretched.
pub(crate) fn walk(to: &[usize], start: usize, steps: &[isize]) -> Vec<usize> {
    let count = cells(to).unwrap_or(0);
    let mut at = start;
    let mut index = vec![0_usize; to.len()];
    let mut out = Vec::with_capacity(count);
    for _ in 0..count {
        out.push(at);
        for i in (0..to.len()).rev() {
            index[i] += 1;
            at = at.wrapping_add_signed(steps[i]);
            if index[i] < to[i] {
                break;
            }
            let back = steps[i].wrapping_mul(index[i].cast_signed());
            at = at.wrapping_add_signed(back.wrapping_neg());
            index[i] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_stretch_as_torch_does() {
        assert_eq!(broadcast(&[3, 1], &[4]), Some(vec![3, 4]));
        assert_eq!(broadcast(&[], &[2]), Some(vec![2]));
        assert_eq!(broadcast(&[0], &[1]), Some(vec![0]));
        assert_eq!(broadcast(&[2], &[3]), None);
    }

    #[test]
    fn a_walk_visits_a_transposed_and_a_stretched_array() {
        assert_eq!(walk(&[3, 2], 0, &[1, 3]), [0, 3, 1, 4, 2, 5]);
        assert_eq!(walk(&[2, 3], 0, &[0, 1]), [0, 1, 2, 0, 1, 2]);
        assert_eq!(walk(&[3], 2, &[-1]), [2, 1, 0]);
        assert_eq!(walk(&[], 0, &[]), [0]);
        assert!(walk(&[0, 2], 0, &[2, 1]).is_empty());
    }
}
