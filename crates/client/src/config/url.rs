//! [`BaseUrl`]: where the server is.

use std::fmt;
use std::str::FromStr;

use url::Url;

use crate::error::{Error, ErrorKind};

use super::Env;

const PRODUCTION: &str = "https://tinker.thinkingmachines.dev/services/tinker-prod";

/// Where the server is: scheme, host, port and perhaps a path in front of every route.
///
/// ```
/// use tinkex::BaseUrl;
///
/// let base: BaseUrl = "https://Example.com:443/services/p/".parse()?;
/// assert_eq!(base.to_string(), "https://example.com/services/p");
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct BaseUrl {
    url: Url,
    /// Scheme, host, port unless it is the scheme's own, and path without a slash at the end.
    text: String,
}

impl BaseUrl {
    /// The hosted service.
    ///
    /// # Panics
    /// Never: the address is a constant.
    #[must_use]
    pub fn production() -> Self {
        PRODUCTION.parse().expect("a valid constant")
    }

    /// The first that is given: the argument, `TINKER_BASE_URL`, the hosted service.
    pub(crate) fn resolve(given: Option<Self>, env: &Env) -> Result<Self, Error> {
        match (given, env.get("TINKER_BASE_URL")) {
            (Some(given), _) => Ok(given),
            (None, Some(text)) => {
                text.parse().map_err(|error: Error| error.during("reading TINKER_BASE_URL"))
            }
            (None, None) => Ok(Self::production()),
        }
    }

    /// The address of a path below this one.
    pub(crate) fn join(&self, target: &str) -> String {
        format!("{}/{}", self.text, target.trim_start_matches('/'))
    }

    /// Scheme, host and port: who gets to see a secret.
    pub(crate) fn origin(&self) -> url::Origin {
        self.url.origin()
    }

    /// The address without user, password or query, as it may be printed and compared.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for BaseUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = |why: &str| {
            let example = "give one such as http://localhost:8000";
            // Not repeated if it may hold a password or a token.
            let text = if text.contains(['@', '?', '#']) { "the address" } else { text };
            Error::new(ErrorKind::Config, format!("{text:?} {why}; {example}"))
        };
        let mut url = Url::parse(text.trim()).map_err(|_| wrong("is not a base URL"))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(wrong("is not an http or https URL"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            // Not repeated: it may be somebody's password.
            let why = "a base URL must not carry a user or password; use an API key";
            return Err(Error::new(ErrorKind::Config, why));
        }
        url.set_query(None);
        url.set_fragment(None);
        let path = url.path().trim_end_matches('/').to_owned();
        url.set_path(&path);
        let text = format!("{}{path}", url.origin().ascii_serialization());
        Ok(Self { url, text })
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BaseUrl({})", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    /// Covers T2.1.2.
    #[test]
    fn addresses_are_read_and_joined_as_the_reference_does() {
        let file = fixture::load("base_url.json");
        assert_eq!(file["default_base_url"], BaseUrl::production().as_str());
        for case in file["cases"].as_array().unwrap() {
            let given = case["arg"].as_str().filter(|text| !text.is_empty());
            let env = case["TINKER_BASE_URL"].as_str().map(|url| ("TINKER_BASE_URL", url));
            let given = given.map(|text| text.parse().unwrap());
            let resolved = BaseUrl::resolve(given, &Env::from_pairs(env)).unwrap();
            // Unlike the reference, blanks around an address are dropped.
            let expected = case["resolved"].as_str().unwrap().trim();
            assert_eq!(resolved.as_str(), expected, "{case}");
        }
        for case in file["join_cases"].as_array().unwrap() {
            let base: BaseUrl = case["base_url"].as_str().unwrap().parse().unwrap();
            for target in ["/api/v1/healthz", "api/v1/healthz"] {
                let expected = case[format!("joined_{target}")].as_str().unwrap();
                assert_eq!(base.join(target), expected, "{case}");
            }
        }
        for case in file["origin_cases"].as_array().unwrap() {
            let base: BaseUrl = case["url"].as_str().unwrap().parse().unwrap();
            assert_eq!(case["origin"], base.origin().ascii_serialization());
        }
        for invalid in file["origin_invalid"].as_array().unwrap() {
            let error = invalid.as_str().unwrap().parse::<BaseUrl>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
        }
    }

    #[test]
    fn passwords_in_an_address_are_refused_and_not_repeated() {
        for secret in [
            "https://me:hidden@h.test",
            "ftp://me:hidden@h.test",
            "http://me:hidden@h.test:x",
            "h.test?key=hidden",
        ] {
            let error = secret.parse::<BaseUrl>().unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hidden"), "{error}");
        }
        let error = "ftp://h.test".parse::<BaseUrl>().unwrap_err();
        assert!(error.to_string().contains("\"ftp://h.test\""), "{error}");
    }
}
