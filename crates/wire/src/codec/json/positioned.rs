//! Deserialization with validation inside the visitor, so that a validation error has the position
//! of the invalid value.
//!
//! serde_json assigns a position to an error when a method of the deserializer returns the error.
//! The functions of this module therefore validate before that method returns. A type that
//! validates its fields after the method has returned would get the position of the next token, and
//! [`error_path`](super::error_path) would return the wrong path.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads an object as `F` and converts it to `T`. The error of `convert` has the position of the
/// object.
pub(crate) fn object<'de, D, F, T>(
    deserializer: D,
    convert: fn(F) -> Result<T, String>,
) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    F: Deserialize<'de>,
{
    struct ObjectVisitor<F, T> {
        convert: fn(F) -> Result<T, String>,
        fields: PhantomData<F>,
    }

    impl<'de, F: Deserialize<'de>, T> Visitor<'de> for ObjectVisitor<F, T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            let fields = F::deserialize(MapAccessDeserializer::new(map))?;
            (self.convert)(fields).map_err(A::Error::custom)
        }
    }

    deserializer.deserialize_map(ObjectVisitor { convert, fields: PhantomData })
}

/// Reads a string and converts it to `T`. The error of `convert` has the position of the string.
/// `expected` describes the string in the error for a value of another type.
pub(crate) fn string<'de, D, T>(
    deserializer: D,
    expected: &'static str,
    convert: fn(&str) -> Result<T, String>,
) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
{
    struct StringVisitor<T> {
        expected: &'static str,
        convert: fn(&str) -> Result<T, String>,
    }

    impl<T> Visitor<'_> for StringVisitor<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.expected)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            (self.convert)(text).map_err(E::custom)
        }
    }

    deserializer.deserialize_str(StringVisitor { expected, convert })
}
