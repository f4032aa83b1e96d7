//! Arguments of graph nodes, and their JSON form.

use std::collections::BTreeMap;

use serde::de::{Deserialize, Deserializer};
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::Value;

/// Argument of a [`GraphNode`](crate::GraphNode).
///
/// In JSON an argument is a plain value, or an object with one key for a value that JSON cannot
/// express: `{"ref": "name"}`, `{"tuple": […]}`, `{"slice": [start, stop, step]}`,
/// `{"float": "inf"}` and so on. Deserialization never fails on an unknown form; it yields
/// [`GraphArg::Unknown`], which [`LossProgram::new`](crate::LossProgram::new) rejects with the name
/// of the node.
///
/// ```
/// use tinkex_autodiff::GraphArg;
///
/// let arg = GraphArg::tuple([GraphArg::node("mask"), GraphArg::from(f64::NEG_INFINITY)]);
/// let json = r#"{"tuple":[{"ref":"mask"},{"float":"-inf"}]}"#;
/// assert_eq!(serde_json::to_string(&arg)?, json);
/// assert_eq!(serde_json::from_str::<GraphArg>(json)?, arg);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GraphArg {
    /// Python's `None`.
    None,
    /// Boolean.
    Bool(bool),
    /// Integer.
    Int(i64),
    /// Floating-point number.
    Float(f64),
    /// String.
    Text(String),
    /// Value of an earlier node, by name.
    Ref(String),
    /// List.
    List(Vec<Self>),
    /// Tuple.
    Tuple(Vec<Self>),
    /// Dictionary with string keys.
    Dict(BTreeMap<String, Self>),
    /// Slice: start, stop, step.
    Slice(Box<[Self; 3]>),
    /// Python's `...`: all remaining dimensions.
    Ellipsis,
    /// Element type, such as `float32`.
    DType(String),
    /// Device, such as `cpu`. Has no effect on the result.
    Device(String),
    /// Storage layout, such as `strided`. Has no effect on the result.
    Layout(String),
    /// Memory format, such as `contiguous_format`. Has no effect on the result.
    MemoryFormat(String),
    /// JSON of no other form.
    Unknown {
        /// The JSON.
        json: Value,
        /// Why it is none of the other forms.
        reason: String,
    },
}

impl GraphArg {
    /// Creates a reference to the value of the node `name`.
    #[must_use]
    pub fn node(name: &str) -> Self {
        Self::Ref(name.to_owned())
    }

    /// Creates a tuple.
    #[must_use]
    pub fn tuple(items: impl IntoIterator<Item = Self>) -> Self {
        Self::Tuple(items.into_iter().collect())
    }

    /// Creates a dictionary. The last of several entries with the same key wins.
    #[must_use]
    pub fn dict<'a>(entries: impl IntoIterator<Item = (&'a str, Self)>) -> Self {
        Self::Dict(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// Creates a slice; `None` leaves a part to Python's default.
    #[must_use]
    pub fn slice(start: Option<i64>, stop: Option<i64>, step: Option<i64>) -> Self {
        Self::Slice(Box::new([start, stop, step].map(|part| part.map_or(Self::None, Self::Int))))
    }

    fn from_json(json: &Value) -> Self {
        Self::parse(json).unwrap_or_else(|reason| Self::Unknown { json: json.clone(), reason })
    }

    /// Converts JSON, or returns why it is no known form.
    fn parse(json: &Value) -> Result<Self, String> {
        Ok(match json {
            Value::Null => Self::None,
            Value::Bool(flag) => Self::Bool(*flag),
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(integer), _) => Self::Int(integer),
                (None, Some(float)) => Self::Float(float),
                (None, None) => return Err(format!("number {number} does not fit a float")),
            },
            Value::String(text) => Self::Text(text.clone()),
            Value::Array(items) => Self::List(from_json_list(items)),
            Value::Object(fields) => {
                let mut fields = fields.iter();
                match (fields.next(), fields.next()) {
                    (Some((key, value)), None) => Self::parse_tagged(key, value)?,
                    _ => return Err("an object argument must have exactly one key".to_owned()),
                }
            }
        })
    }

    /// Converts the object `{key: value}`.
    fn parse_tagged(key: &str, value: &Value) -> Result<Self, String> {
        Ok(match (key, value) {
            ("ref", Value::String(name)) => Self::Ref(name.clone()),
            ("tuple", Value::Array(items)) => Self::Tuple(from_json_list(items)),
            ("dict", Value::Object(entries)) => Self::Dict(
                entries.iter().map(|(key, value)| (key.clone(), Self::from_json(value))).collect(),
            ),
            ("slice", Value::Array(items)) => match <[Self; 3]>::try_from(from_json_list(items)) {
                Ok(parts) => Self::Slice(Box::new(parts)),
                Err(items) => return Err(format!("a slice has 3 parts, not {}", items.len())),
            },
            ("ellipsis", _) => Self::Ellipsis,
            ("float", Value::String(name)) => match name.as_str() {
                "inf" => Self::Float(f64::INFINITY),
                "-inf" => Self::Float(f64::NEG_INFINITY),
                "nan" => Self::Float(f64::NAN),
                other => return Err(format!("{other:?} is not a float")),
            },
            ("dtype", Value::String(name)) => Self::DType(name.clone()),
            ("device", Value::String(name)) => Self::Device(name.clone()),
            ("layout", Value::String(name)) => Self::Layout(name.clone()),
            ("memory_format", Value::String(name)) => Self::MemoryFormat(name.clone()),
            (other, _) => return Err(format!("unknown or malformed argument form {other:?}")),
        })
    }
}

fn from_json_list(items: &[Value]) -> Vec<GraphArg> {
    items.iter().map(GraphArg::from_json).collect()
}

impl<'de> Deserialize<'de> for GraphArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(|json| Self::from_json(&json))
    }
}

impl Serialize for GraphArg {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_unit(),
            Self::Bool(flag) => serializer.serialize_bool(*flag),
            Self::Int(number) => serializer.serialize_i64(*number),
            Self::Float(number) if number.is_nan() => tagged(serializer, "float", "nan"),
            Self::Float(f64::INFINITY) => tagged(serializer, "float", "inf"),
            Self::Float(f64::NEG_INFINITY) => tagged(serializer, "float", "-inf"),
            Self::Float(number) => serializer.serialize_f64(*number),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Ref(name) => tagged(serializer, "ref", name),
            Self::List(items) => items.serialize(serializer),
            Self::Tuple(items) => tagged(serializer, "tuple", items),
            Self::Dict(entries) => tagged(serializer, "dict", entries),
            Self::Slice(parts) => tagged(serializer, "slice", parts),
            Self::Ellipsis => tagged(serializer, "ellipsis", &true),
            Self::DType(name) => tagged(serializer, "dtype", name),
            Self::Device(name) => tagged(serializer, "device", name),
            Self::Layout(name) => tagged(serializer, "layout", name),
            Self::MemoryFormat(name) => tagged(serializer, "memory_format", name),
            Self::Unknown { json, .. } => json.serialize(serializer),
        }
    }
}

/// Serializes the object `{key: value}`.
fn tagged<S: Serializer>(
    serializer: S,
    key: &'static str,
    value: &(impl Serialize + ?Sized),
) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(1))?;
    map.serialize_entry(key, value)?;
    map.end()
}

impl From<f64> for GraphArg {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

impl From<i64> for GraphArg {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<i32> for GraphArg {
    fn from(number: i32) -> Self {
        Self::Int(number.into())
    }
}

impl From<bool> for GraphArg {
    fn from(flag: bool) -> Self {
        Self::Bool(flag)
    }
}

impl From<&str> for GraphArg {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Vec<Self>> for GraphArg {
    fn from(items: Vec<Self>) -> Self {
        Self::List(items)
    }
}

/// Converts `None` to [`GraphArg::None`].
impl<T: Into<Self>> From<Option<T>> for GraphArg {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::None, Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_survives_a_round_trip_through_json() {
        for (arg, json) in [
            (GraphArg::None, "null"),
            (GraphArg::from(true), "true"),
            (GraphArg::from(3), "3"),
            (GraphArg::from(1.0), "1.0"),
            (GraphArg::from(f64::INFINITY), r#"{"float":"inf"}"#),
            (GraphArg::from(f64::NEG_INFINITY), r#"{"float":"-inf"}"#),
            (GraphArg::from("mean"), r#""mean""#),
            (GraphArg::node("a"), r#"{"ref":"a"}"#),
            (GraphArg::from(vec![GraphArg::from(1), GraphArg::from(true)]), "[1,true]"),
            (GraphArg::tuple([GraphArg::from(1)]), r#"{"tuple":[1]}"#),
            (
                GraphArg::dict([("b", GraphArg::from(2)), ("a", GraphArg::from(1))]),
                r#"{"dict":{"a":1,"b":2}}"#,
            ),
            (GraphArg::slice(Some(1), None, None), r#"{"slice":[1,null,null]}"#),
            (GraphArg::Ellipsis, r#"{"ellipsis":true}"#),
            (GraphArg::DType("float32".to_owned()), r#"{"dtype":"float32"}"#),
            (GraphArg::Device("cpu".to_owned()), r#"{"device":"cpu"}"#),
            (GraphArg::Layout("strided".to_owned()), r#"{"layout":"strided"}"#),
            (
                GraphArg::MemoryFormat("contiguous_format".to_owned()),
                r#"{"memory_format":"contiguous_format"}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&arg).unwrap(), json);
            assert_eq!(serde_json::from_str::<GraphArg>(json).unwrap(), arg);
        }
        // NaN is not equal to itself.
        assert_eq!(serde_json::to_string(&GraphArg::from(f64::NAN)).unwrap(), r#"{"float":"nan"}"#);
        let nan: GraphArg = serde_json::from_str(r#"{"float":"nan"}"#).unwrap();
        assert!(matches!(nan, GraphArg::Float(number) if number.is_nan()));
    }

    #[test]
    fn unknown_forms_keep_their_json_and_the_reason() {
        for (json, reason) in [
            (r#"{"ref":1}"#, "\"ref\""),
            (r#"{"tensor":[1]}"#, "\"tensor\""),
            (r#"{"float":"big"}"#, "\"big\" is not a float"),
            (r#"{"slice":[1]}"#, "3 parts"),
            ("{}", "exactly one key"),
            (r#"{"ref":"a","tuple":[]}"#, "exactly one key"),
        ] {
            let arg: GraphArg = serde_json::from_str(json).unwrap();
            assert_eq!(serde_json::to_string(&arg).unwrap(), json);
            match arg {
                GraphArg::Unknown { reason: found, .. } => {
                    assert!(found.contains(reason), "{found}");
                }
                other => panic!("{json} was read as {other:?}"),
            }
        }
    }
}
