//! Authentication: fetches the secret of a credential, and reads the claims of the token that the
//! server issues in exchange for it.
//!
//! [`credential_command`] runs the command that prints a secret; [`token`] exchanges and renews
//! tokens.

mod credential_command;
pub(crate) mod token;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::Value;
use tinkex_wire::Secret;

use crate::config::Credential;
use crate::error::Error;

impl Credential {
    /// Returns the secret. Runs the command of a [`Credential::Command`].
    pub(crate) async fn fetch(&self) -> Result<Secret, Error> {
        match self {
            Self::Key(key) => Ok(key.expose().into()),
            // Boxed, because commands are rare: inlined, the future of the command would enlarge
            // the future of every request.
            Self::Command(command) => Box::pin(credential_command::run(command)).await,
        }
    }
}

/// User and organization that a token was issued to.
///
/// The client does not verify the token's signature; the server does.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// URN of the user.
    pub user_urn: String,
    /// URN of the organization.
    pub org_urn: String,
    /// Email address, if the token has one.
    pub email: Option<String>,
}

/// Claims of a JSON Web Token that the client reads.
#[derive(Deserialize)]
struct Claims {
    exp: Option<Value>,
    sub: Option<String>,
    org_id: Option<String>,
    email: Option<String>,
    iss: Option<String>,
}

/// Decodes the claims of a token. Returns `None` if it is not a JSON Web Token.
fn claims(token: &Secret) -> Option<Claims> {
    let payload = token.expose().split('.').nth(1)?.trim_end_matches('=');
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

/// Returns when a token expires, in seconds since the Unix epoch.
fn expiry(token: &Secret) -> Option<f64> {
    match claims(token)?.exp? {
        Value::Number(seconds) => seconds.as_f64(),
        Value::String(seconds) => seconds.trim().parse().ok(),
        _ => None,
    }
}

/// Returns the remaining lifetime of a token in seconds; 0 if its expiry cannot be read, negative
/// once it has expired. `now` is in seconds since the Unix epoch.
pub(crate) fn seconds_left(token: &Secret, now: f64) -> f64 {
    expiry(token).map_or(0.0, |expiry| expiry - now)
}

/// Returns the delay after which a token should be renewed: 5 minutes before it expires, or after 1
/// minute if its expiry cannot be read. `now` is in seconds since the Unix epoch.
pub(crate) fn refresh_in(token: &Secret, now: f64) -> Duration {
    /// Seconds before its expiry at which a token is renewed.
    const EARLY: f64 = 300.0;
    /// Seconds after which a token is renewed if its expiry cannot be read.
    const UNREADABLE: f64 = 60.0;
    let seconds = expiry(token).map_or(UNREADABLE, |expiry| expiry - now - EARLY);
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

impl Identity {
    /// Reads the identity from a token. `exchanged` is true if the server issued the token in
    /// exchange for a credential; any other token is accepted only if its issuer starts with
    /// `passport-`.
    pub(crate) fn of(token: &Secret, exchanged: bool) -> Option<Self> {
        let claims = claims(token)?;
        let passport = claims.iss.as_deref().is_some_and(|iss| iss.starts_with("passport-"));
        if !exchanged && !passport {
            return None;
        }
        Some(Self {
            user_urn: claims.sub?,
            org_urn: format!("tml:organization:{}", claims.org_id?),
            email: claims.email.filter(|email| !email.is_empty()),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::ApiKey;
    use crate::fixture;

    #[test]
    fn tokens_are_renewed_when_the_python_sdk_does() {
        for case in fixture::cases("jwt.json") {
            let token = Secret::from(case["jwt"].as_str().unwrap());
            let now = case["now"].as_f64().unwrap();
            let left = seconds_left(&token, now);
            assert_eq!(json!(left), case["seconds_until_expiry"], "{case}");
            assert_eq!(json!(expiry(&token)), case["expiry"], "{case}");
            let stale = left <= crate::auth::token::MIN_LIFETIME;
            assert_eq!(json!(stale), case["on_demand_refresh_needed"], "{case}");
            let delay = refresh_in(&token, now).as_secs_f64();
            assert_eq!(json!(delay), case["background_delay"], "{case}");
        }
    }

    fn token(claims: &Value) -> Secret {
        format!("h.{}.s", URL_SAFE_NO_PAD.encode(claims.to_string())).into()
    }

    #[test]
    fn identity_is_read_from_a_token() {
        let whoami = &fixture::load("jwt.json")["whoami"];
        let identity = Identity::of(&token(&whoami["claims"]), true).unwrap();
        let expected = &whoami["expected"];
        assert_eq!(json!(identity.user_urn), expected["user_urn"]);
        assert_eq!(json!(identity.org_urn), expected["org_urn"]);
        assert_eq!(json!(identity.email), expected["email"]);
        assert_eq!(
            Identity::of(&token(&whoami["claims"]), false),
            None,
            "not issued by the server"
        );
        let passport = json!({"sub": "u", "org_id": "o", "iss": "passport-prod"});
        assert!(Identity::of(&token(&passport), false).is_some());
    }

    #[tokio::test]
    async fn a_key_is_its_own_secret() {
        let key = ApiKey::new("tml-1").unwrap();
        assert_eq!(Credential::Key(key).fetch().await.unwrap().expose(), "tml-1");
    }
}
