//! How servers say that something went wrong.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Whose fault a failed request was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorCategory {
    /// Nobody said.
    #[default]
    Unknown,
    /// The server's.
    Server,
    /// The caller's.
    User,
}

impl ErrorCategory {
    /// The word on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Server => "server",
            Self::User => "user",
        }
    }

    /// The category with this name, in any case; anything else is unknown.
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

/// The body of a refused call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What was wrong, for people.
    pub detail: String,
}

impl ErrorBody {
    /// Says what was wrong.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into() }
    }

    /// What the body of a refused call says, whatever its form: a `detail` or `error` text, a list
    /// of validation problems, any other JSON as it is, or plain text. `None` if there is nothing.
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
        let said = ["detail", "error", "message"]
            .into_iter()
            .find_map(|key| json.get(key).filter(|said| !said.is_null()));
        Some(match said {
            Some(Value::String(said)) => said.clone(),
            Some(Value::Array(problems)) => {
                problems.iter().map(problem).collect::<Vec<_>>().join("; ")
            }
            Some(Value::Object(inner)) => match inner.get("message") {
                Some(Value::String(said)) => said.clone(),
                _ => json.to_string(),
            },
            _ => json.to_string(),
        })
    }
}

/// One entry of a list of validation problems: where, and what.
fn problem(entry: &Value) -> String {
    let Some(Value::String(what)) = entry.get("msg") else {
        return entry.to_string();
    };
    let Some(Value::Array(place)) = entry.get("loc") else {
        return what.clone();
    };
    let place: Vec<String> = place
        .iter()
        .map(|part| part.as_str().map_or_else(|| part.to_string(), str::to_owned))
        .collect();
    format!("{}: {what}", place.join("."))
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
}
