//! [`PublicUrl`]: the URL under which clients reach a server.

use std::fmt;
use std::str::FromStr;

/// URL under which clients reach a server, such as `https://tinkex.example.com`: scheme, host and
/// port, without a path.
///
/// ```
/// use tinkex_server::PublicUrl;
///
/// let url: PublicUrl = "https://tinkex.example.com/".parse()?;
/// assert_eq!(url.to_string(), "https://tinkex.example.com");
/// assert!("https://example.com/tinkex".parse::<PublicUrl>().is_err());
/// # Ok::<_, String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicUrl(String);

impl FromStr for PublicUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected a URL such as https://tinkex.example.com".to_owned();
        let url: http::Uri = text.parse().map_err(|_| expected())?;
        let scheme = url.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https"));
        let authority = url.authority().ok_or_else(expected)?;
        let scheme = scheme.ok_or_else(expected)?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err(expected());
        }
        if !matches!(url.path(), "" | "/") || url.query().is_some() || text.contains('#') {
            return Err("the URL must not have a path: the server uses paths from / on".to_owned());
        }
        Ok(Self(format!("{scheme}://{authority}")))
    }
}

impl fmt::Display for PublicUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_url_without_a_path_is_accepted() {
        for (text, url) in [
            ("https://tinkex.example.com", "https://tinkex.example.com"),
            ("http://10.0.0.1:8080/", "http://10.0.0.1:8080"),
            ("https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443"),
        ] {
            assert_eq!(text.parse::<PublicUrl>().unwrap().to_string(), url);
        }
        for invalid in [
            "",
            "tinkex.example.com",
            "ftp://example.com",
            "https://",
            "https://example.com/tinkex",
            "https://example.com/?a",
            "https://example.com/#a",
            "https://user@example.com",
        ] {
            assert!(invalid.parse::<PublicUrl>().is_err(), "{invalid}");
        }
    }
}
