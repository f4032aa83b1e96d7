//! One file of a hub, fetched piece by piece into the cache.
//!
//! A piece that is lost is asked for again from where the file ends, also by another process later.
//! The hub's token goes to the hub alone, never along a redirect to another origin.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_RANGE, LOCATION, RANGE,
    USER_AGENT,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use tinkex_wire::Secret;
use url::{Origin, Url};

use crate::config::BaseUrl;
use crate::error::{Error, ErrorKind, Result, is_retryable_status};
use crate::transport::delay;
use crate::transport::header::put_secret;
use crate::transport::http::{HttpService, Lane};

use super::cache::{Opened, Partial, Repo};
use super::id::TokenizerId;

/// Small enough that a slow line brings one in time, large enough that the round trips do not show.
const PIECE: u64 = 4 << 20;
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often in a row nothing may come.
const MOST_TRIES: u32 = 5;
const MOST_REDIRECTS: usize = 10;
/// No tokenizer is near this; a hub that sends more is not sending a tokenizer.
const LARGEST: u64 = 512 << 20;

const COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");
const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");

/// A hub, and what we may show it.
pub(crate) struct Source<'a> {
    pub(crate) http: &'a dyn HttpService,
    pub(crate) endpoint: &'a BaseUrl,
    pub(crate) token: Option<&'a Secret>,
}

/// What a hub says about a file before it sends it.
#[derive(Debug)]
pub(crate) struct Facts {
    /// The commit that the revision stands for; a simple mirror does not tell.
    pub(crate) commit: Option<String>,
    /// What tells this content from any other, as the server writes it.
    etag: Option<String>,
    /// The bytes are stored elsewhere, under other tags.
    linked: bool,
    size: Option<u64>,
}

impl Facts {
    /// The name of the content in the cache.
    fn blob(&self) -> Option<String> {
        let bare = self.etag.as_deref()?.trim_start_matches("W/").trim_matches('"');
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let usable = !bare.is_empty() && !bare.starts_with('.') && bare.len() <= 128;
        (usable && bare.chars().all(plain)).then(|| bare.to_owned())
    }

    /// The checksum, where the tag is one.
    fn sha256(&self) -> Option<String> {
        let hex = |text: &String| text.len() == 64 && text.bytes().all(|c| c.is_ascii_hexdigit());
        self.blob().filter(hex).map(|sum| sum.to_ascii_lowercase())
    }
}

/// A reply and where it came from in the end.
struct Answer {
    reply: Response<Bytes>,
    from: Origin,
}

impl Source<'_> {
    /// What the hub says about a file; `None` if it has no such file there.
    pub(crate) async fn facts(
        &self,
        id: &TokenizerId,
        revision: &str,
        file: &str,
    ) -> Result<Option<Facts>> {
        let url = self.address(id, revision, file)?;
        let mut tries = 0;
        let Answer { reply, .. } = loop {
            tries += 1;
            match self.ask(&Method::HEAD, &url, None).await {
                Ok(answer) if !is_retryable_status(answer.reply.status().as_u16()) => break answer,
                failed => self.pause(failed, tries).await?,
            }
        };
        let (status, headers) = (reply.status(), reply.headers());
        let text = |name: &HeaderName| Some(headers.get(name)?.to_str().ok()?.trim().to_owned());
        let number = |name: &HeaderName| text(name)?.parse::<u64>().ok();
        // The hub says "no such repository" and "no such revision" with the same status.
        let whole =
            matches!(text(&ERROR_CODE).as_deref(), Some("RepoNotFound" | "RevisionNotFound"));
        if status.as_u16() == 404 && !whole {
            return Ok(None);
        }
        if status.is_client_error() || status.is_server_error() {
            return Err(self.refused(&reply));
        }
        let linked = text(&LINKED_ETAG);
        Ok(Some(Facts {
            commit: text(&COMMIT).filter(|commit| TokenizerId::is_revision(commit)),
            size: match linked {
                Some(_) => number(&LINKED_SIZE),
                None => number(&CONTENT_LENGTH),
            },
            linked: linked.is_some(),
            etag: linked.or_else(|| text(&ETAG)),
        }))
    }

    /// Brings a file into the cache; returns the name of its blob.
    pub(crate) async fn fetch(
        &self,
        repo: &Repo,
        id: &TokenizerId,
        commit: &str,
        file: &str,
        facts: &Facts,
    ) -> Result<String> {
        let (blob, opening) = (facts.blob(), (repo.clone(), facts.blob()));
        let mut partial = match off_runtime(move || opening.0.open(opening.1.as_deref())).await? {
            Opened::Whole(blob) => return Ok(blob),
            Opened::Partial(partial) => partial,
        };
        tracing::info!(%id, file, size = facts.size, resumed_at = partial.len(), "downloading");
        let url = self.address(id, commit, file)?;
        loop {
            let resumed = partial.len() > 0;
            partial = self.fill(&url, facts, partial).await?;
            let (size, wanted, name) = (facts.size, facts.sha256(), blob.clone());
            let kept = off_runtime(move || {
                let sum = partial.sha256()?;
                let whole = size.is_none_or(|size| size == partial.len());
                if whole && wanted.is_none_or(|wanted| wanted == sum) {
                    let name = name.unwrap_or(sum);
                    return partial.keep(&name).map(|()| Ok(name));
                }
                partial.restart()?;
                Ok(Err(partial))
            });
            match kept.await? {
                Ok(blob) => {
                    tracing::info!(%id, file, "downloaded");
                    return Ok(blob);
                }
                // What an earlier download left may have been the fault.
                Err(empty) if resumed => partial = empty,
                Err(_) => {
                    let why = "what came is not what the hub says it has: size or checksum differ";
                    let hint = "try again; if it stays so, something on the way changes files";
                    return Err(Error::new(ErrorKind::Decode, why).with_hint(hint));
                }
            }
        }
    }

    /// Asks for what is missing until nothing is. This is the one loop that asks for pieces again.
    async fn fill(&self, url: &Url, facts: &Facts, mut partial: Partial) -> Result<Partial> {
        let mut total = facts.size;
        // A tag holds for the server that gave it.
        let mut tag = match &facts.etag {
            Some(etag) if !facts.linked => Some((self.endpoint.origin(), etag.clone())),
            _ => None,
        };
        let (mut tries, mut restarted) = (0, false);
        while total != Some(partial.len()) {
            tries += 1;
            let at = partial.len();
            let answer = match self.ask(&Method::GET, url, Some((at, tag.as_ref()))).await {
                Ok(answer) if !is_retryable_status(answer.reply.status().as_u16()) => answer,
                failed => {
                    self.pause(failed, tries).await?;
                    continue;
                }
            };
            let (head, body) = answer.reply.into_parts();
            let anew = match head.status.as_u16() {
                // The whole file: the server knows no pieces, or has other content by now.
                200 => {
                    total = Some(body.len() as u64);
                    true
                }
                206 => match content_range(&head.headers) {
                    Some((start, of))
                        if start == at && !body.is_empty() && at + body.len() as u64 <= of =>
                    {
                        total = Some(of);
                        false
                    }
                    _ => return Err(unexpected("it sent another piece than it was asked for")),
                },
                // There is nothing behind the end of what we have, so what we have is wrong.
                416 if at > 0 && !restarted => {
                    restarted = true;
                    partial = off_runtime(move || partial.restart().map(|()| partial)).await?;
                    continue;
                }
                _ => return Err(self.refused(&Response::from_parts(head, body))),
            };
            if total.is_some_and(|total| total > LARGEST) {
                return Err(unexpected("the file is far too large for a tokenizer"));
            }
            if let Some(etag) = head.headers.get(ETAG).and_then(|etag| etag.to_str().ok()) {
                tag = Some((answer.from, etag.to_owned()));
            }
            partial = off_runtime(move || {
                if anew {
                    partial.restart()?;
                }
                partial.append(&body).map(|()| partial)
            })
            .await?;
            tries = 0;
            tracing::debug!(done = partial.len(), total, "downloading");
        }
        Ok(partial)
    }

    /// Waits before something is asked again, or says why it is not.
    async fn pause(&self, failed: Result<Answer>, tries: u32) -> Result<()> {
        let (error, asked) = match failed {
            Ok(Answer { reply, .. }) => {
                let asked = delay::retry_after(reply.headers(), SystemTime::now());
                (self.refused(&reply), asked)
            }
            Err(error) => (error, None),
        };
        if tries >= MOST_TRIES || !error.is_retryable() {
            return Err(error);
        }
        tracing::debug!(%error, tries, "asking the hub again");
        tokio::time::sleep(delay::before_retry(tries - 1, asked, fastrand::f64())).await;
        Ok(())
    }

    /// Sends one request and follows redirects.
    async fn ask(
        &self,
        method: &Method,
        url: &Url,
        piece: Option<(u64, Option<&(Origin, String)>)>,
    ) -> Result<Answer> {
        let mut url = url.clone();
        for _ in 0..=MOST_REDIRECTS {
            let from = url.origin();
            let mut request = Request::new(Bytes::new());
            *request.method_mut() = method.clone();
            *request.uri_mut() = url.as_str().parse().map_err(|_| unexpected("a bad address"))?;
            *request.headers_mut() = self.headers(&from, piece)?;
            let reply = self.http.send(Lane::Hub, request, TIMEOUT).await.map_err(Error::from)?;
            // Where the bytes are stored is nobody's concern who only wants the facts.
            let told = *method == Method::HEAD && reply.headers().contains_key(LINKED_ETAG);
            let next = match reply.headers().get(LOCATION).and_then(|to| to.to_str().ok()) {
                Some(to) if reply.status().is_redirection() && !told => to,
                _ => return Ok(Answer { reply, from }),
            };
            let next = url.join(next).map_err(|_| unexpected("a redirect to a bad address"))?;
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(unexpected("a redirect from https to something less safe"));
            }
            url = next;
        }
        Err(unexpected("redirects without end"))
    }

    fn headers(
        &self,
        to: &Origin,
        piece: Option<(u64, Option<&(Origin, String)>)>,
    ) -> Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        let agent = concat!("tinkex/", env!("CARGO_PKG_VERSION"), " (Rust)");
        headers.insert(USER_AGENT, HeaderValue::from_static(agent));
        // Sizes, pieces and checksums are those of the plain file.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(token) = self.token.filter(|_| *to == self.endpoint.origin()) {
            let bearer = Secret::from(format!("Bearer {}", token.expose()));
            put_secret(&mut headers, AUTHORIZATION.as_str(), &bearer)?;
        }
        let Some((start, tag)) = piece else { return Ok(headers) };
        let text = |text: &str| HeaderValue::from_str(text).map_err(|_| unexpected("a bad tag"));
        headers.insert(RANGE, text(&format!("bytes={start}-{}", start + PIECE - 1))?);
        // A weak tag does not promise the same bytes.
        if let Some((_, tag)) = tag.filter(|(of, tag)| of == to && tag.starts_with('"'))
            && start > 0
        {
            headers.insert(IF_RANGE, text(tag)?);
        }
        Ok(headers)
    }

    fn address(&self, id: &TokenizerId, revision: &str, file: &str) -> Result<Url> {
        // In an address a revision is one segment.
        let revision = revision.replace('/', "%2F");
        let url = self.endpoint.join(&format!("{}/resolve/{revision}/{file}", id.repo()));
        Url::parse(&url).map_err(|_| unexpected("a bad address"))
    }

    fn refused(&self, reply: &Response<Bytes>) -> Error {
        let status = reply.status().as_u16();
        let asked = delay::retry_after(reply.headers(), SystemTime::now());
        let error = Error::from_response(status, reply.body(), delay::to_duration(asked));
        error.with_hint(match (status, self.token.is_some()) {
            (401, false) => {
                "there is no such model, or it is not for everyone: check its name, or set HF_TOKEN"
            }
            (401, true) => "there is no such model, or the hub does not know the token: check both",
            (403, _) => "ask for access on the model's page, then set the HF_TOKEN of that account",
            (404, _) => "check the model's name and revision; HF_ENDPOINT sets another hub",
            (429, _) => "the hub is asked too often; wait, or set HF_TOKEN",
            _ => "if the hub stays this way, give a folder with the tokenizer's files",
        })
    }
}

/// The first byte and the whole size, as in `bytes 0-9/100`.
fn content_range(headers: &HeaderMap) -> Option<(u64, u64)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = text.split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()?))
}

fn unexpected(why: &str) -> Error {
    Error::new(ErrorKind::Decode, format!("the hub's answer cannot be used: {why}"))
}

/// Work with files, where it holds up nobody.
pub(crate) async fn off_runtime<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    let failed = |why: String| {
        let hint = "HF_HOME sets another folder for downloads";
        Error::new(ErrorKind::Config, format!("the cache cannot be used: {why}")).with_hint(hint)
    };
    let done = tokio::task::spawn_blocking(work).await.map_err(|why| failed(why.to_string()))?;
    done.map_err(|why| failed(why.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_become_names_only_where_they_are_harmless() {
        let blob = |etag: &str| {
            Facts { commit: None, etag: Some(etag.to_owned()), linked: false, size: None }.blob()
        };
        assert_eq!(blob("\"abc-1\"").as_deref(), Some("abc-1"));
        assert_eq!(blob("W/\"abc\"").as_deref(), Some("abc"));
        for bad in ["", "\"\"", "../x", "a/b", "..", "\"a b\""] {
            assert_eq!(blob(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn ranges_are_read() {
        let range = |text: &'static str| {
            content_range(&[(CONTENT_RANGE, HeaderValue::from_static(text))].into_iter().collect())
        };
        assert_eq!(range("bytes 5-9/100"), Some((5, 100)));
        assert_eq!(range("bytes */100"), None);
        assert_eq!(range("bytes 0-9/*"), None);
    }
}
