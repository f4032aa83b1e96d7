//! [`TensorData`]: a dense or sparse tensor.
//!
//! The protocol has two element types, `int64` and `float32`; conversions widen or narrow all other
//! types. Constructors validate a tensor, so the shape of every `TensorData` matches the number of
//! its values, and sparse indices are within the shape.

mod element;
mod json;
mod shape;
mod sparse;

use std::fmt;

pub use element::TensorElement;
pub use shape::Shape;
pub(crate) use sparse::{Csr, CsrError};

use crate::InvalidInput;
use crate::slice::{SharedSlice, debug_slice};

/// A dense or sparse tensor.
///
/// Vectors, slices, arrays and iterators of numbers convert into a vector-shaped tensor. Conversion
/// from `Vec<f32>` or `Vec<i64>` does not copy. Clones share the values.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::{DType, TensorData};
///
/// let weights = TensorData::from(vec![0.0_f32, 1.0, 1.0]);
/// assert_eq!((weights.dtype(), weights.shape().dims()), (DType::Float32, &[3][..]));
///
/// let targets: TensorData = [7_u32, 8, 9, 10].into_iter().collect();
/// let targets = targets.reshape([2, 2])?;
/// assert_eq!(targets.as_i64(), Some(&[7, 8, 9, 10][..]));
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct TensorData {
    values: TensorValues,
    shape: Shape,
    sparse: Option<Box<Csr>>,
}

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 64-bit integers, used for token ids.
    Int64,
    /// 32-bit floating point.
    Float32,
}

impl DType {
    /// Returns the name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Int64 => "int64",
            Self::Float32 => "float32",
        }
    }

    /// Returns the size of an element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Int64 => 8,
            Self::Float32 => 4,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Values of a tensor.
///
/// Comparison is bitwise: a NaN, which marks a missing value, is equal to itself.
#[derive(Clone)]
pub enum TensorValues {
    /// 64-bit integers.
    Int64(SharedSlice<i64>),
    /// 32-bit floating point.
    Float32(SharedSlice<f32>),
}

impl TensorValues {
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Int64(values) => values.len(),
            Self::Float32(values) => values.len(),
        }
    }

    /// Returns `true` if there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Self::Int64(_) => DType::Int64,
            Self::Float32(_) => DType::Float32,
        }
    }

    /// Returns a sub-slice that shares the memory.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::Int64(values) => Self::Int64(values.slice(range)),
            Self::Float32(values) => Self::Float32(values.slice(range)),
        }
    }
}

impl PartialEq for TensorValues {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Int64(a), Self::Int64(b)) => a == b,
            (Self::Float32(a), Self::Float32(b)) => same_bits(a, b),
            _ => false,
        }
    }
}

impl fmt::Debug for TensorValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int64(values) => debug_slice(values, f),
            Self::Float32(values) => debug_slice(values, f),
        }
    }
}

pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

impl TensorData {
    /// Creates a dense tensor.
    ///
    /// # Errors
    /// Returns an error if the number of values does not match the shape.
    pub fn new(values: TensorValues, shape: impl Into<Shape>) -> Result<Self, InvalidInput> {
        let shape = shape.into();
        shape.validate(values.len())?;
        Ok(Self { values, shape, sparse: None })
    }

    /// Creates a scalar.
    #[must_use]
    pub fn scalar<T: TensorElement>(value: T) -> Self {
        Self { values: T::values(vec![value]), shape: Shape::SCALAR, sparse: None }
    }

    /// Creates a matrix from its rows.
    ///
    /// # Errors
    /// Returns an error if the rows differ in length.
    pub fn from_rows<T: TensorElement, R: AsRef<[T]>>(rows: &[R]) -> Result<Self, InvalidInput> {
        let columns = rows.first().map_or(0, |row| row.as_ref().len());
        let mut values = Vec::with_capacity(rows.len().saturating_mul(columns));
        for (i, row) in rows.iter().enumerate() {
            let row = row.as_ref();
            if row.len() != columns {
                let reason = format!("row {i} has {} values, row 0 has {columns}", row.len());
                return Err(InvalidInput::new("rows", reason));
            }
            values.extend_from_slice(row);
        }
        Ok(Self { values: T::values(values), shape: [rows.len(), columns].into(), sparse: None })
    }

    /// Changes the shape and keeps the values.
    ///
    /// # Errors
    /// Returns an error if the number of values does not match the shape, or if the tensor is
    /// sparse.
    pub fn reshape(self, shape: impl Into<Shape>) -> Result<Self, InvalidInput> {
        if self.is_sparse() {
            return Err(InvalidInput::new("shape", "a sparse tensor cannot be reshaped"));
        }
        Self::new(self.values, shape)
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }

    /// Returns the shape; [`Shape::UNSPECIFIED`] for a tensor that was decoded without one.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the number of dimensions; 1 for an unspecified shape.
    #[must_use]
    pub fn rank(&self) -> usize {
        if self.shape == Shape::UNSPECIFIED { 1 } else { self.shape.dims().len() }
    }

    /// Returns `true` for a scalar, and for one value of unspecified shape: protobuf encodes a
    /// scalar without a shape.
    #[must_use]
    pub fn may_be_scalar(&self) -> bool {
        self.shape.dims().is_empty() && self.values.len() == 1
    }

    /// Returns the length of the first dimension.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.dims().first().copied().unwrap_or(self.values.len())
    }

    /// Returns the stored values; for a sparse tensor, only the explicit ones.
    #[must_use]
    pub fn values(&self) -> &TensorValues {
        &self.values
    }

    /// Returns the stored values of a `float32` tensor.
    #[must_use]
    pub fn as_f32(&self) -> Option<&[f32]> {
        match &self.values {
            TensorValues::Float32(values) => Some(values),
            TensorValues::Int64(_) => None,
        }
    }

    /// Returns the stored values of an `int64` tensor.
    #[must_use]
    pub fn as_i64(&self) -> Option<&[i64]> {
        match &self.values {
            TensorValues::Int64(values) => Some(values),
            TensorValues::Float32(_) => None,
        }
    }
}

impl Default for TensorData {
    /// Returns an empty `float32` vector.
    fn default() -> Self {
        Self::from(Vec::<f32>::new())
    }
}

impl fmt::Debug for TensorData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("TensorData");
        out.field("dtype", &self.dtype()).field("shape", &self.shape).field("values", &self.values);
        if let Some(csr) = &self.sparse {
            out.field("row_starts", &csr.row_starts).field("columns", &csr.columns);
        }
        out.finish()
    }
}
