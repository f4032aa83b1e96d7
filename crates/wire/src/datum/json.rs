//! JSON form of a [`Datum`], as the API defines it, with the provenance added if it is set.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Datum, Provenance, loss_input};
use crate::codec::json::positioned;
use crate::input::ModelInput;
use crate::tensor::TensorData;

/// Serializes as `{"model_input": …, "loss_fn_inputs": {…}}`, and `provenance` if it is set.
///
/// JSON has no NaN and no infinity: such elements become null, which is read as NaN.
impl Serialize for Datum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        DatumFields { datum: self, provenance: self.provenance() }.serialize(serializer)
    }
}

/// JSON form of `datum` with this provenance instead of its own.
pub(crate) struct DatumFields<'a> {
    pub(crate) datum: &'a Datum,
    pub(crate) provenance: Option<&'a Provenance>,
}

impl Serialize for DatumFields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("Datum", 3)?;
        out.serialize_field("model_input", self.datum.model_input())?;
        out.serialize_field("loss_fn_inputs", &LossInputs(self.datum))?;
        match self.provenance {
            Some(provenance) => out.serialize_field("provenance", provenance)?,
            None => out.skip_field("provenance")?,
        }
        out.end()
    }
}

struct LossInputs<'a>(&'a Datum);

impl Serialize for LossInputs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.loss_inputs())
    }
}

/// Fails for a datum that breaks a rule of [`DatumBuilder::build`](super::DatumBuilder::build).
impl<'de> Deserialize<'de> for Datum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct DecodedDatum {
            model_input: ModelInput,
            loss_fn_inputs: DecodedInputs,
            #[serde(default)]
            provenance: Option<Box<Provenance>>,
        }

        positioned::object(deserializer, |form: DecodedDatum| {
            let DecodedDatum { model_input, loss_fn_inputs, provenance } = form;
            let datum = Self::from_parts(model_input, loss_fn_inputs.0, provenance);
            datum.validate().map_err(|error| error.to_string())?;
            Ok(datum)
        })
    }
}

/// Loss inputs in the order of the text.
struct DecodedInputs(Vec<(Cow<'static, str>, TensorData)>);

impl<'de> Deserialize<'de> for DecodedInputs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InputsVisitor;

        impl<'de> Visitor<'de> for InputsVisitor {
            type Value = DecodedInputs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from the name of a loss input to its tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DecodedInputs, A::Error> {
                let mut inputs: Vec<(Cow<'static, str>, TensorData)> = Vec::new();
                while let Some((name, tensor)) = map.next_entry::<String, TensorData>()? {
                    if inputs.iter().any(|(known, _)| *known == name) {
                        return Err(A::Error::custom(format!("duplicate loss input {name:?}")));
                    }
                    let known = loss_input::ALL.into_iter().find(|known| *known == name);
                    inputs.push((known.map_or(Cow::Owned(name), Cow::Borrowed), tensor));
                }
                Ok(DecodedInputs(inputs))
            }
        }

        deserializer.deserialize_map(InputsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::datum::ProvenanceSpan;

    #[test]
    fn a_datum_has_the_json_form_of_the_api_and_is_read_back() {
        let datum = Datum::completion([1, 2], [3]).unwrap();
        let form = json!({
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
                "weights": {"data": [0.0, 1.0], "dtype": "float32", "shape": [2]},
            },
        });
        assert_eq!(serde_json::to_value(&datum).unwrap(), form);
        let text = serde_json::to_string(&datum).unwrap();
        assert_eq!(serde_json::from_str::<Datum>(&text).unwrap(), datum);
        assert_eq!(serde_json::from_value::<Datum>(form).unwrap(), datum);
    }

    #[test]
    fn provenance_is_kept() {
        let datum = Datum::completion([1, 2], [3]).unwrap();
        let provenance = Provenance {
            model_input: vec![ProvenanceSpan::prompt("s", 0, 2)],
            loss_inputs: vec![
                ProvenanceSpan::prompt("s", 1, 1),
                ProvenanceSpan::sampled("s", 0, 1),
            ],
        };
        let Datum { model_input, loss_inputs, .. } = datum;
        let datum = Datum::from_parts(model_input, loss_inputs, Some(Box::new(provenance)));
        let text = serde_json::to_string(&datum).unwrap();
        assert!(text.contains(r#""source":"sampled""#), "{text}");
        assert_eq!(serde_json::from_str::<Datum>(&text).unwrap(), datum);
    }

    #[test]
    fn an_invalid_datum_is_not_read() {
        let tensor = |values: &str| format!(r#"{{"data":{values},"dtype":"int64"}}"#);
        let datum = |inputs: String| {
            let input = r#"{"chunks":[{"type":"encoded_text","tokens":[1,2]}]}"#;
            format!(r#"{{"model_input":{input},"loss_fn_inputs":{{{inputs}}}}}"#)
        };
        let targets = format!(r#""target_tokens":{}"#, tensor("[2,3]"));
        assert!(serde_json::from_str::<Datum>(&datum(targets.clone())).is_ok());
        let short = format!(r#""target_tokens":{}"#, tensor("[2]"));
        assert!(serde_json::from_str::<Datum>(&datum(short)).is_err());
        let twice = serde_json::from_str::<Datum>(&datum(format!("{targets},{targets}")));
        assert!(twice.unwrap_err().to_string().contains("duplicate loss input"));
    }
}
