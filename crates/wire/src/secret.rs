//! [`Secret`]: text that must not be shown, and [`Address`]: text of which some may.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A credential. It can be sent, compared and read on purpose; it does not print itself.
///
/// ```
/// use tinkex_wire::Secret;
///
/// let token = Secret::from("tml-0123456789");
/// assert_eq!(format!("{token:?}"), "Secret(…)");
/// assert_eq!(token.expose(), "tml-0123456789");
/// ```
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The text itself. Never log it.
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

/// A URL of which whoever holds it needs no other credential. It is written without what lets them
/// in: never the user, the query or the fragment, and the path only where it is known to be harmless.
pub(crate) enum Address<'a> {
    /// Scheme and host: the path may be the secret.
    Host(&'a str),
    /// The path too.
    Path(&'a str),
}

impl fmt::Debug for Address<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Host(url) | Self::Path(url)) = *self;
        let Some((scheme, rest)) = url.split_once("://") else {
            return f.write_str("(an address)");
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
    fn an_address_is_shown_without_what_lets_one_in() {
        let url = "https://user:hush@files.example:8443/a/b.bin?X-Signature=hush&x=1#hush";
        let (host, path) = (Address::Host(url), Address::Path(url));
        assert_eq!(format!("{host:?}"), "https://files.example:8443…");
        assert_eq!(format!("{path:?}"), "https://files.example:8443/a/b.bin…");
        assert_eq!(format!("{:?}", Address::Path("http://h/a")), "http://h/a");
        assert_eq!(format!("{:?}", Address::Host("http://h?hush@x/y")), "http://h…");
        assert_eq!(format!("{:?}", Address::Path("hush")), "(an address)");
    }
}
