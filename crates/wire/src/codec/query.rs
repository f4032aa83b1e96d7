//! Query strings: form-encoded, with nothing and empty texts left out.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// Writes a query, without its `?`.
///
/// ```
/// use tinkex_wire::codec::query;
/// use tinkex_wire::rest::ListTrainingRuns;
///
/// let list = ListTrainingRuns { project_id: Some("p 1".to_owned()), ..Default::default() };
/// assert_eq!(query::encode(&list)?, "limit=20&offset=0&access_scope=owned&project_id=p+1");
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
///
/// # Errors
/// If a value is neither text, number, flag nor a word of an enum.
pub fn encode<T: Serialize>(query: &T) -> Result<String, InvalidInput> {
    serde_urlencoded::to_string(query).map_err(|why| InvalidInput::new("query", why.to_string()))
}

/// Reads a query, without its `?`. Unknown names are ignored.
///
/// # Errors
/// If a value is not of the type it should be.
pub fn decode<T: DeserializeOwned>(query: &str) -> Result<T, DecodeError> {
    serde_urlencoded::from_str(query)
        .map_err(|why| DecodeError::new(DecodeErrorKind::Value, why.to_string()).within("query"))
}

/// Whether a parameter says nothing.
#[expect(clippy::ref_option, reason = "serde hands over the field")]
pub(crate) fn is_blank(parameter: &Option<String>) -> bool {
    parameter.as_deref().is_none_or(str::is_empty)
}
