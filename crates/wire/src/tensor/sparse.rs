//! Sparse matrices in compressed-sparse-row form.
//!
//! `row_starts[i]..row_starts[i + 1]` are the places of row `i` within the values and `columns`.

use crate::InvalidInput;
use crate::slice::SharedSlice;

use super::{Shape, TensorData, TensorValues};

/// Where the listed values of a sparse matrix belong.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Csr {
    pub(crate) row_starts: SharedSlice<i64>,
    pub(crate) columns: SharedSlice<i64>,
}

/// What is wrong with a pair of index lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CsrFault {
    Shape(&'static str),
    RowStarts(&'static str),
    Columns(&'static str),
}

impl CsrFault {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Shape(why) | Self::RowStarts(why) | Self::Columns(why) => why,
        }
    }
}

impl Csr {
    /// Whether these indices describe `values` numbers inside `shape`.
    pub(crate) fn check(&self, shape: &Shape, values: usize) -> Result<(), CsrFault> {
        let [rows, width] = *shape.dims() else {
            return Err(CsrFault::Shape("a sparse tensor needs a shape of two dimensions"));
        };
        if shape.element_count().is_none() {
            return Err(CsrFault::Shape("the shape has too many cells"));
        }
        let starts = &self.row_starts;
        if rows.checked_add(1) != Some(starts.len()) {
            return Err(CsrFault::RowStarts("there must be one more row start than rows"));
        }
        if starts.first() != Some(&0) {
            return Err(CsrFault::RowStarts("row starts must begin with 0"));
        }
        if starts.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(CsrFault::RowStarts("row starts must not decrease"));
        }
        if starts.last().and_then(|end| usize::try_from(*end).ok()) != Some(values) {
            return Err(CsrFault::RowStarts("row starts must end with the number of values"));
        }
        if self.columns.len() != values {
            return Err(CsrFault::Columns("there must be one column index per value"));
        }
        let inside = |column: &i64| usize::try_from(*column).is_ok_and(|column| column < width);
        if !self.columns.iter().all(inside) {
            return Err(CsrFault::Columns("a column index lies outside the shape"));
        }
        Ok(())
    }
}

impl TensorData {
    /// A sparse matrix: `values` row by row, the start of every row (and the end) within them, and
    /// the column of each value.
    ///
    /// ```
    /// use tinkex_wire::TensorData;
    ///
    /// // [[0, 5, 0], [0, 0, 0], [6, 0, 7]]
    /// let m = TensorData::sparse(vec![5_i64, 6, 7], vec![0, 1, 1, 3], vec![1, 0, 2], [3, 3])?;
    /// assert_eq!(m.to_dense(9)?.as_i64(), Some(&[0, 5, 0, 0, 0, 0, 6, 0, 7][..]));
    /// # Ok::<_, tinkex_wire::InvalidInput>(())
    /// ```
    ///
    /// # Errors
    /// If the lists do not describe a matrix of that shape.
    pub fn sparse<T: super::TensorElement>(
        values: Vec<T>,
        row_starts: impl Into<SharedSlice<i64>>,
        columns: impl Into<SharedSlice<i64>>,
        shape: [usize; 2],
    ) -> Result<Self, InvalidInput> {
        let csr = Csr { row_starts: row_starts.into(), columns: columns.into() };
        Self::from_csr(T::values(values), csr, shape.into()).map_err(|fault| {
            let field = match fault {
                CsrFault::Shape(_) => "shape",
                CsrFault::RowStarts(_) => "row_starts",
                CsrFault::Columns(_) => "columns",
            };
            InvalidInput::new(field, fault.reason())
        })
    }

    pub(crate) fn from_csr(values: TensorValues, csr: Csr, shape: Shape) -> Result<Self, CsrFault> {
        csr.check(&shape, values.len())?;
        Ok(Self { values, shape, sparse: Some(Box::new(csr)) })
    }

    /// Whether only some cells are listed.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.sparse.is_some()
    }

    /// The start of every row within the values, and the end; only for a sparse tensor.
    #[must_use]
    pub fn row_starts(&self) -> Option<&[i64]> {
        self.sparse.as_ref().map(|csr| &csr.row_starts[..])
    }

    /// The column of every value; only for a sparse tensor.
    #[must_use]
    pub fn columns(&self) -> Option<&[i64]> {
        self.sparse.as_ref().map(|csr| &csr.columns[..])
    }

    pub(crate) fn csr(&self) -> Option<&Csr> {
        self.sparse.as_deref()
    }

    /// The same matrix with every cell written out; cells that were not listed are 0.
    ///
    /// # Errors
    /// If that would be more than `max_cells`: a matrix can be far larger than its listed values.
    pub fn to_dense(&self, max_cells: usize) -> Result<Self, InvalidInput> {
        let (Some(csr), &[rows, width]) = (&self.sparse, self.shape.dims()) else {
            return Ok(self.clone());
        };
        if self.shape.element_count().is_none_or(|cells| cells > max_cells) {
            let why = format!("{:?} has more than {max_cells} cells", self.shape);
            return Err(InvalidInput::new("shape", why));
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

    /// The same matrix in whichever form is smaller on the wire.
    ///
    /// Only a dense matrix changes, and only if listing its non-zero cells saves space.
    #[must_use]
    pub fn compact(self) -> Self {
        let &[rows, width] = self.shape.dims() else {
            return self;
        };
        if self.is_sparse() {
            return self;
        }
        // Every cell is in memory, so the products are small; zero is a value, minus zero another.
        let smaller = |kept: usize| rows.saturating_add(1 + 2 * kept) < self.values.len();
        let gathered = match &self.values {
            TensorValues::Int64(values) => {
                let kept = values.iter().filter(|x| **x != 0).count();
                smaller(kept).then(|| {
                    let (csr, values) = Csr::gather(values, width, |x| x != 0);
                    (csr, TensorValues::Int64(values.into()))
                })
            }
            TensorValues::Float32(values) => {
                let kept = values.iter().filter(|x| x.to_bits() != 0).count();
                smaller(kept).then(|| {
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
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked indices")]
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
        let (mut starts, mut columns, mut values) = (vec![0], Vec::new(), Vec::new());
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
