//! Sparse matrices in compressed sparse row (CSR) form.
//!
//! Row `i` consists of the elements `row_starts[i]..row_starts[i + 1]` of the values and `columns`.

use crate::InvalidInput;
use crate::slice::SharedSlice;

use super::{Shape, TensorData, TensorValues};

/// Row and column indices of a sparse matrix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Csr {
    pub(crate) row_starts: SharedSlice<i64>,
    pub(crate) columns: SharedSlice<i64>,
}

/// Error in the indices of a sparse matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CsrError {
    Shape(&'static str),
    RowStarts(&'static str),
    Columns(&'static str),
}

impl CsrError {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Shape(reason) | Self::RowStarts(reason) | Self::Columns(reason) => reason,
        }
    }
}

impl Csr {
    /// Checks that the indices place `values` values within `shape`.
    pub(crate) fn validate(&self, shape: &Shape, values: usize) -> Result<(), CsrError> {
        let [rows, width] = *shape.dims() else {
            return Err(CsrError::Shape("a sparse tensor must have two dimensions"));
        };
        if shape.element_count().is_none() {
            return Err(CsrError::Shape("the shape has too many elements"));
        }
        let starts = &self.row_starts;
        if rows.checked_add(1) != Some(starts.len()) {
            return Err(CsrError::RowStarts(
                "the number of row starts must be the number of rows plus one",
            ));
        }
        if starts.first() != Some(&0) {
            return Err(CsrError::RowStarts("the first row start must be 0"));
        }
        if starts.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(CsrError::RowStarts("row starts must not decrease"));
        }
        if starts.last().and_then(|end| usize::try_from(*end).ok()) != Some(values) {
            return Err(CsrError::RowStarts("the last row start must be the number of values"));
        }
        if self.columns.len() != values {
            return Err(CsrError::Columns(
                "the number of column indices must be the number of values",
            ));
        }
        let inside = |column: &i64| usize::try_from(*column).is_ok_and(|column| column < width);
        if !self.columns.iter().all(inside) {
            return Err(CsrError::Columns("a column index is outside the shape"));
        }
        Ok(())
    }
}

impl TensorData {
    /// Creates a sparse matrix from the values in row-major order, the start of each row within the
    /// values followed by their number, and the column of each value.
    ///
    /// ```
    /// # use tinkex_wire as tinkex;
    /// use tinkex::TensorData;
    ///
    /// // [[0, 5, 0], [0, 0, 0], [6, 0, 7]]
    /// let m = TensorData::sparse(vec![5_i64, 6, 7], vec![0, 1, 1, 3], vec![1, 0, 2], [3, 3])?;
    /// assert_eq!(m.to_dense(9)?.as_i64(), Some(&[0, 5, 0, 0, 0, 0, 6, 0, 7][..]));
    /// # Ok::<_, tinkex_wire::InvalidInput>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the indices do not describe a matrix of that shape.
    pub fn sparse<T: super::TensorElement>(
        values: Vec<T>,
        row_starts: impl Into<SharedSlice<i64>>,
        columns: impl Into<SharedSlice<i64>>,
        shape: [usize; 2],
    ) -> Result<Self, InvalidInput> {
        let csr = Csr { row_starts: row_starts.into(), columns: columns.into() };
        Self::from_csr(T::values(values), csr, shape.into()).map_err(|error| {
            let field = match error {
                CsrError::Shape(_) => "shape",
                CsrError::RowStarts(_) => "row_starts",
                CsrError::Columns(_) => "columns",
            };
            InvalidInput::new(field, error.reason())
        })
    }

    pub(crate) fn from_csr(values: TensorValues, csr: Csr, shape: Shape) -> Result<Self, CsrError> {
        csr.validate(&shape, values.len())?;
        Ok(Self { values, shape, sparse: Some(Box::new(csr)) })
    }

    /// Returns `true` for a sparse tensor.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.sparse.is_some()
    }

    /// Returns the start of each row within the values, followed by their number; `None` for a
    /// dense tensor.
    #[must_use]
    pub fn row_starts(&self) -> Option<&[i64]> {
        self.sparse.as_ref().map(|csr| &csr.row_starts[..])
    }

    /// Returns the column of each value; `None` for a dense tensor.
    #[must_use]
    pub fn columns(&self) -> Option<&[i64]> {
        self.sparse.as_ref().map(|csr| &csr.columns[..])
    }

    pub(crate) fn csr(&self) -> Option<&Csr> {
        self.sparse.as_deref()
    }

    /// Returns the dense form of the tensor.
    ///
    /// # Errors
    /// Returns an error if the dense form has more than `max_elements` elements, which can be far
    /// more than the sparse form has.
    pub fn to_dense(&self, max_elements: usize) -> Result<Self, InvalidInput> {
        let Some(csr) = &self.sparse else { return Ok(self.clone()) };
        let &[rows, width] = self.shape.dims() else { return Ok(self.clone()) };
        if self.shape.element_count().is_none_or(|elements| elements > max_elements) {
            let reason = format!("{:?} has more than {max_elements} elements", self.shape);
            return Err(InvalidInput::new("shape", reason));
        }
        let values = match &self.values {
            TensorValues::Int64(values) => {
                TensorValues::Int64(csr.scatter(values, rows, width).into())
            }
            TensorValues::Float32(values) => {
                TensorValues::Float32(csr.scatter(values, rows, width).into())
            }
        };
        Ok(Self { values, shape: self.shape.clone(), sparse: None })
    }

    /// Converts a dense matrix to sparse form if that form is smaller in protobuf.
    #[must_use]
    pub fn compact(self) -> Self {
        let &[rows, width] = self.shape.dims() else {
            return self;
        };
        if self.is_sparse() {
            return self;
        }
        // Compare bits: minus zero is not omitted. The sums cannot overflow, as all elements are in
        // memory.
        let smaller = |nonzero: usize| rows.saturating_add(1 + 2 * nonzero) < self.values.len();
        let gathered = match &self.values {
            TensorValues::Int64(values) => {
                let nonzero = values.iter().filter(|x| **x != 0).count();
                smaller(nonzero).then(|| {
                    let (csr, values) = Csr::gather(values, width, |x| x != 0);
                    (csr, TensorValues::Int64(values.into()))
                })
            }
            TensorValues::Float32(values) => {
                let nonzero = values.iter().filter(|x| x.to_bits() != 0).count();
                smaller(nonzero).then(|| {
                    let (csr, values) = Csr::gather(values, width, |x: f32| x.to_bits() != 0);
                    (csr, TensorValues::Float32(values.into()))
                })
            }
        };
        match gathered {
            Some((csr, values)) => Self { values, shape: self.shape, sparse: Some(Box::new(csr)) },
            None => self,
        }
    }
}

impl Csr {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "`validate` accepted the indices"
    )]
    fn scatter<T: Copy + Default>(&self, values: &[T], rows: usize, width: usize) -> Vec<T> {
        let mut cells = vec![T::default(); rows * width];
        for (row, bounds) in self.row_starts.windows(2).enumerate() {
            for at in bounds[0] as usize..bounds[1] as usize {
                cells[row * width + self.columns[at] as usize] = values[at];
            }
        }
        cells
    }

    #[expect(clippy::cast_possible_wrap, reason = "no slice has more than i64::MAX elements")]
    fn gather<T: Copy>(cells: &[T], width: usize, keep: impl Fn(T) -> bool) -> (Self, Vec<T>) {
        let mut starts = vec![0];
        let mut columns = Vec::new();
        let mut values = Vec::new();
        for row in cells.chunks(width) {
            for (column, cell) in row.iter().enumerate() {
                if keep(*cell) {
                    columns.push(column as i64);
                    values.push(*cell);
                }
            }
            starts.push(values.len() as i64);
        }
        (Self { row_starts: starts.into(), columns: columns.into() }, values)
    }
}
