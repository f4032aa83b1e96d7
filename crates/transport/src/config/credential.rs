//! [`ApiKey`] and [`Credential`]: the key or command that authenticates a client, and how it is
//! selected.

use std::fmt;

use crate::error::{Error, ErrorKind};

use super::{CredentialStore, Env};

/// Environment variable with the API key.
const KEY_VARIABLE: &str = "TINKER_API_KEY";

/// API key (`tml-…`), or a JSON Web Token (`eyJ…`) that is used in its place.
///
/// `Debug` shows its first six and last four characters only.
///
/// ```
/// use tinkex::ApiKey;
///
/// let key = ApiKey::new("tml-0123456789abcdef")?;
/// assert_eq!(format!("{key:?}"), "ApiKey(tml-01...cdef)");
/// assert!(ApiKey::new("sk-of-another-service").is_err());
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// Creates a key after checking its prefix.
    ///
    /// # Errors
    /// If the key starts with neither `tml-` nor `eyJ`.
    pub fn new(key: impl Into<String>) -> Result<Self, Error> {
        let key = Self(key.into());
        if key.is_token() || key.0.starts_with("tml-") {
            return Ok(key);
        }
        Err(invalid_prefix(None))
    }

    /// Returns the key itself. Never log it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns whether the key is a JSON Web Token, which is sent as it is and never exchanged.
    pub(crate) fn is_token(&self) -> bool {
        self.0.starts_with("eyJ")
    }
}

/// Error returned for a key with an unknown prefix. The message contains the source of the key, if
/// known, but not the key.
fn invalid_prefix(source: Option<&str>) -> Error {
    let source = source.map(|source| format!("{source}: ")).unwrap_or_default();
    Error::new(ErrorKind::Auth, format!("{source}API key does not start with tml-"))
        .with_hint("Copy the key again from the console.")
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = match (self.0.get(..6), self.0.len().checked_sub(4)) {
            (Some(start), Some(end)) if self.0.len() > 14 => {
                format!("{start}...{}", self.0.get(end..).unwrap_or(""))
            }
            _ => "...".to_owned(),
        };
        write!(f, "ApiKey({shown})")
    }
}

/// Source of the secret that requests are authenticated with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// A fixed key.
    Key(ApiKey),
    /// A shell command that prints a key, run for every use.
    Command(String),
}

/// Candidates for the credential.
struct CredentialSources<'a> {
    argument: Option<&'a str>,
    env: &'a Env,
    stored: Option<CandidateKey<'a>>,
}

/// Unchecked key, with its source for error messages.
struct CandidateKey<'a> {
    key: &'a str,
    /// Variable or file that contains the key; `None` for an argument, whose origin only the caller
    /// knows.
    source: Option<&'a str>,
}

impl CandidateKey<'_> {
    /// Checks the prefix of the key. The error contains the source of the key.
    fn check(&self) -> Result<ApiKey, Error> {
        ApiKey::new(self.key).map_err(|_| invalid_prefix(self.source))
    }
}

/// Selects the credential. The order is: the argument, `TINKER_API_KEY`, `TINKER_CREDENTIAL_CMD`,
/// the stored key.
///
/// If the key is invalid, the command is used; without a command the invalid key is an error, even
/// if a key is stored. With `command_only`, only the command or a token is accepted.
fn resolve(sources: &CredentialSources<'_>, command_only: bool) -> Result<Credential, Error> {
    let argument = sources.argument.filter(|key| !key.is_empty());
    let argument = argument.map(|key| CandidateKey { key, source: None });
    let variable = || {
        let key = sources.env.get(KEY_VARIABLE)?;
        Some(CandidateKey { key, source: Some(KEY_VARIABLE) })
    };
    let key = argument.or_else(variable).map(|key| key.check());
    let command = sources.env.get("TINKER_CREDENTIAL_CMD").map(str::to_owned);
    match (key, command) {
        (Some(Ok(key)), _) if key.is_token() => Ok(Credential::Key(key)),
        (_, Some(command)) if command_only => Ok(Credential::Command(command)),
        (_, None) if command_only => {
            let message = "server requires a credential command, but none is set";
            Err(Error::new(ErrorKind::Auth, message).with_hint("Set TINKER_CREDENTIAL_CMD."))
        }
        (Some(Ok(key)), _) => Ok(Credential::Key(key)),
        (Some(Err(_)) | None, Some(command)) => Ok(Credential::Command(command)),
        (Some(Err(error)), None) => Err(error),
        (None, None) => match &sources.stored {
            Some(stored) => stored.check().map(Credential::Key),
            None => Err(Error::missing_credential()),
        },
    }
}

impl Credential {
    /// Selects the credential. Reads the credential store only if there is no other source.
    pub fn find(argument: Option<&str>, env: &Env, command_only: bool) -> Result<Self, Error> {
        let sources = CredentialSources { argument, env, stored: None };
        let has_source = argument.is_some_and(|key| !key.is_empty())
            || env.get(KEY_VARIABLE).is_some()
            || env.get("TINKER_CREDENTIAL_CMD").is_some();
        if has_source || command_only {
            return resolve(&sources, command_only);
        }
        let store = CredentialStore::load(env)?;
        let file = store.path().display().to_string();
        let stored = store.default_key();
        let stored = stored.map(|key| CandidateKey { key: key.key.expose(), source: Some(&file) });
        resolve(&CredentialSources { stored, ..sources }, command_only)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::fixture;

    #[test]
    fn the_credential_is_selected_as_in_the_python_sdk() {
        for case in fixture::cases("auth_resolution.json") {
            let text = |key: &str| case[key].as_str();
            let names = ["TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"];
            let env = names.iter().filter_map(|name| Some((*name, text(name)?)));
            let sources = CredentialSources {
                argument: text("api_key_arg"),
                env: &Env::from_pairs(env),
                stored: text("stored_default")
                    .map(|key| CandidateKey { key, source: Some("credentials.json") }),
            };
            let found = resolve(&sources, case["enforce_cmd"] == true);
            let expected = &case["expected"];
            match found {
                Ok(Credential::Key(key)) => {
                    assert_eq!(expected["provider"], "api_key", "{case}");
                    assert_eq!(expected["value"], key.expose(), "{case}");
                }
                Ok(Credential::Command(command)) => {
                    assert_eq!(expected["provider"], "command", "{case}");
                    assert_eq!(expected["value"], command, "{case}");
                }
                Err(error) => {
                    assert_ne!(expected["error"], Value::Null, "{case}: {error}");
                    assert_eq!(error.kind(), ErrorKind::Auth);
                    assert!(error.hint().is_some(), "the error has a hint");
                }
            }
        }
    }

    /// Regression test: the message did not contain the source of the invalid key.
    #[test]
    fn invalid_key_is_reported_with_its_variable_or_file() {
        let message = |argument: Option<&str>, env: Env| {
            Credential::find(argument, &env, false).unwrap_err().to_string()
        };
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join(".tinker").join("credentials.json");
        std::fs::create_dir(file.parent().unwrap()).unwrap();
        let stored = r#"{"version":1,"default":"a","keys":{"a":
            {"type":"manual","key":"sk-stored","name":"n"}}}"#;
        std::fs::write(&file, stored).unwrap();
        let home = ("HOME", home.path().to_str().unwrap());
        let variable = ("TINKER_API_KEY", "sk-variable");
        assert_eq!(
            message(None, Env::from_pairs([home, variable])),
            "TINKER_API_KEY: API key does not start with tml-"
        );
        assert_eq!(
            message(None, Env::from_pairs([home])),
            format!("{}: API key does not start with tml-", file.display())
        );
        assert_eq!(
            message(Some("sk-argument"), Env::from_pairs([home, variable])),
            "API key does not start with tml-"
        );
    }

    #[test]
    fn debug_hides_the_middle_of_a_key() {
        for (key, shown) in [
            ("tml-0123456789abcdef", "ApiKey(tml-01...cdef)"),
            ("tml-short", "ApiKey(...)"),
            ("tml-ünïcödé-ünïcödé", "ApiKey(tml-ü...)"),
        ] {
            assert_eq!(format!("{:?}", ApiKey::new(key).unwrap()), shown);
        }
        let error = ApiKey::new("sk-secret").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("sk-secret"));
    }
}
