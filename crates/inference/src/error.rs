//! [`InferenceError`]: why a request was not accepted or failed, independent of the API that
//! reports it.

use std::time::Duration;

/// Reason why an inference request was not accepted or failed.
///
/// ```
/// use tinkex_inference::{ErrorClass, InferenceError};
///
/// let error = InferenceError::new(ErrorClass::InvalidRequest, "num_samples: expected at least 1");
/// assert_eq!(error.to_string(), "n: expected at least 1");
/// assert_eq!(error.param(), Some("n"));
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct InferenceError {
    class: ErrorClass,
    message: String,
    /// Parameter of the request that caused the error.
    pub(crate) param: Option<String>,
    retry_after: Option<Duration>,
}

impl InferenceError {
    /// Creates an error. If the message of an invalid request starts with a field of a Tinker
    /// sample, the parameter of the inference APIs replaces the field.
    #[must_use]
    pub fn new(class: ErrorClass, message: impl Into<String>) -> Self {
        let mut message = message.into();
        let mut param = None;
        match class {
            // The only object that a request names is its model.
            ErrorClass::NotFound => param = Some("model".to_owned()),
            ErrorClass::InvalidRequest => {
                if let Some((name, rest)) = sample_parameter(&message) {
                    message = format!("{name}{rest}");
                    param = Some(name.to_owned());
                }
            }
            _ => {}
        }
        Self { class, message, param, retry_after: None }
    }

    /// Creates the error for an invalid value of a parameter.
    #[must_use]
    pub fn invalid(param: &str, reason: impl std::fmt::Display) -> Self {
        Self {
            class: ErrorClass::InvalidRequest,
            message: format!("{param}: {reason}"),
            param: Some(param.to_owned()),
            retry_after: None,
        }
    }

    /// Creates the error for a failure that the client did not cause.
    pub(crate) fn internal(message: String) -> Self {
        Self::new(ErrorClass::Internal, message)
    }

    /// Sets the parameter that caused the error, without a change of the message.
    #[must_use]
    pub fn caused_by(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    /// Sets the time after which the client may retry.
    #[must_use]
    pub fn retry_in(self, after: Option<Duration>) -> Self {
        Self { retry_after: after, ..self }
    }

    /// Returns the class of the error.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        self.class
    }

    /// Returns the parameter that caused the error; `None` if no single parameter did.
    #[must_use]
    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// Returns the time after which the client may retry, if the server suggests a time.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Adds the path of the object whose field is invalid, for example `messages[2]`.
    pub(crate) fn within(self, path: &str) -> Self {
        match self.param {
            Some(field) => {
                let reason =
                    self.message.strip_prefix(&field).and_then(|rest| rest.strip_prefix(": "));
                Self::invalid(&format!("{path}.{field}"), reason.unwrap_or(&self.message))
            }
            None => Self::invalid(path, self.message),
        }
    }

    /// Replaces the name of a parameter by the name that another API has for it.
    pub(crate) fn renamed(self, from: &str, to: &str) -> Self {
        if self.class != ErrorClass::InvalidRequest || self.param.as_deref() != Some(from) {
            return self;
        }
        let rest = self.message.strip_prefix(from).unwrap_or(&self.message);
        Self { message: format!("{to}{rest}"), param: Some(to.to_owned()), ..self }
    }
}

/// Fields of Tinker samples that validation messages name, each with the parameter of inference
/// requests that the field comes from.
const FIELDS: &[(&str, &str)] = &[
    ("max_tokens", "max_tokens"),
    ("num_samples", "n"),
    ("prompt", "prompt"),
    ("stop", "stop"),
    ("stop_token_ids", "stop_token_ids"),
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("topk_prompt_logprobs", "logprobs"),
    ("topk_sample_logprobs", "logprobs"),
];

/// Returns the parameter whose field a message starts with, and the message after the field.
fn sample_parameter(message: &str) -> Option<(&'static str, &str)> {
    let (path, _) = message.split_once(": ")?;
    let field = path.split('[').next().unwrap_or(path);
    let (_, param) = FIELDS.iter().find(|(name, _)| *name == field)?;
    Some((param, &message[field.len()..]))
}

/// Class of an error. Each API has its own names for the classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The request is malformed, or asks for something that is not possible.
    InvalidRequest,
    /// The prompt and the tokens to sample exceed the context window of the model.
    ContextLength,
    /// The request has no valid API key.
    Authentication,
    /// The request is not allowed.
    Permission,
    /// The model or the path does not exist.
    NotFound,
    /// The body exceeds its size limit.
    TooLarge,
    /// A limit of the server is reached; a retry can succeed.
    RateLimit,
    /// The server cannot execute requests now; a retry can succeed.
    Unavailable,
    /// An error of the server itself.
    Internal,
}

impl ErrorClass {
    /// Returns the class of a response with an HTTP status of 400 or more.
    #[must_use]
    pub fn of_status(status: u16) -> Self {
        match status {
            401 => Self::Authentication,
            403 => Self::Permission,
            404 | 410 => Self::NotFound,
            413 => Self::TooLarge,
            429 => Self::RateLimit,
            503 => Self::Unavailable,
            500.. => Self::Internal,
            _ => Self::InvalidRequest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_validation_of_samples_name_parameters() {
        for (message, param, expected) in [
            ("num_samples: expected at least 1", Some("n"), "n: expected at least 1"),
            (
                "stop_token_ids[2]: token 5 is unknown",
                Some("stop_token_ids"),
                "stop_token_ids[2]: token 5 is unknown",
            ),
            ("seq_id: 1 is taken", None, "seq_id: 1 is taken"),
            ("the prompt is too long", None, "the prompt is too long"),
        ] {
            let error = InferenceError::new(ErrorClass::InvalidRequest, message);
            assert_eq!(error.param(), param);
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn fields_of_objects_are_named_with_their_path() {
        let field = InferenceError::invalid("role", "required").within("messages[1]");
        assert_eq!(field.to_string(), "messages[1].role: required");
        assert_eq!(field.param.as_deref(), Some("messages[1].role"));
        let object = InferenceError::new(ErrorClass::InvalidRequest, "not a JSON object");
        let object = object.within("messages[1]");
        assert_eq!(object.to_string(), "messages[1]: not a JSON object");
    }

    #[test]
    fn a_parameter_is_named_as_in_another_api() {
        let error = InferenceError::new(ErrorClass::InvalidRequest, "stop[1]: too long");
        let error = error.renamed("stop", "stop_sequences");
        assert_eq!(error.to_string(), "stop_sequences[1]: too long");
        assert_eq!(error.param.as_deref(), Some("stop_sequences"));
        let other = InferenceError::new(ErrorClass::InvalidRequest, "stop_token_ids: too many");
        let other = other.renamed("stop", "stop_sequences");
        assert_eq!(other.to_string(), "stop_token_ids: too many");
    }
}
