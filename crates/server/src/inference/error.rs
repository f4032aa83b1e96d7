//! Errors of inference requests, independent of the API that reports them.

use crate::error::ServerError;

/// Reason why an inference request was not accepted or failed.
#[derive(Clone, Debug)]
pub(crate) struct InferenceError {
    pub(crate) error: ServerError,
    /// Parameter of the request that caused the error.
    pub(crate) param: Option<String>,
}

impl InferenceError {
    /// Creates the error for an invalid value of a parameter.
    pub(crate) fn invalid(param: &str, reason: impl std::fmt::Display) -> Self {
        let error = ServerError::invalid(format!("{param}: {reason}"));
        Self { error, param: Some(param.to_owned()) }
    }

    /// Adds the path of the object whose field is invalid, for example `messages[2]`.
    pub(crate) fn within(self, path: &str) -> Self {
        match self.param {
            Some(field) => {
                let message = self.error.to_string();
                let reason = message.strip_prefix(&field).and_then(|rest| rest.strip_prefix(": "));
                Self::invalid(&format!("{path}.{field}"), reason.unwrap_or(&message))
            }
            None => Self::invalid(path, self.error),
        }
    }

    /// Replaces the name of a parameter by the one that another API has for it.
    pub(crate) fn renamed(self, from: &str, to: &str) -> Self {
        match &self.error {
            ServerError::Invalid(message) if self.param.as_deref() == Some(from) => {
                let rest = message.strip_prefix(from).unwrap_or(message);
                let error = ServerError::invalid(format!("{to}{rest}"));
                Self { error, param: Some(to.to_owned()) }
            }
            _ => self,
        }
    }
}

/// Fields that the validation of samples names in its messages, and the parameters of inference
/// requests that they come from.
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

/// Names the parameter of an invalid request if the message starts with a field.
impl From<ServerError> for InferenceError {
    fn from(error: ServerError) -> Self {
        if let ServerError::NotFound(_) = error {
            // The only object that a request names is its model.
            return Self { error, param: Some("model".to_owned()) };
        }
        if let ServerError::Invalid(message) = &error
            && let Some((path, reason)) = message.split_once(": ")
            && let field = path.split('[').next().unwrap_or(path)
            && let Some((_, param)) = FIELDS.iter().find(|(name, _)| *name == field)
        {
            let index = &path[field.len()..];
            let error = ServerError::invalid(format!("{param}{index}: {reason}"));
            return Self { error, param: Some((*param).to_owned()) };
        }
        Self { error, param: None }
    }
}

/// Class of an error. Each API has its own names for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    InvalidRequest,
    ContextLength,
    Authentication,
    Permission,
    NotFound,
    TooLarge,
    RateLimit,
    Unavailable,
    Internal,
}

impl From<&ServerError> for ErrorClass {
    fn from(error: &ServerError) -> Self {
        match error {
            ServerError::Invalid(_) | ServerError::Conflict(_) | ServerError::Malformed(_) => {
                Self::InvalidRequest
            }
            ServerError::ContextLength(_) => Self::ContextLength,
            ServerError::NotFound(_) | ServerError::Gone(_) => Self::NotFound,
            ServerError::Forbidden(_) => Self::Permission,
            ServerError::TooLarge(_) => Self::TooLarge,
            ServerError::Busy { .. } => Self::RateLimit,
            ServerError::StorageUnavailable(_) | ServerError::Unavailable(_) => Self::Unavailable,
            ServerError::Internal(_) => Self::Internal,
        }
    }
}

impl ErrorClass {
    /// Returns the class of a response with an HTTP status of 400 or more.
    pub(crate) fn of_status(status: u16) -> Self {
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
            let error = InferenceError::from(ServerError::invalid(message));
            assert_eq!((error.param.as_deref(), error.error.to_string()), (param, expected.into()));
        }
    }

    #[test]
    fn fields_of_objects_are_named_with_their_path() {
        let field = InferenceError::invalid("role", "required").within("messages[1]");
        assert_eq!(field.error.to_string(), "messages[1].role: required");
        assert_eq!(field.param.as_deref(), Some("messages[1].role"));
        let object = ServerError::Malformed("not a JSON object".to_owned());
        let object = InferenceError::from(object).within("messages[1]");
        assert_eq!(object.error.to_string(), "messages[1]: not a JSON object");
    }

    #[test]
    fn a_parameter_is_named_as_in_another_api() {
        let error = InferenceError::from(ServerError::invalid("stop[1]: too long"));
        let error = error.renamed("stop", "stop_sequences");
        assert_eq!(error.error.to_string(), "stop_sequences[1]: too long");
        assert_eq!(error.param.as_deref(), Some("stop_sequences"));
        let other = InferenceError::from(ServerError::invalid("stop_token_ids: too many"));
        let other = other.renamed("stop", "stop_sequences");
        assert_eq!(other.error.to_string(), "stop_token_ids: too many");
    }
}
