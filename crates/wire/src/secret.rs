//! [`Secret`], a string that is never printed, and [`RedactedUrl`], a URL printed in part.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A credential whose `Debug` output does not contain it.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::Secret;
///
/// let token = Secret::from("tml-0123456789");
/// assert_eq!(format!("{token:?}"), "Secret(…)");
/// assert_eq!(token.expose(), "tml-0123456789");
/// ```
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Returns the credential. Never log it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// `Debug` form of a URL that may contain a credential. It omits user information, query and
/// fragment, and prints the path only in the [`Path`](Self::Path) variant.
pub(crate) enum RedactedUrl<'a> {
    /// Prints scheme and host, for a URL whose path may contain a signature.
    Host(&'a str),
    /// Prints scheme, host and path.
    Path(&'a str),
}

impl fmt::Debug for RedactedUrl<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Host(url) | Self::Path(url)) = *self;
        let Some((scheme, rest)) = url.split_once("://") else {
            return f.write_str("(url without a scheme)");
        };
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let host = host.rsplit_once('@').map_or(host, |(_user, host)| host);
        let path = if matches!(self, Self::Path(_)) { path } else { "" };
        let shown = format!("{scheme}://{host}{path}");
        f.write_str(&shown)?;
        if shown.len() < url.len() { f.write_str("…") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redacted_urls_omit_user_query_and_fragment() {
        let url = "https://user:hush@files.example:8443/a/b.bin?X-Signature=hush&x=1#hush";
        let host = RedactedUrl::Host(url);
        let path = RedactedUrl::Path(url);
        assert_eq!(format!("{host:?}"), "https://files.example:8443…");
        assert_eq!(format!("{path:?}"), "https://files.example:8443/a/b.bin…");
        assert_eq!(format!("{:?}", RedactedUrl::Path("http://h/a")), "http://h/a");
        assert_eq!(format!("{:?}", RedactedUrl::Host("http://h?hush@x/y")), "http://h…");
        assert_eq!(format!("{:?}", RedactedUrl::Path("hush")), "(url without a scheme)");
    }
}
