//! JSON encoding of a tensor: a flat list of values, the element type and the shape.
//!
//! NaN is encoded as null.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Csr, DType, Shape, TensorData, TensorValues};
use crate::codec::json::positioned;

impl Serialize for TensorData {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("TensorData", 5)?;
        match &self.values {
            TensorValues::Int64(values) => out.serialize_field("data", &values[..])?,
            TensorValues::Float32(values) => out.serialize_field("data", &values[..])?,
        }
        out.serialize_field("dtype", self.dtype().as_str())?;
        if self.shape != Shape::UNSPECIFIED {
            out.serialize_field("shape", self.shape.dims())?;
        }
        if let Some(csr) = &self.sparse {
            out.serialize_field("sparse_crow_indices", &csr.row_starts[..])?;
            out.serialize_field("sparse_col_indices", &csr.columns[..])?;
        }
        out.end()
    }
}

impl<'de> Deserialize<'de> for TensorData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct TensorFields {
            data: NumberList,
            dtype: DType,
            #[serde(default)]
            shape: Option<Vec<usize>>,
            #[serde(default)]
            sparse_crow_indices: Option<Vec<i64>>,
            #[serde(default)]
            sparse_col_indices: Option<Vec<i64>>,
        }

        positioned::object(deserializer, |form: TensorFields| {
            let values = match (form.dtype, form.data) {
                (DType::Int64, NumberList::Ints(numbers)) => TensorValues::Int64(numbers.into()),
                (DType::Int64, NumberList::Floats(_)) => {
                    let message = "data: int64 values must be integers of at most 64 bits";
                    return Err(message.to_owned());
                }
                (DType::Float32, numbers) => TensorValues::Float32(numbers.into_floats().into()),
            };
            let shape = form.shape.map_or(Shape::UNSPECIFIED, Shape::from);
            match (form.sparse_crow_indices, form.sparse_col_indices) {
                (Some(row_starts), Some(columns)) => {
                    let csr = Csr { row_starts: row_starts.into(), columns: columns.into() };
                    Self::from_csr(values, csr, shape).map_err(|error| error.reason().to_owned())
                }
                // A tensor with a single index list is dense.
                _ => Self::new(values, shape).map_err(|error| error.to_string()),
            }
        })
    }
}

/// List of numbers whose element type is not known yet: `dtype` may follow `data`.
enum NumberList {
    /// Only integers that fit into 64 bits.
    Ints(Vec<i64>),
    /// At least one fraction, large integer or null.
    Floats(Vec<f64>),
}

impl NumberList {
    #[expect(clippy::cast_possible_truncation, reason = "the protocol narrows to float32")]
    #[expect(clippy::cast_precision_loss, reason = "the protocol narrows to float32")]
    fn into_floats(self) -> Vec<f32> {
        match self {
            Self::Ints(numbers) => numbers.into_iter().map(|number| number as f32).collect(),
            Self::Floats(numbers) => numbers.into_iter().map(|number| number as f32).collect(),
        }
    }
}

impl<'de> Deserialize<'de> for NumberList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberListVisitor;

        impl<'de> Visitor<'de> for NumberListVisitor {
            type Value = NumberList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of numbers")
            }

            #[expect(
                clippy::cast_precision_loss,
                reason = "the values are narrowed to float32 later"
            )]
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<NumberList, A::Error> {
                let mut ints = Vec::new();
                let mut floats = loop {
                    match list.next_element()? {
                        None => return Ok(NumberList::Ints(ints)),
                        Some(JsonNumber::Int(number)) => ints.push(number),
                        Some(JsonNumber::Float(number)) => {
                            let mut floats: Vec<f64> = ints.iter().map(|int| *int as f64).collect();
                            floats.push(number);
                            break floats;
                        }
                    }
                };
                while let Some(number) = list.next_element()? {
                    floats.push(match number {
                        JsonNumber::Int(number) => number as f64,
                        JsonNumber::Float(number) => number,
                    });
                }
                Ok(NumberList::Floats(floats))
            }
        }

        deserializer.deserialize_seq(NumberListVisitor)
    }
}

enum JsonNumber {
    Int(i64),
    Float(f64),
}

impl<'de> Deserialize<'de> for JsonNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor;

        impl Visitor<'_> for NumberVisitor {
            type Value = JsonNumber;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or null")
            }

            fn visit_i64<E>(self, number: i64) -> Result<JsonNumber, E> {
                Ok(JsonNumber::Int(number))
            }

            #[expect(clippy::cast_precision_loss, reason = "too large for an int64")]
            fn visit_u64<E>(self, number: u64) -> Result<JsonNumber, E> {
                Ok(i64::try_from(number).map_or(JsonNumber::Float(number as f64), JsonNumber::Int))
            }

            fn visit_f64<E>(self, number: f64) -> Result<JsonNumber, E> {
                Ok(JsonNumber::Float(number))
            }

            fn visit_unit<E>(self) -> Result<JsonNumber, E> {
                Ok(JsonNumber::Float(f64::NAN))
            }
        }

        deserializer.deserialize_any(NumberVisitor)
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        positioned::string(deserializer, "int64 or float32", |name| {
            let known = [Self::Int64, Self::Float32];
            known
                .into_iter()
                .find(|dtype| dtype.as_str() == name)
                .ok_or_else(|| format!("unknown variant `{name}`, expected `int64` or `float32`"))
        })
    }
}
