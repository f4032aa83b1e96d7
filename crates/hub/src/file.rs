//! Files of a hub repository: their metadata, and their download into the cache.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, ETAG};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use url::Url;

use crate::api::{HubApi, HubRequest, MAX_RETRIES};
use crate::repo::escape_segment;
use tinkex_transport::download::attempts::Attempts;
use tinkex_transport::download::resume::{
    PartialFile as _, ResumableDownload, Validator, blocking, parse_url,
};
use tinkex_transport::error::Result;
use tinkex_transport::http::Lane;
use tinkex_transport::retry::failed_attempt::FailedAttempt;

use crate::cache::{ExpectedContent, OpenedBlob, TokenizerCache, cache_error};
use crate::tokenizer_id::TokenizerId;

/// Number of bytes per request: small enough to arrive within the timeout on a slow connection,
/// large enough that the round trips take little of the time.
const PIECE: u64 = 4 << 20;
/// Maximum time without received bytes.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest accepted file in bytes. Tokenizers are far smaller.
const MAX_SIZE: u64 = 512 << 20;

/// Header with the commit of the requested revision.
const COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");
/// Header with the entity tag of content that is stored on another server.
const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
/// Header with the size in bytes of content that is stored on another server.
const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
/// Header with the hub's code for the cause of an error.
const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");

/// Metadata of a file, from the response to a HEAD request.
#[derive(Debug)]
pub(crate) struct HubFileInfo {
    /// Commit of the requested revision; `None` if the server is a plain mirror, which does not
    /// report it.
    pub(crate) commit: Option<String>,
    /// Entity tag as the server wrote it, with quotes.
    etag: Option<String>,
    /// Whether the content is stored on another server, whose entity tags differ from the hub's.
    linked: bool,
    /// Size in bytes.
    size: Option<u64>,
}

impl HubFileInfo {
    /// Returns the name of the content in the cache: the entity tag, if it is a safe file name.
    fn blob(&self) -> Option<String> {
        let tag = self.etag.as_deref()?.trim_start_matches("W/").trim_matches('"');
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_safe = !tag.is_empty() && !tag.starts_with('.') && tag.len() <= 128;
        (is_safe && tag.chars().all(is_plain)).then(|| tag.to_owned())
    }

    /// Returns the SHA-256 of the content, if the entity tag is a SHA-256 checksum.
    fn sha256(&self) -> Option<String> {
        let is_hash = |tag: &String| tag.len() == 64 && tag.bytes().all(|c| c.is_ascii_hexdigit());
        self.blob().filter(is_hash).map(|hash| hash.to_ascii_lowercase())
    }
}

impl HubApi {
    /// Requests the metadata of a file; `None` if the repository does not have it.
    pub(crate) async fn file_info(
        &self,
        id: &TokenizerId,
        revision: &str,
        file: &str,
    ) -> Result<Option<HubFileInfo>> {
        let url = self.file_url(id, revision, file)?;
        let request = HubRequest {
            method: Method::HEAD,
            url: &url,
            // Sizes refer to the uncompressed file.
            headers: [(ACCEPT_ENCODING, HeaderValue::from_static("identity"))]
                .into_iter()
                .collect(),
            body: Bytes::new(),
            max_retries: MAX_RETRIES,
            with_token: true,
            // A redirect with this header already has the metadata, so do not follow it to the
            // storage server.
            stop_at: Some(LINKED_ETAG),
        };
        let response = self.request(&request).await.map_err(|error| match error.status() {
            Some(status) => error.with_hint(self.hint(status)),
            None => error,
        })?;
        let status = response.status();
        let headers = response.headers();
        let text = |name: &HeaderName| Some(headers.get(name)?.to_str().ok()?.trim().to_owned());
        let number = |name: &HeaderName| text(name)?.parse::<u64>().ok();
        // A 404 can also mean that the whole repository or the revision does not exist.
        let whole_repo =
            matches!(text(&ERROR_CODE).as_deref(), Some("RepoNotFound" | "RevisionNotFound"));
        if status == 404 && !whole_repo {
            return Ok(None);
        }
        if status.is_client_error() || status.is_server_error() {
            return Err(self.refused(status.as_u16(), headers, response.body()).error);
        }
        let linked = text(&LINKED_ETAG);
        Ok(Some(HubFileInfo {
            commit: text(&COMMIT).filter(|commit| TokenizerId::is_revision(commit)),
            size: match linked {
                Some(_) => number(&LINKED_SIZE),
                None => number(&CONTENT_LENGTH),
            },
            linked: linked.is_some(),
            etag: linked.or_else(|| text(&ETAG)),
        }))
    }

    /// Downloads a file into the cache, unless it is already cached. Returns the name of its blob.
    pub(crate) async fn fetch_file(
        &self,
        cache: &TokenizerCache,
        id: &TokenizerId,
        commit: &str,
        file: &str,
        info: &HubFileInfo,
    ) -> Result<String> {
        let expected =
            ExpectedContent { blob: info.blob(), size: info.size, sha256: info.sha256() };
        let cache = cache.clone();
        let partial = match cache_io(move || cache.open(expected)).await? {
            OpenedBlob::Cached(blob) => return Ok(blob),
            OpenedBlob::Partial(partial) => partial,
        };
        tracing::info!(%id, file, size = info.size, resumed_at = partial.len(), "downloading");
        let download = ResumableDownload {
            http: &*self.http,
            lane: Lane::Hub,
            idle_timeout: IDLE_TIMEOUT,
            piece: Some(PIECE),
            max_size: Some(MAX_SIZE),
            verified: true,
            headers: &|origin| self.headers(origin),
            refused: &|status, headers, body| self.refused(status, headers, body),
            on_progress: &|bytes, total| tracing::debug!(bytes, total, "downloading"),
        };
        let etag = info.etag.clone().filter(|etag| !info.linked && etag.starts_with('"'));
        let validator = etag.map(|etag| Validator { etag, origin: Some(self.endpoint.origin()) });
        let url = self.file_url(id, commit, file)?;
        let attempts = Attempts::new(MAX_RETRIES);
        let blob = download.run(&url, partial, validator, info.size, attempts).await?;
        tracing::info!(%id, file, "downloaded");
        Ok(blob)
    }

    fn file_url(&self, id: &TokenizerId, revision: &str, file: &str) -> Result<Url> {
        let revision = escape_segment(revision);
        parse_url(&self.endpoint.join(&format!("{}/resolve/{revision}/{file}", id.repo())))
    }

    fn refused(&self, status: u16, headers: &HeaderMap, body: &[u8]) -> FailedAttempt {
        FailedAttempt::from_parts(status, headers, body).with_hint(self.hint(status))
    }

    /// Returns the hint for a download that failed with this status.
    fn hint(&self, status: u16) -> &'static str {
        match (status, self.has_token()) {
            (401, false) => {
                "Check the name of the model; if access to it is restricted, set HF_TOKEN."
            }
            (401, true) => "Check the name of the model and the token (HF_TOKEN).",
            (403, _) => {
                "Request access on the model's page, then set HF_TOKEN to a token of that account."
            }
            (404, _) => "Check the name and the revision of the model, and the hub (HF_ENDPOINT).",
            (429, _) => "Wait before the next download, or set HF_TOKEN for a higher rate limit.",
            _ => "Try again later, or pass a folder with the tokenizer's files.",
        }
    }
}

/// Runs file work of the cache on the blocking thread pool.
pub(crate) async fn cache_io<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    blocking(move || work().map_err(|error| cache_error(&error))).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_safe_entity_tags_become_file_names() {
        let blob = |etag: &str| {
            let etag = Some(etag.to_owned());
            HubFileInfo { commit: None, etag, linked: false, size: None }.blob()
        };
        assert_eq!(blob("\"abc-1\"").as_deref(), Some("abc-1"));
        assert_eq!(blob("W/\"abc\"").as_deref(), Some("abc"));
        for bad in ["", "\"\"", "../x", "a/b", "..", "\"a b\""] {
            assert_eq!(blob(bad), None, "{bad:?}");
        }
    }
}
