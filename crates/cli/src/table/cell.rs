//! [`TableCell`]: the text of a cell, and its value for other programs.

use tinkex::Timestamp;

use crate::format;

/// Text of a cell, and its value for other programs.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableCell {
    pub(super) text: String,
    /// Value in CSV; `None` if it is the text.
    value: Option<String>,
}

impl TableCell {
    /// Creates a cell that CSV shows as `value`.
    pub(crate) fn with_value(text: impl Into<String>, value: impl Into<String>) -> Self {
        Self { text: text.into(), value: Some(value.into()) }
    }

    /// Creates a cell of a time: relative to `now`, in CSV in RFC 3339.
    pub(crate) fn time(time: Timestamp, now: Timestamp) -> Self {
        Self::with_value(format::relative_time(time, now), time.to_string())
    }

    /// Creates a cell of a size: in a unit, in CSV in bytes.
    pub(crate) fn size(bytes: u64) -> Self {
        Self::with_value(format::bytes(bytes), bytes.to_string())
    }

    /// Returns the value for other programs.
    pub(super) fn value(&self) -> &str {
        self.value.as_ref().unwrap_or(&self.text)
    }
}

impl<T: Into<String>> From<T> for TableCell {
    fn from(text: T) -> Self {
        Self { text: text.into(), value: None }
    }
}
