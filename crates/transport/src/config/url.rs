//! [`BaseUrl`]: the address of the server.

use std::fmt;
use std::str::FromStr;

use url::Url;

use crate::error::{Error, ErrorKind};

use super::Env;

/// URL of the hosted service.
const PRODUCTION: &str = "https://tinker.thinkingmachines.dev/services/tinker-prod";

/// Address of the server: scheme, host, port and an optional path prefix of all routes.
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
    /// Normalized form: without default port, query and trailing slash.
    text: String,
}

impl BaseUrl {
    /// Returns the address of the hosted service.
    ///
    /// # Panics
    /// Never: the address is a valid constant.
    #[must_use]
    pub fn production() -> Self {
        PRODUCTION.parse().expect("the constant is a valid URL")
    }

    /// Returns the argument, else `TINKER_BASE_URL`, else the hosted service.
    pub fn resolve(argument: Option<Self>, env: &Env) -> Result<Self, Error> {
        match (argument, env.get("TINKER_BASE_URL")) {
            (Some(url), _) => Ok(url),
            (None, Some(text)) => {
                text.parse().map_err(|error: Error| error.during("reading TINKER_BASE_URL"))
            }
            (None, None) => Ok(Self::production()),
        }
    }

    /// Returns the URL of `target` on this server. `target` is a path with an optional query.
    pub fn join(&self, target: &str) -> String {
        format!("{}/{}", self.text, target.trim_start_matches('/'))
    }

    /// Returns whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        match self.url.host() {
            Some(url::Host::Domain(name)) => name == "localhost",
            Some(url::Host::Ipv4(address)) => address.is_loopback(),
            Some(url::Host::Ipv6(address)) => address.is_loopback(),
            None => false,
        }
    }

    /// Returns scheme, host and port. Secrets are sent to this origin only.
    pub fn origin(&self) -> url::Origin {
        self.url.origin()
    }

    /// Returns the normalized URL. It contains no secret.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for BaseUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = |cause: &str| {
            // Do not quote a URL that may contain a password or a token.
            let secret = text.contains(['@', '?', '#']);
            let url = if secret { String::new() } else { format!(" {text:?}") };
            Error::new(ErrorKind::Config, format!("invalid base URL{url}: {cause}"))
                .with_hint("Use a URL such as http://localhost:8000.")
        };
        let mut url = Url::parse(text.trim()).map_err(|error| match error {
            url::ParseError::RelativeUrlWithoutBase => invalid("missing http:// or https://"),
            error => invalid(&error.to_string()),
        })?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(invalid("not an http or https URL"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            // Do not quote the URL: it contains a password.
            let message = "invalid base URL: user and password are not supported";
            return Err(Error::new(ErrorKind::Config, message).with_hint("Use an API key."));
        }
        url.set_query(None);
        url.set_fragment(None);
        let path = url.path().trim_end_matches('/').to_owned();
        url.set_path(&path);
        let text = format!("{}{path}", url.origin().ascii_serialization());
        Ok(Self { url, text })
    }
}

impl TryFrom<&str> for BaseUrl {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self, Error> {
        text.parse()
    }
}

impl TryFrom<String> for BaseUrl {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl TryFrom<&String> for BaseUrl {
    type Error = Error;

    fn try_from(text: &String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<&Self> for BaseUrl {
    fn from(url: &Self) -> Self {
        url.clone()
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
    fn urls_are_parsed_and_joined_as_in_the_python_sdk() {
        let file = fixture::load("base_url.json");
        assert_eq!(file["default_base_url"], BaseUrl::production().as_str());
        for case in file["cases"].as_array().unwrap() {
            let argument = case["arg"].as_str().filter(|text| !text.is_empty());
            let env = case["TINKER_BASE_URL"].as_str().map(|url| ("TINKER_BASE_URL", url));
            let argument = argument.map(|text| text.parse().unwrap());
            let resolved = BaseUrl::resolve(argument, &Env::from_pairs(env)).unwrap();
            // Unlike the Python SDK, this client removes surrounding white space (N-02).
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
    fn passwords_in_a_url_are_rejected_and_not_quoted() {
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
