//! [`Parameters`]: the JSON object of an inference request.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::error::{ErrorClass, InferenceError};

/// Parameters of a request that are not read yet. [`finish`](Self::finish) rejects a parameter that
/// no code has read and names it, so that the server does not ignore a parameter by mistake.
pub(crate) struct Parameters(BTreeMap<String, Box<RawValue>>);

impl Parameters {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// [`ErrorClass::InvalidRequest`] if it is not a JSON object.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, InferenceError> {
        let fields = serde_json::from_slice(body);
        let malformed = |error| {
            let message = format!("not a JSON object: {error}");
            InferenceError::new(ErrorClass::InvalidRequest, message)
        };
        Ok(Self(fields.map_err(malformed)?))
    }

    /// Removes and decodes a parameter; `None` if it is absent or null.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        name: &str,
    ) -> Result<Option<T>, InferenceError> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        serde_json::from_str(value.get()).map_err(|error| InferenceError::invalid(name, error))
    }

    /// Removes and decodes a required parameter, like [`take`](Self::take).
    pub(crate) fn require<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, InferenceError> {
        self.take(name)?.ok_or_else(|| InferenceError::invalid(name, "required"))
    }

    /// Returns whether a parameter is present and null.
    pub(crate) fn is_null(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| value.get() == "null")
    }

    /// Refuses a parameter that is not supported, unless it is absent, null, or `neutral` returns
    /// true for its value.
    pub(crate) fn refuse(
        &mut self,
        name: &str,
        neutral: impl FnOnce(&serde_json::Value) -> bool,
    ) -> Result<(), InferenceError> {
        match self.take::<serde_json::Value>(name)? {
            Some(value) if !neutral(&value) => Err(not_supported(name)),
            _ => Ok(()),
        }
    }

    /// Drops parameters that have no effect on the answer.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.0.remove(*name);
        }
    }

    /// Checks that every parameter was read. Null counts as absent.
    ///
    /// # Errors
    /// [`ErrorClass::InvalidRequest`] with the name of the first parameter that was not read.
    pub(crate) fn finish(self) -> Result<(), InferenceError> {
        match self.0.iter().find(|(_, value)| value.get() != "null") {
            Some((name, _)) => Err(not_supported(name)),
            None => Ok(()),
        }
    }
}

fn not_supported(name: &str) -> InferenceError {
    let name: String = name.chars().take(100).collect();
    InferenceError::invalid(&name, "this server does not support the parameter")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Parameters {
        Parameters::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_parameter_that_is_not_read_is_refused_by_name() {
        let mut parameters = parse(r#"{"n": 2, "user": "me", "best": null, "magic": 1}"#);
        assert_eq!(parameters.take::<u32>("n").unwrap(), Some(2));
        assert_eq!(parameters.take::<u32>("n").unwrap(), None);
        parameters.ignore(&["user"]);
        let error = parameters.finish().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("magic"));
        assert_eq!(error.to_string(), "magic: this server does not support the parameter");
    }

    #[test]
    fn errors_name_the_parameter() {
        let mut parameters = parse(r#"{"n": "two", "penalty": 0.0, "bias": {"5": 1}}"#);
        let error = parameters.take::<u32>("n").unwrap_err();
        assert!(error.to_string().starts_with("n: invalid type"), "{error}");
        assert!(parameters.require::<String>("model").is_err());
        assert!(parameters.refuse("penalty", |value| value.as_f64() == Some(0.0)).is_ok());
        assert!(parameters.refuse("bias", |_| false).is_err());
        for text in ["", "[]", "1", "{\"a\":}"] {
            let error = Parameters::parse(text.as_bytes()).err().unwrap();
            assert!(error.to_string().starts_with("not a JSON object: "), "{text}");
            assert_eq!(error.param(), None, "{text}");
        }
    }
}
