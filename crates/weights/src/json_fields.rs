//! [`JsonFields`]: the fields of a JSON configuration, read with errors that name the field.

use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Maximum size of a dimension. The product of two fits in 64 bits.
pub(crate) const MAX_SIZE: usize = 1 << 24;

/// Reads a configuration file of at most 64 MiB.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>> {
    const MAX_BYTES: u64 = 64 << 20;
    let bytes = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
    if bytes > MAX_BYTES {
        let reason = format!("the file has {bytes} bytes, the limit is {MAX_BYTES}");
        return Err(Error::bad_file(path, reason));
    }
    std::fs::read(path).map_err(Error::io("read", path))
}

/// The fields of a JSON object. A field that is `null` counts as missing.
///
/// Errors are descriptions that name the field and its value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JsonFields<'a> {
    fields: &'a Map<String, Value>,
    /// Name of the object if it is nested.
    object: Option<&'static str>,
}

impl<'a> JsonFields<'a> {
    pub(crate) fn new(fields: &'a Map<String, Value>) -> Self {
        Self { fields, object: None }
    }

    /// Returns the name of a field for errors, for example `rope_scaling.factor`.
    pub(crate) fn path(self, name: &str) -> String {
        self.object.map_or_else(|| name.to_owned(), |object| format!("{object}.{name}"))
    }

    /// Returns whether the object has the field, even if it is `null`.
    pub(crate) fn contains(self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    pub(crate) fn value(self, name: &str) -> Option<&'a Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Returns the field `name`, converted. `convert` returns `None` for an invalid value;
    /// `expected` describes the valid ones, for the error.
    fn read<T>(
        self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(format!("{} is {}, expected {expected}", self.path(name), shown(value))),
        }
    }

    /// Returns a dimension, 1 to [`MAX_SIZE`].
    pub(crate) fn size(self, name: &str) -> Result<Option<usize>, String> {
        self.read(name, &format!("1 to {MAX_SIZE}"), |value| {
            let size = usize::try_from(value.as_u64()?).ok()?;
            (1..=MAX_SIZE).contains(&size).then_some(size)
        })
    }

    /// Returns a dimension that must be present.
    pub(crate) fn required_size(self, name: &str) -> Result<usize, String> {
        self.size(name)?.ok_or_else(|| format!("{} is missing", self.path(name)))
    }

    pub(crate) fn number(self, name: &str) -> Result<Option<f64>, String> {
        self.read(name, "a number", Value::as_f64)
    }

    pub(crate) fn flag(self, name: &str) -> Result<Option<bool>, String> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(crate) fn text(self, name: &str) -> Result<Option<&'a str>, String> {
        self.read(name, "a string", Value::as_str)
    }

    pub(crate) fn texts(self, name: &str) -> Result<Vec<&'a str>, String> {
        let all = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        Ok(self.read(name, "a list of strings", all)?.unwrap_or_default())
    }

    /// Returns a nested object. As in `transformers`, `false` and an empty object count as missing.
    pub(crate) fn object(self, name: &'static str) -> Result<Option<Self>, String> {
        if self.value(name) == Some(&Value::Bool(false)) {
            return Ok(None);
        }
        let object = self.read(name, "an object", Value::as_object)?;
        let nested = |fields| Self { fields, object: Some(name) };
        Ok(object.filter(|fields| !fields.is_empty()).map(nested))
    }

    /// Returns token ids, given as one number or as a list. Negative ids, with which some files
    /// state that there is no such token, are omitted.
    pub(crate) fn token_ids(self, name: &str) -> Result<Vec<u32>, String> {
        let id = |value: &Value| match value.as_i64() {
            Some(..0) => Some(None),
            Some(id) => u32::try_from(id).ok().map(Some),
            None => None,
        };
        let ids = self.read(name, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(id).collect::<Option<Vec<_>>>(),
            one => Some(vec![id(one)?]),
        })?;
        Ok(ids.unwrap_or_default().into_iter().flatten().collect())
    }
}

/// Returns a value as JSON, shortened to 60 characters.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_name_the_field_and_its_value() {
        let value = json!({
            "size": "64", "number": [1], "flag": 1, "text": {}, "texts": ["a", 1], "object": [1],
            "ids": 2.5, "long": "x".repeat(100), "none": null,
        });
        let fields = JsonFields::new(value.as_object().unwrap());
        let expect = |result: Result<(), String>, want: &str| assert_eq!(result.unwrap_err(), want);
        expect(fields.size("size").map(drop), "size is \"64\", expected 1 to 16777216");
        expect(fields.required_size("none").map(drop), "none is missing");
        expect(fields.number("number").map(drop), "number is [1], expected a number");
        expect(fields.flag("flag").map(drop), "flag is 1, expected true or false");
        expect(fields.text("text").map(drop), "text is {}, expected a string");
        expect(fields.texts("texts").map(drop), "texts is [\"a\",1], expected a list of strings");
        expect(fields.object("object").map(drop), "object is [1], expected an object");
        let want = "ids is 2.5, expected a token id or a list of token ids";
        expect(fields.token_ids("ids").map(drop), want);
        assert!(fields.size("long").unwrap_err().contains("xx…, expected"));
        let nested = json!({"outer": {"inner": "x"}});
        let nested = JsonFields::new(nested.as_object().unwrap()).object("outer").unwrap().unwrap();
        expect(nested.size("inner").map(drop), "outer.inner is \"x\", expected 1 to 16777216");
        expect(nested.required_size("size").map(drop), "outer.size is missing");
    }

    #[test]
    fn negative_token_ids_are_omitted() {
        let value = json!({"one": 7, "none": -1, "many": [5, -1, 9], "huge": 4_294_967_296_u64});
        let fields = JsonFields::new(value.as_object().unwrap());
        assert_eq!(fields.token_ids("one"), Ok(vec![7]));
        assert_eq!(fields.token_ids("none"), Ok(vec![]));
        assert_eq!(fields.token_ids("many"), Ok(vec![5, 9]));
        assert_eq!(fields.token_ids("missing"), Ok(vec![]));
        assert!(fields.token_ids("huge").is_err());
    }
}
