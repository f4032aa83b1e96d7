//! Conversion of server errors to errors of inference requests.

use tinkex_inference::{ErrorClass, InferenceError};
use tinkex_store::error::ServerError;

/// Converts an error of the server to an error of the OpenAI and Anthropic APIs.
#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes the error by value")]
pub(crate) fn inference_error(error: ServerError) -> InferenceError {
    let class = match &error {
        ServerError::Invalid(_) | ServerError::Conflict(_) | ServerError::Malformed(_) => {
            ErrorClass::InvalidRequest
        }
        ServerError::ContextLength(_) => ErrorClass::ContextLength,
        ServerError::NotFound(_) | ServerError::Gone(_) => ErrorClass::NotFound,
        ServerError::Forbidden(_) => ErrorClass::Permission,
        ServerError::TooLarge(_) => ErrorClass::TooLarge,
        ServerError::Busy { .. } => ErrorClass::RateLimit,
        ServerError::StorageUnavailable(_) | ServerError::Unavailable(_) => ErrorClass::Unavailable,
        ServerError::Internal(_) => ErrorClass::Internal,
    };
    let retry_after = match &error {
        ServerError::Busy { retry_after, .. } => Some(*retry_after),
        _ => None,
    };
    InferenceError::new(class, error.to_string()).retry_in(retry_after)
}
