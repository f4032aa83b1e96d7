//! The JSON form of a tensor: flat numbers, a type name, a shape.
//!
//! A missing number is `null` in JSON and NaN in memory.

use serde::de::Error as _;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::slice::SharedSlice;

use super::{Csr, DType, Shape, TensorData, Values};

impl Serialize for TensorData {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("TensorData", 5)?;
        match &self.values {
            Values::Int64(values) => out.serialize_field("data", &values[..])?,
            Values::Float32(values) => out.serialize_field("data", &values[..])?,
        }
        out.serialize_field("dtype", self.dtype().as_str())?;
        if !self.shape.dims().is_empty() {
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
        struct Form<'a> {
            // Read once the type is known: it may stand behind the numbers.
            #[serde(borrow)]
            data: &'a RawValue,
            dtype: DType,
            #[serde(default)]
            shape: Option<Vec<usize>>,
            #[serde(default)]
            sparse_crow_indices: Option<Vec<i64>>,
            #[serde(default)]
            sparse_col_indices: Option<Vec<i64>>,
        }

        let form = Form::deserialize(deserializer)?;
        let values = match form.dtype {
            DType::Int64 => {
                let numbers: Vec<i64> =
                    serde_json::from_str(form.data.get()).map_err(|error| in_data(&error))?;
                Values::Int64(numbers.into())
            }
            DType::Float32 => {
                Values::Float32(floats(form.data.get()).map_err(|error| in_data(&error))?)
            }
        };
        let shape = Shape::from(&form.shape.unwrap_or_default()[..]);
        match (form.sparse_crow_indices, form.sparse_col_indices) {
            (Some(row_starts), Some(columns)) => {
                let csr = Csr { row_starts: row_starts.into(), columns: columns.into() };
                Self::from_csr(values, csr, shape).map_err(|fault| D::Error::custom(fault.reason()))
            }
            (None, None) => Self::new(values, shape).map_err(D::Error::custom),
            _ => Err(D::Error::custom(
                "sparse_crow_indices and sparse_col_indices must come together",
            )),
        }
    }
}

fn in_data<E: serde::de::Error>(error: &serde_json::Error) -> E {
    E::custom(format!("data: {error}"))
}

/// A list of numbers and nulls.
pub(crate) fn floats(json: &str) -> serde_json::Result<SharedSlice<f32>> {
    let numbers: Vec<Option<f32>> = serde_json::from_str(json)?;
    Ok(numbers.into_iter().map(|number| number.unwrap_or(f32::NAN)).collect())
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        [Self::Int64, Self::Float32]
            .into_iter()
            .find(|dtype| dtype.as_str() == name)
            .ok_or_else(|| D::Error::unknown_variant(&name, &["int64", "float32"]))
    }
}
