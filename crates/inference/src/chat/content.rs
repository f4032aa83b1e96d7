//! [`TextOrParts`]: the content of a message in both APIs.

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::{InferenceError, Parameters};

/// A text, or a list of parts.
#[derive(Debug)]
pub(crate) enum TextOrParts {
    Text(String),
    Parts(Vec<Box<RawValue>>),
}

impl TextOrParts {
    /// Removes a field and reads it; `None` if it is absent or null.
    ///
    /// # Errors
    /// Names the field if it is neither a text nor a list.
    pub(crate) fn take(
        fields: &mut Parameters,
        name: &str,
    ) -> Result<Option<Self>, InferenceError> {
        let Some(value) = fields.take::<Box<RawValue>>(name)? else { return Ok(None) };
        match value.get().as_bytes().first() {
            Some(b'"') => decode(name, &value).map(|text| Some(Self::Text(text))),
            Some(b'[') => decode(name, &value).map(|parts| Some(Self::Parts(parts))),
            _ => Err(InferenceError::invalid(name, "expected a string or a list")),
        }
    }

    /// Reads the text, or the parts with `read`; an error names the part.
    pub(crate) fn map<T>(
        self,
        name: &str,
        from_text: impl FnOnce(String) -> T,
        read: impl Fn(&mut Parameters) -> Result<T, InferenceError>,
    ) -> Result<Vec<T>, InferenceError> {
        match self {
            Self::Text(text) => Ok(vec![from_text(text)]),
            Self::Parts(parts) => read_list(name, &parts, read),
        }
    }
}

/// Reads the objects of a list with `read`. A field that `read` does not read is an error. An error
/// names the object, for example `messages[2]`.
pub(crate) fn read_list<T>(
    name: &str,
    objects: &[Box<RawValue>],
    read: impl Fn(&mut Parameters) -> Result<T, InferenceError>,
) -> Result<Vec<T>, InferenceError> {
    let read = |(at, object): (usize, &RawValue)| {
        read_object(object, &read).map_err(|error| error.within(&format!("{name}[{at}]")))
    };
    objects.iter().map(|object| &**object).enumerate().map(read).collect()
}

fn read_object<T>(
    object: &RawValue,
    read: impl Fn(&mut Parameters) -> Result<T, InferenceError>,
) -> Result<T, InferenceError> {
    let mut fields = Parameters::parse(object.get().as_bytes())?;
    let value = read(&mut fields)?;
    fields.finish()?;
    Ok(value)
}

fn decode<T: DeserializeOwned>(name: &str, value: &RawValue) -> Result<T, InferenceError> {
    serde_json::from_str(value.get()).map_err(|error| InferenceError::invalid(name, error))
}
