//! The JSON form of a tensor: flat numbers, a type name, a shape.
//!
//! A missing number is `null` in JSON and NaN in memory.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Csr, DType, Shape, TensorData, TensorValues};

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
        struct Form {
            data: Numbers,
            dtype: DType,
            #[serde(default)]
            shape: Option<Vec<usize>>,
            #[serde(default)]
            sparse_crow_indices: Option<Vec<i64>>,
            #[serde(default)]
            sparse_col_indices: Option<Vec<i64>>,
        }

        let form = Form::deserialize(deserializer)?;
        let values = match (form.dtype, form.data) {
            (DType::Int64, Numbers::Ints(numbers)) => TensorValues::Int64(numbers.into()),
            (DType::Int64, Numbers::Floats(_)) => {
                return Err(D::Error::custom("data: int64 numbers must be whole and fit 64 bits"));
            }
            (DType::Float32, numbers) => TensorValues::Float32(numbers.into_floats().into()),
        };
        let shape = form.shape.map_or(Shape::UNSPECIFIED, Shape::from);
        match (form.sparse_crow_indices, form.sparse_col_indices) {
            (Some(row_starts), Some(columns)) => {
                let csr = Csr { row_starts: row_starts.into(), columns: columns.into() };
                Self::from_csr(values, csr, shape).map_err(|fault| D::Error::custom(fault.reason()))
            }
            // Sparse only if both lists are there.
            _ => Self::new(values, shape).map_err(D::Error::custom),
        }
    }
}

/// Numbers whose type is not known yet: it may stand behind them.
enum Numbers {
    /// All whole.
    Ints(Vec<i64>),
    /// Some not whole, too large, or missing.
    Floats(Vec<f64>),
}

impl Numbers {
    #[expect(clippy::cast_possible_truncation, reason = "narrowing to float32 is the wire's rule")]
    #[expect(clippy::cast_precision_loss, reason = "narrowing to float32 is the wire's rule")]
    fn into_floats(self) -> Vec<f32> {
        match self {
            Self::Ints(numbers) => numbers.into_iter().map(|number| number as f32).collect(),
            Self::Floats(numbers) => numbers.into_iter().map(|number| number as f32).collect(),
        }
    }
}

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;

        impl<'de> Visitor<'de> for List {
            type Value = Numbers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of numbers")
            }

            #[expect(clippy::cast_precision_loss, reason = "becomes float32 in the end")]
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Numbers, A::Error> {
                let mut ints = Vec::new();
                let mut floats = loop {
                    match list.next_element()? {
                        None => return Ok(Numbers::Ints(ints)),
                        Some(Number::Int(number)) => ints.push(number),
                        Some(Number::Float(number)) => {
                            let mut floats: Vec<f64> = ints.iter().map(|int| *int as f64).collect();
                            floats.push(number);
                            break floats;
                        }
                    }
                };
                while let Some(number) = list.next_element()? {
                    floats.push(match number {
                        Number::Int(number) => number as f64,
                        Number::Float(number) => number,
                    });
                }
                Ok(Numbers::Floats(floats))
            }
        }

        deserializer.deserialize_seq(List)
    }
}

enum Number {
    Int(i64),
    Float(f64),
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;

        impl Visitor<'_> for One {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or null")
            }

            fn visit_i64<E>(self, number: i64) -> Result<Number, E> {
                Ok(Number::Int(number))
            }

            #[expect(clippy::cast_precision_loss, reason = "too large for an int64")]
            fn visit_u64<E>(self, number: u64) -> Result<Number, E> {
                Ok(i64::try_from(number).map_or(Number::Float(number as f64), Number::Int))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Number, E> {
                Ok(Number::Float(number))
            }

            fn visit_unit<E>(self) -> Result<Number, E> {
                Ok(Number::Float(f64::NAN))
            }
        }

        deserializer.deserialize_any(One)
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        [Self::Int64, Self::Float32]
            .into_iter()
            .find(|dtype| dtype.as_str() == name)
            .ok_or_else(|| D::Error::unknown_variant(&name, &["int64", "float32"]))
    }
}
