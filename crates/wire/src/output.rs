//! [`LossOutputs`]: output tensors of each datum of a batch.
//!
//! The protobuf message concatenates the tensors of many datums in one buffer per field. The
//! decoded form keeps these columns, and the output of a datum is a view into them. The number of
//! allocations therefore depends on the number of fields, not of datums.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::Error as _;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::InvalidInput;
use crate::tensor::{Shape, TensorData, TensorValues};

/// Output tensors of each datum of a batch, in the order of the data.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::LossOutputs;
/// use tinkex::{LossRecord, TensorValues};
///
/// let record = LossRecord::new(2).field("logprobs", vec![-0.5_f32, -1.0, -2.0], [1, 2])?;
/// let outputs = LossOutputs::from(record);
/// assert_eq!(outputs.len(), 2);
/// assert_eq!(outputs.get(1).unwrap().f32("logprobs"), Some(&[-1.0, -2.0][..]));
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
///
/// Two values are equal if every datum has the same tensors; the grouping into records is ignored.
#[derive(Clone, Debug, Default)]
pub struct LossOutputs {
    records: Vec<LossRecord>,
    /// Number of datums up to and including each record.
    ends: Vec<usize>,
}

/// Consecutive datums whose outputs have the same fields and element types.
#[derive(Clone, Debug, PartialEq)]
pub struct LossRecord {
    pub(crate) type_tag: String,
    pub(crate) datums: usize,
    pub(crate) fields: Vec<OutputColumn>,
}

/// Concatenated values of one field of all datums of a record.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OutputColumn {
    pub(crate) name: String,
    pub(crate) values: TensorValues,
    /// Start of each datum's values, and the end of the last one.
    pub(crate) starts: Vec<usize>,
    /// Dimensions after the first one.
    pub(crate) trailing: Shape,
}

impl LossRecord {
    /// Creates a record of the given number of datums without fields.
    #[must_use]
    pub fn new(datums: usize) -> Self {
        Self { type_tag: String::new(), datums, fields: Vec::new() }
    }

    /// Sets the type of the outputs.
    #[must_use]
    pub fn type_tag(mut self, tag: impl Into<String>) -> Self {
        self.type_tag = tag.into();
        self
    }

    /// Adds a field, or replaces the field of that name. `values` are the concatenated values of
    /// all datums, `lengths` their number per datum.
    ///
    /// # Errors
    /// Returns an error if there is not one length per datum, or if the sum of the lengths differs
    /// from the number of values.
    pub fn field<T: crate::TensorElement>(
        self,
        name: impl Into<String>,
        values: Vec<T>,
        lengths: impl IntoIterator<Item = usize>,
    ) -> Result<Self, InvalidInput> {
        self.field_with_shape(name, T::values(values), lengths, Shape::SCALAR)
    }

    /// Adds a field whose tensors have the `trailing` dimensions after the first one.
    ///
    /// # Errors
    /// Returns an error as [`LossRecord::field`] does, or if a length is not a multiple of the
    /// product of the `trailing` dimensions.
    pub fn field_with_shape(
        mut self,
        name: impl Into<String>,
        values: TensorValues,
        lengths: impl IntoIterator<Item = usize>,
        trailing: impl Into<Shape>,
    ) -> Result<Self, InvalidInput> {
        let name = name.into();
        let trailing = trailing.into();
        let mut starts = vec![0];
        let mut end = 0_usize;
        for length in lengths {
            end = end.saturating_add(length);
            starts.push(end);
        }
        if starts.len() - 1 != self.datums || end != values.len() {
            let reason = format!(
                "has {} lengths with a sum of {end}, expected {} lengths with a sum of {}",
                starts.len() - 1,
                self.datums,
                values.len()
            );
            return Err(InvalidInput::new(name, reason));
        }
        let column = OutputColumn { name, values, starts, trailing };
        if let Err(datum) = column.check_rows() {
            let reason = format!(
                "datum {datum} does not consist of complete rows of shape {:?}",
                column.trailing
            );
            return Err(InvalidInput::new(column.name, reason));
        }
        self.fields.retain(|other| other.name != column.name);
        self.fields.push(column);
        Ok(self)
    }
}

impl OutputColumn {
    /// Checks that every datum consists of complete rows. Returns the first datum that does not.
    pub(crate) fn check_rows(&self) -> Result<(), usize> {
        let row = self.trailing.element_count().unwrap_or(0);
        let whole = |len: usize| {
            if row == 0 { len == 0 } else { len.is_multiple_of(row) }
        };
        match self.starts.windows(2).position(|pair| !whole(pair[1] - pair[0])) {
            Some(datum) => Err(datum),
            None => Ok(()),
        }
    }

    fn slice(&self, datum: usize) -> TensorData {
        let range = self.starts[datum]..self.starts[datum + 1];
        let row = self.trailing.element_count().unwrap_or(0);
        let rows = range.len().checked_div(row).unwrap_or(0);
        let dims: Vec<usize> = [rows].iter().chain(self.trailing.dims()).copied().collect();
        TensorData::new(self.values.slice(range), &dims[..])
            .expect("`check_rows` accepted the column")
    }
}

impl LossOutputs {
    pub(crate) fn from_records(records: Vec<LossRecord>) -> Option<Self> {
        let mut total = 0_usize;
        let mut ends = Vec::with_capacity(records.len());
        for record in &records {
            total = total.checked_add(record.datums)?;
            ends.push(total);
        }
        Some(Self { records, ends })
    }

    /// Returns the number of datums.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns `true` if there are no datums.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the output of one datum.
    #[must_use]
    pub fn get(&self, datum: usize) -> Option<LossOutput<'_>> {
        let at = self.ends.partition_point(|end| *end <= datum);
        let record = self.records.get(at)?;
        let start = self.ends[at] - record.datums;
        Some(LossOutput { record, datum: datum - start })
    }

    /// Iterates over the outputs of all datums in order.
    pub fn iter(&self) -> impl Iterator<Item = LossOutput<'_>> {
        self.records
            .iter()
            .flat_map(|record| (0..record.datums).map(move |datum| LossOutput { record, datum }))
    }

    /// Appends the outputs of another batch.
    ///
    /// # Panics
    /// Panics if the number of datums overflows `usize`.
    pub fn append(&mut self, other: Self) {
        let before = self.len();
        let shifted =
            |end: &usize| before.checked_add(*end).expect("the number of datums fits into usize");
        self.ends.extend(other.ends.iter().map(shifted));
        self.records.extend(other.records);
    }

    pub(crate) fn records(&self) -> &[LossRecord] {
        &self.records
    }
}

impl PartialEq for LossOutputs {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().zip(other.iter()).all(|(a, b)| a == b)
    }
}

impl PartialEq for LossOutput<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.names().len() == other.names().len()
            && self.names().all(|name| self.tensor(name) == other.tensor(name))
    }
}

impl<'a> IntoIterator for &'a LossOutputs {
    type Item = LossOutput<'a>;
    type IntoIter = Box<dyn Iterator<Item = LossOutput<'a>> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        Box::new(self.iter())
    }
}

impl From<LossRecord> for LossOutputs {
    fn from(record: LossRecord) -> Self {
        Self { ends: vec![record.datums], records: vec![record] }
    }
}

/// Output tensors of one datum, as a view into [`LossOutputs`].
#[derive(Clone, Copy)]
pub struct LossOutput<'a> {
    record: &'a LossRecord,
    datum: usize,
}

impl<'a> LossOutput<'a> {
    /// Iterates over the names of the tensors.
    pub fn names(self) -> impl Iterator<Item = &'a str> + ExactSizeIterator {
        self.record.fields.iter().map(|column| column.name.as_str())
    }

    /// Returns a tensor, which shares the memory of the batch.
    #[must_use]
    pub fn tensor(self, name: &str) -> Option<TensorData> {
        Some(self.column(name)?.slice(self.datum))
    }

    /// Returns the values of a `float32` tensor.
    #[must_use]
    pub fn f32(self, name: &str) -> Option<&'a [f32]> {
        let column = self.column(name)?;
        let TensorValues::Float32(values) = &column.values else {
            return None;
        };
        Some(&values[column.starts[self.datum]..column.starts[self.datum + 1]])
    }

    /// Returns the values of an `int64` tensor.
    #[must_use]
    pub fn i64(self, name: &str) -> Option<&'a [i64]> {
        let column = self.column(name)?;
        let TensorValues::Int64(values) = &column.values else {
            return None;
        };
        Some(&values[column.starts[self.datum]..column.starts[self.datum + 1]])
    }

    fn column(self, name: &str) -> Option<&'a OutputColumn> {
        self.record.fields.iter().find(|column| column.name == name)
    }
}

impl fmt::Debug for LossOutput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.names().map(|name| (name, self.tensor(name)))).finish()
    }
}

// JSON form of servers without protobuf results: a list of maps from name to tensor.

impl Serialize for LossOutputs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.len()))?;
        for output in self.iter() {
            list.serialize_element(&output)?;
        }
        list.end()
    }
}

impl Serialize for LossOutput<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.record.fields.len()))?;
        for column in &self.record.fields {
            map.serialize_entry(&column.name, &column.slice(self.datum))?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for LossOutputs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let datums = Vec::<BTreeMap<String, TensorData>>::deserialize(deserializer)?;
        let mut records = Vec::with_capacity(datums.len());
        for tensors in datums {
            let mut record = LossRecord::new(1);
            for (name, tensor) in tensors {
                if tensor.is_sparse() {
                    return Err(D::Error::custom(format!(
                        "{name} is sparse, expected a dense tensor"
                    )));
                }
                let trailing = Shape::from(tensor.shape().dims().get(1..).unwrap_or(&[]));
                let values = tensor.values().clone();
                let len = values.len();
                record = record
                    .field_with_shape(name, values, [len], trailing)
                    .map_err(D::Error::custom)?;
            }
            records.push(record);
        }
        Self::from_records(records).ok_or_else(|| D::Error::custom("too many datums"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_batches_are_read_as_one_batch() {
        let batch = |values: Vec<f32>, lengths: [usize; 2]| {
            LossOutputs::from(LossRecord::new(2).field("x", values, lengths).unwrap())
        };
        let mut all = batch(vec![1.0, 2.0, 3.0], [1, 2]);
        all.append(LossOutputs::from(LossRecord::new(0)));
        all.append(batch(vec![4.0], [0, 1]));
        assert_eq!(all.len(), 4);
        let seen: Vec<_> = all.iter().map(|output| output.f32("x").unwrap().to_vec()).collect();
        assert_eq!(seen, [vec![1.0], vec![2.0, 3.0], vec![], vec![4.0]]);
        let got: Vec<_> = (0..4).map(|i| all.get(i).unwrap().f32("x").unwrap().to_vec()).collect();
        assert_eq!(got, seen);
        assert!(all.get(4).is_none());
    }

    #[test]
    fn trailing_dimensions_determine_the_shape_of_each_datum() {
        let values = TensorValues::Float32(vec![0.0; 12].into());
        let record =
            LossRecord::new(2).field_with_shape("x", values.clone(), [8, 4], [2, 2]).unwrap();
        let outputs = LossOutputs::from(record);
        assert_eq!(outputs.get(0).unwrap().tensor("x").unwrap().shape().dims(), [2, 2, 2]);
        assert_eq!(outputs.get(1).unwrap().tensor("x").unwrap().shape().dims(), [1, 2, 2]);
        assert!(LossRecord::new(2).field_with_shape("x", values.clone(), [7, 5], [2, 2]).is_err());
        assert!(LossRecord::new(2).field_with_shape("x", values.clone(), [8], [2]).is_err());
        assert!(LossRecord::new(2).field_with_shape("x", values, [8, 8], [2]).is_err());
    }
}
