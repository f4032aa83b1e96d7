//! Follows redirects. The HTTP library does not follow redirects, so that this module can make sure
//! that no secret reaches another server.

use std::fmt::Display;

use ::http::header::{ACCEPT, LOCATION, USER_AGENT};
use ::http::{HeaderMap, HeaderName, Response, StatusCode};
use futures_util::future::BoxFuture;
use url::Url;

use crate::error::{Error, ErrorKind, Result};

/// Maximum number of redirects followed for one request.
const MAX_REDIRECTS: usize = 10;

/// Counts and checks the redirects of one request.
#[derive(Default)]
pub(crate) struct RedirectChain {
    followed: usize,
}

impl RedirectChain {
    /// Returns the URL to which `response`, received from `url`, redirects; `None` if the response
    /// is not a redirect.
    ///
    /// # Errors
    /// [`ErrorKind::Rejected`] after [`MAX_REDIRECTS`] redirects, and for a redirect to an invalid
    /// URL or from https to http. The error contains no URL, because the URL may be signed.
    pub(crate) fn next<B>(
        &mut self,
        url: &impl Display,
        response: &Response<B>,
    ) -> Result<Option<Url>> {
        let Some(location) = location(response) else { return Ok(None) };
        let invalid = |_| refused("to an invalid URL");
        let url = Url::parse(&url.to_string()).map_err(invalid)?;
        let next = url.join(location).map_err(invalid)?;
        if url.scheme() == "https" && next.scheme() != "https" {
            return Err(refused("from https to an unencrypted connection"));
        }
        if self.followed == MAX_REDIRECTS {
            return Err(refused(&format!("more than {MAX_REDIRECTS} times")));
        }
        self.followed += 1;
        Ok(Some(next))
    }
}

/// Returns the `Location` of a redirect; `None` for any other response.
fn location<B>(response: &Response<B>) -> Option<&str> {
    match response.status().as_u16() {
        301 | 302 | 303 | 307 | 308 => response.headers().get(LOCATION)?.to_str().ok(),
        _ => None,
    }
}

/// Returns whether a redirect with this status repeats the method and body of the request.
pub(crate) fn keeps_method(status: StatusCode) -> bool {
    matches!(status.as_u16(), 307 | 308)
}

/// Returns the headers that may be sent to another origin.
pub(crate) fn public_headers(headers: &HeaderMap) -> HeaderMap {
    let public = |name: &HeaderName| name == ACCEPT || name == USER_AGENT;
    let headers = headers.iter().filter(|(name, _)| public(name));
    headers.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Sends a request to `url` and follows redirects until a response is not a redirect or `is_final`
/// returns true for it. Returns this last response. Sets `url` to the URL of the last request, even
/// if the last request failed.
///
/// `send` receives the URL of each request and chooses its headers: credentials must be sent to one
/// origin only.
///
/// # Errors
/// The error of `send`, or of `RedirectChain::next`.
pub async fn follow<'a, B: Send>(
    url: &mut Url,
    mut send: impl FnMut(Url) -> BoxFuture<'a, Result<Response<B>>> + Send,
    is_final: impl Fn(&Response<B>) -> bool + Send,
) -> Result<Response<B>> {
    let mut redirects = RedirectChain::default();
    loop {
        let response = send(url.clone()).await?;
        if is_final(&response) {
            return Ok(response);
        }
        match redirects.next(url, &response)? {
            Some(next) => *url = next,
            None => return Ok(response),
        }
    }
}

/// Returns the error for a redirect that is not followed. `redirects` completes the message "the
/// server redirects …".
pub(crate) fn refused(redirects: &str) -> Error {
    Error::new(ErrorKind::Rejected, format!("the server redirects {redirects}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Follows redirects to `locations`, then receives a final response. Returns the visited URLs.
    async fn visited(start: &str, locations: &[&str]) -> Result<Vec<String>> {
        let visited = Mutex::new(Vec::new());
        let send = |url: Url| -> BoxFuture<'_, Result<Response<()>>> {
            let mut visited = visited.lock().unwrap();
            let response = Response::builder();
            let response = match locations.get(visited.len()) {
                Some(location) => response.status(307).header(LOCATION, *location),
                // A 304 is no redirect, even with a `location`.
                None => response.status(304).header(LOCATION, "/ignored"),
            };
            visited.push(url.to_string());
            Box::pin(async move { Ok(response.body(()).unwrap()) })
        };
        follow(&mut Url::parse(start).unwrap(), send, |_| false).await?;
        Ok(visited.into_inner().unwrap())
    }

    #[tokio::test]
    async fn locations_are_resolved_against_the_url_that_sent_them() {
        let urls = visited("http://a.test/x/y", &["z", "https://b.test/", "/w"]).await.unwrap();
        assert_eq!(
            urls,
            ["http://a.test/x/y", "http://a.test/x/z", "https://b.test/", "https://b.test/w"]
        );
    }

    #[tokio::test]
    async fn unsafe_and_endless_redirects_are_refused_without_the_url() {
        for (start, locations) in [
            ("https://a.test/?sig=secret", vec!["http://a.test/?sig=secret"]),
            ("https://a.test/?sig=secret", vec!["http://[bad?sig=secret"]),
            ("https://a.test/?sig=secret", vec!["?sig=secret"; MAX_REDIRECTS + 1]),
        ] {
            let error = visited(start, &locations).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Rejected);
            assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
        }
        visited("https://a.test/", &["?n"; MAX_REDIRECTS]).await.unwrap();
    }
}
