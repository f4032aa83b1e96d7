//! Conversions between Rust values and the columns of a row.

use rusqlite::Row;
use rusqlite::types::Type;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Serializes a value to JSON; [`read_json`] converts back.
pub(super) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("all maps in records have string keys")
}

/// Reads a column that [`to_json`] has serialized.
pub(super) fn read_json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text).map_err(|error| unreadable(row, column, error))
}

/// Returns the stored name of an enum variant without fields; [`read_variant`] converts back.
/// Example: `RequestKind::OptimStep` is stored as `optim_step`.
pub(super) fn variant_name(value: impl Serialize) -> String {
    to_json(&value).trim_matches('"').to_owned()
}

/// Reads an enum variant from the name that [`variant_name`] has returned.
pub(super) fn read_variant<T: DeserializeOwned>(
    row: &Row<'_>,
    column: &str,
) -> rusqlite::Result<T> {
    let name: String = row.get(column)?;
    serde_json::from_value(name.into()).map_err(|error| unreadable(row, column, error))
}

/// Converts to SQLite's signed integer with the same bits; [`read_u64`] converts back.
pub(super) fn to_i64(number: u64) -> i64 {
    number.cast_signed()
}

/// Reads an integer that [`to_i64`] has converted.
pub(super) fn read_u64(row: &Row<'_>, column: &str) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(i64::cast_unsigned)
}

/// Reads an integer that [`to_i64`] has converted, or `NULL`.
pub(super) fn read_optional_u64(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<u64>> {
    let number: Option<i64> = row.get(column)?;
    Ok(number.map(i64::cast_unsigned))
}

/// Returns the error for a column whose text cannot be deserialized.
fn unreadable(row: &Row<'_>, column: &str, error: serde_json::Error) -> rusqlite::Error {
    match row.as_ref().column_index(column) {
        Ok(index) => rusqlite::Error::FromSqlConversionFailure(index, Type::Text, error.into()),
        Err(error) => error,
    }
}
