//! Which credential is used, and where it comes from.

use std::fmt;

use crate::error::{Error, ErrorKind};

use super::{CredentialStore, Env};

/// An API key: it starts with `tml-`, or it is a token (`eyJ…`).
///
/// It prints its two ends, never the whole.
///
/// ```
/// use tinkex::ApiKey;
///
/// let key = ApiKey::new("tml-0123456789abcdef")?;
/// assert_eq!(format!("{key:?}"), "ApiKey(tml-01...cdef)");
/// assert!(ApiKey::new("sk-of-somebody-else").is_err());
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// A key, if it looks like one.
    ///
    /// # Errors
    /// If it does not start as keys of this service do.
    pub fn new(key: impl Into<String>) -> Result<Self, Error> {
        let key = Self(key.into());
        if key.is_token() || key.0.starts_with("tml-") {
            return Ok(key);
        }
        let why = "the API key does not start with tml-";
        Err(Error::new(ErrorKind::Auth, why).with_hint("copy the key again from the console"))
    }

    /// The key itself. Never log it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether it is a token already, and need not be exchanged for one.
    pub(crate) fn is_token(&self) -> bool {
        self.0.starts_with("eyJ")
    }
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

/// Where a request's credential comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Credential {
    /// A key that stays the same.
    Key(ApiKey),
    /// A shell command that prints one, run for every use.
    Command(String),
}

/// What stands where a credential may come from.
struct Sources<'a> {
    given: Option<&'a str>,
    env: &'a Env,
    stored: Option<&'a str>,
}

/// Chooses a credential: the one given, `TINKER_API_KEY`, `TINKER_CREDENTIAL_CMD`, the stored one.
///
/// A key that looks wrong gives way to the command but never to the stored key; a server that asks
/// for the command (`command_only`) accepts nothing else but a token.
fn resolve(sources: &Sources<'_>, command_only: bool) -> Result<Credential, Error> {
    let key = sources.given.filter(|key| !key.is_empty()).or(sources.env.get("TINKER_API_KEY"));
    let key = key.map(ApiKey::new);
    let command = sources.env.get("TINKER_CREDENTIAL_CMD").map(str::to_owned);
    match (key, command) {
        (Some(Ok(key)), _) if key.is_token() => Ok(Credential::Key(key)),
        (_, Some(command)) if command_only => Ok(Credential::Command(command)),
        (_, None) if command_only => {
            let why = "this server wants a credential that is fetched anew each time";
            Err(Error::new(ErrorKind::Auth, why).with_hint("set TINKER_CREDENTIAL_CMD"))
        }
        (Some(Ok(key)), _) => Ok(Credential::Key(key)),
        (Some(Err(_)) | None, Some(command)) => Ok(Credential::Command(command)),
        (Some(Err(error)), None) => Err(error),
        (None, None) => match sources.stored {
            Some(stored) => ApiKey::new(stored).map(Credential::Key),
            None => Err(Error::missing_credential()),
        },
    }
}

impl Credential {
    /// Chooses a credential, looking at the stored keys only if nothing else is there.
    pub(crate) fn find(given: Option<&str>, env: &Env, command_only: bool) -> Result<Self, Error> {
        let nothing = Sources { given, env, stored: None };
        let elsewhere = given.is_some_and(|key| !key.is_empty())
            || env.get("TINKER_API_KEY").is_some()
            || env.get("TINKER_CREDENTIAL_CMD").is_some();
        if elsewhere || command_only {
            return resolve(&nothing, command_only);
        }
        let store = CredentialStore::load(env)?;
        let stored = store.default_key().map(|key| key.key.expose().to_owned());
        resolve(&Sources { stored: stored.as_deref(), ..nothing }, command_only)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::fixture;

    #[test]
    fn the_credential_is_the_one_the_reference_takes() {
        for case in fixture::cases("auth_resolution.json") {
            let text = |key: &str| case[key].as_str();
            let names = ["TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"];
            let env = names.iter().filter_map(|name| Some((*name, text(name)?)));
            let sources = Sources {
                given: text("api_key_arg"),
                env: &Env::from_pairs(env),
                stored: text("stored_default"),
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
                    assert!(error.hint().is_some(), "an error that says what to do");
                }
            }
        }
    }

    #[test]
    fn keys_print_their_ends_at_most() {
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
