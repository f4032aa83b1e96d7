//! Form-encoded query strings. Missing and empty parameters are omitted.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// Encodes a query string without its `?`.
///
/// ```
/// use tinkex_wire::codec::query;
/// use tinkex_wire::rest::ListTrainingRuns;
///
/// let list = ListTrainingRuns::default().project_id("p 1");
/// assert_eq!(query::encode(&list)?, "limit=20&offset=0&access_scope=owned&project_id=p+1");
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
///
/// # Errors
/// Returns an error if a value is not a string, number, Boolean or unit variant of an enum.
pub fn encode<T: Serialize>(query: &T) -> Result<String, InvalidInput> {
    serde_urlencoded::to_string(query)
        .map_err(|error| InvalidInput::new("query", error.to_string()))
}

/// Decodes a query string without its `?`. Ignores unknown parameters.
///
/// # Errors
/// Returns an error if a value has the wrong type.
pub fn decode<T: DeserializeOwned>(query: &str) -> Result<T, DecodeError> {
    serde_urlencoded::from_str(query).map_err(|error| {
        DecodeError::new(DecodeErrorKind::Value, error.to_string()).within("query")
    })
}

/// Returns `true` for a missing or empty parameter.
#[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
pub(crate) fn is_blank(parameter: &Option<String>) -> bool {
    parameter.as_deref().is_none_or(str::is_empty)
}
