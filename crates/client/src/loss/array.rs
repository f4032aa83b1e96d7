//! [`Array`]: numbers with up to two dimensions, and how two of them meet.

/// How many rows and columns. One dimension is one row; a single number is one row and one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Size {
    pub(super) const ONE: Self = Self { rows: 1, cols: 1 };

    fn len(self) -> usize {
        self.rows * self.cols
    }

    /// What both stretch to, if one fits the other.
    fn meet(self, other: Self) -> Option<Self> {
        let one = |a: usize, b: usize| match (a, b) {
            _ if a == b => Some(a),
            (1, n) | (n, 1) => Some(n),
            _ => None,
        };
        Some(Self { rows: one(self.rows, other.rows)?, cols: one(self.cols, other.cols)? })
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array {
    pub(super) size: Size,
    pub(super) values: Vec<f64>,
}

impl Array {
    pub(super) fn scalar(value: f64) -> Self {
        Self { size: Size::ONE, values: vec![value] }
    }

    pub(super) fn filled(size: Size, value: f64) -> Self {
        Self { size, values: vec![value; size.len()] }
    }

    pub(super) fn map(&self, function: impl Fn(f64) -> f64) -> Self {
        Self { size: self.size, values: self.values.iter().map(|value| function(*value)).collect() }
    }

    /// Value by value, the smaller one stretched; `None` if they do not fit.
    pub(super) fn zip(&self, other: &Self, function: impl Fn(f64, f64) -> f64) -> Option<Self> {
        let size = self.size.meet(other.size)?;
        let mut values = Vec::with_capacity(size.len());
        for row in 0..size.rows {
            for col in 0..size.cols {
                values.push(function(self.at(row, col), other.at(row, col)));
            }
        }
        Some(Self { size, values })
    }

    /// Sums up what was stretched, back to a size.
    pub(super) fn shrink(self, size: Size) -> Self {
        if self.size == size {
            return self;
        }
        let mut small = Self::filled(size, 0.0);
        for row in 0..self.size.rows {
            for col in 0..self.size.cols {
                let at = (row % size.rows) * size.cols + col % size.cols;
                small.values[at] += self.values[row * self.size.cols + col];
            }
        }
        small
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (value, more) in self.values.iter_mut().zip(&other.values) {
            *value += more;
        }
    }

    pub(super) fn sum(&self) -> f64 {
        self.values.iter().sum()
    }

    pub(super) fn rows(&self) -> std::slice::ChunksExact<'_, f64> {
        self.values.chunks_exact(self.size.cols.max(1))
    }

    fn at(&self, row: usize, col: usize) -> f64 {
        let row = if self.size.rows == 1 { 0 } else { row };
        let col = if self.size.cols == 1 { 0 } else { col };
        self.values[row * self.size.cols + col]
    }
}
