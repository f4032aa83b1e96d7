//! Error responses of servers.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Side that caused a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ErrorCategory {
    /// The server did not report a category.
    #[default]
    Unknown,
    /// The server caused the failure.
    Server,
    /// The caller caused the failure, for example with an invalid request.
    User,
}

impl ErrorCategory {
    /// Returns the name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Server => "server",
            Self::User => "user",
        }
    }

    /// Returns the category with the given name, ignoring case; [`ErrorCategory::Unknown`] for any
    /// other name.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        [Self::Server, Self::User]
            .into_iter()
            .find(|category| category.as_str().eq_ignore_ascii_case(name))
            .unwrap_or_default()
    }
}

impl fmt::Display for ErrorCategory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for ErrorCategory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = Value::deserialize(deserializer)?;
        Ok(name.as_str().map_or_else(Self::default, Self::from_name))
    }
}

/// Machine-readable cause of an error that its status does not express.
///
/// A name that is taken has status 400, because clients retry after 409. The code tells it apart
/// from an invalid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ErrorCode {
    /// An object of that name already exists.
    Conflict,
}

impl ErrorCode {
    /// Returns the name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
        }
    }

    /// Returns the code with the given name, or `None` for any other name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        (name == Self::Conflict.as_str()).then_some(Self::Conflict)
    }

    /// Extracts the code from the body of an error response. Returns `None` if it has no code or an
    /// unknown one.
    ///
    /// ```
    /// use tinkex_wire::ErrorCode;
    ///
    /// let body = br#"{"detail":"checkpoint exists","code":"conflict"}"#;
    /// assert_eq!(ErrorCode::of_body(body), Some(ErrorCode::Conflict));
    /// assert_eq!(ErrorCode::of_body(b"bad gateway"), None);
    /// ```
    #[must_use]
    pub fn of_body(body: &[u8]) -> Option<Self> {
        let json: Value = serde_json::from_slice(body).ok()?;
        Self::from_name(json.get("code")?.as_str()?)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Body of an error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ErrorBody {
    /// Description of the error.
    pub detail: String,
    /// Cause of the error, if the status does not express it.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_code"
    )]
    pub code: Option<ErrorCode>,
}

/// Decodes a code, or `None` for any other value: other servers may use the name differently.
fn deserialize_code<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ErrorCode>, D::Error> {
    Ok(Value::deserialize(from)?.as_str().and_then(ErrorCode::from_name))
}

impl ErrorBody {
    /// Creates a body with the given description.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), code: None }
    }

    /// Sets the code (default: none).
    #[must_use]
    pub fn code(mut self, code: Option<ErrorCode>) -> Self {
        self.code = code;
        self
    }

    /// Extracts the message from the body of an error response.
    ///
    /// Accepts a `detail`, `error` or `message` field, a list of validation errors, any other JSON,
    /// which is returned unchanged, and plain text. Returns `None` for an empty body.
    ///
    /// ```
    /// use tinkex_wire::ErrorBody;
    ///
    /// assert_eq!(ErrorBody::message(br#"{"detail":"no such model"}"#).unwrap(), "no such model");
    /// assert_eq!(
    ///     ErrorBody::message(br#"{"detail":[{"loc":["body","rank"],"msg":"too small"}]}"#).unwrap(),
    ///     "body.rank: too small",
    /// );
    /// assert_eq!(ErrorBody::message(b"bad gateway\n").unwrap(), "bad gateway");
    /// ```
    #[must_use]
    pub fn message(body: &[u8]) -> Option<String> {
        let text = String::from_utf8_lossy(body);
        let text = text.trim();
        if text.is_empty() {
            return None;
        }
        let Ok(json) = serde_json::from_str::<Value>(text) else {
            return Some(text.to_owned());
        };
        let message = ["detail", "error", "message"]
            .into_iter()
            .find_map(|key| json.get(key).filter(|value| !value.is_null()));
        Some(match message {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(errors)) => {
                errors.iter().map(format_validation_error).collect::<Vec<_>>().join("; ")
            }
            Some(Value::Object(inner)) => match inner.get("message") {
                Some(Value::String(text)) => text.clone(),
                _ => json.to_string(),
            },
            _ => json.to_string(),
        })
    }
}

/// Formats one validation error as `location: message`.
fn format_validation_error(entry: &Value) -> String {
    let Some(Value::String(message)) = entry.get("msg") else {
        return entry.to_string();
    };
    let Some(Value::Array(location)) = entry.get("loc") else {
        return message.clone();
    };
    let location: Vec<String> = location
        .iter()
        .map(|part| part.as_str().map_or_else(|| part.to_string(), str::to_owned))
        .collect();
    format!("{}: {message}", location.join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_found_in_every_form() {
        for (body, message) in [
            (&b""[..], None),
            (b"  \n", None),
            (b"plain", Some("plain")),
            (b"{\"error\":\"boom\"}", Some("boom")),
            (b"{\"error\":{\"message\":\"deep\"}}", Some("deep")),
            (b"{\"detail\":{\"x\":1}}", Some("{\"detail\":{\"x\":1}}")),
            (b"{\"x\":1}", Some("{\"x\":1}")),
            (b"[1]", Some("[1]")),
            (b"{\"detail\":null,\"message\":\"boom\"}", Some("boom")),
            (b"{\"detail\":[{\"msg\":\"a\"},7]}", Some("a; 7")),
            (b"{\"detail\":[{\"loc\":[\"data\",0],\"msg\":\"a\"}]}", Some("data.0: a")),
        ] {
            assert_eq!(ErrorBody::message(body).as_deref(), message);
        }
        assert!(ErrorBody::message(b"\xFF\xFE").is_some());
    }

    #[test]
    fn only_known_codes_are_read_and_a_missing_code_is_not_written() {
        let taken = ErrorBody::new("taken").code(Some(ErrorCode::Conflict));
        let json = serde_json::to_string(&taken).unwrap();
        assert_eq!(json, r#"{"detail":"taken","code":"conflict"}"#);
        assert_eq!(serde_json::from_str::<ErrorBody>(&json).unwrap(), taken);
        let plain = ErrorBody::new("odd");
        assert_eq!(serde_json::to_string(&plain).unwrap(), r#"{"detail":"odd"}"#);
        for code in ["7", "null", "\"other\"", "{}"] {
            let json = format!(r#"{{"detail":"odd","code":{code}}}"#);
            assert_eq!(serde_json::from_str::<ErrorBody>(&json).unwrap(), plain, "{json}");
            assert_eq!(ErrorCode::of_body(json.as_bytes()), None, "{json}");
        }
        assert_eq!(ErrorCode::of_body(b"[1]"), None);
    }
}
