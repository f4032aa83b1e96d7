//! One file: fetched as it comes, and gone on with where it ended.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_NONE_MATCH, IF_RANGE, LOCATION, RANGE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use tokio::time::Instant;
use url::Url;

use crate::error::{Error, ErrorKind, Result, is_retryable_status};
use crate::transport::delay;
use crate::transport::http::{HttpService, Lane, ResponseBody};
use crate::transport::retry::RetryPolicy;

/// How long nothing may come.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often in a row nothing may come of it.
const MOST_TRIES: u32 = 5;
const MOST_REDIRECTS: usize = 5;
/// What is gathered before it is written.
const PIECE: usize = 1 << 20;
/// What is read of a refusal.
const MOST_WORDS: usize = 4 << 10;

/// Where a file grows, and where it lies when it is whole.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) whole: PathBuf,
    pub(super) part: PathBuf,
    /// What tells its content from any other, as the server wrote it.
    pub(super) tag: PathBuf,
}

/// Told how far a file is: bytes that are here, and all that there are, if that is known.
pub(super) type Told<'a> = &'a (dyn Fn(u64, Option<u64>) + Send + Sync);

/// Fetches files that need no credential.
#[derive(Clone, Copy)]
pub(super) struct Fetch<'a> {
    pub(super) http: &'a dyn HttpService,
    pub(super) retry: RetryPolicy,
}

/// A file on its way.
struct Part {
    place: Place,
    file: File,
    length: u64,
    tag: Option<String>,
}

impl Fetch<'_> {
    /// Brings what is at a URL to its place, and returns its size. What an earlier attempt left
    /// is used if the server says that it is the same content.
    ///
    /// The name is for errors; the URL never appears in one, since whoever has it has the file.
    pub(super) async fn file(
        self,
        name: &str,
        url: &str,
        place: &Place,
        told: Told<'_>,
    ) -> Result<u64> {
        self.fetch(url, place.clone(), told).await.map_err(|error| {
            let error = error.during(format!("the download of {name}"));
            match error.status() {
                Some(400 | 401 | 403 | 404 | 410) => {
                    error.with_hint("its URL may have expired; run the download again")
                }
                _ => error,
            }
        })
    }

    /// The one loop that asks for a file again.
    async fn fetch(self, url: &str, place: Place, told: Told<'_>) -> Result<u64> {
        let url = Url::parse(url).map_err(|_| unexpected("its URL makes no sense"))?;
        let start = Instant::now();
        if let Some(size) = self.unchanged(&url, &place).await? {
            told(size, Some(size));
            return Ok(size);
        }
        let mut part = off_runtime(move || Part::open(place)).await?;
        let mut tries = 0;
        loop {
            let had = part.length;
            let failed = match self.go_on(&url, part, told).await {
                (part, Ok(())) => {
                    return off_runtime(move || part.keep()).await;
                }
                (left, Err(failed)) => {
                    part = left;
                    failed
                }
            };
            tries = if part.length > had { 1 } else { tries + 1 };
            let wait = delay::before_resend(tries - 1, failed.asked, fastrand::f64());
            let late = self.retry.patience().is_some_and(|most| start.elapsed() + wait > most);
            let most = MOST_TRIES.min(self.retry.max_resends());
            if late || tries > most || !failed.error.is_retryable() {
                return Err(failed.error.after(tries, start.elapsed()));
            }
            tracing::debug!(error = %failed.error, tries, "asking for the rest of a file");
            tokio::time::sleep(wait).await;
        }
    }

    /// The size of a file that is here already, if the server says that it is still the same.
    async fn unchanged(self, url: &Url, place: &Place) -> Result<Option<u64>> {
        let looking = place.clone();
        let here =
            off_runtime(move || Ok((fs::metadata(&looking.whole), tag_of(&looking)))).await?;
        let (Ok(facts), Some(tag)) = here else { return Ok(None) };
        let same = self.ask(url, &[(IF_NONE_MATCH, tag)]).await;
        Ok(same.is_ok_and(|reply| reply.status() == 304).then_some(facts.len()))
    }

    /// Asks for what is missing, and writes what comes. The part comes back in any case.
    async fn go_on(
        self,
        url: &Url,
        mut part: Part,
        told: Told<'_>,
    ) -> (Part, std::result::Result<(), Failed>) {
        let mut wanted = Vec::new();
        if let Some(tag) = part.tag.as_ref().filter(|_| part.length > 0) {
            wanted.push((RANGE, format!("bytes={}-", part.length)));
            wanted.push((IF_RANGE, tag.clone()));
        }
        let reply = match self.ask(url, &wanted).await {
            Ok(reply) => reply,
            Err(error) => return (part, Err(error.into())),
        };
        let (head, mut body) = reply.into_parts();
        let length = number(&head.headers, &CONTENT_LENGTH);
        let (from, total) = match head.status.as_u16() {
            206 => match range(&head.headers) {
                Some((from, total)) if from == part.length => (from, total),
                _ => return (part, Err(unexpected("the server sent another part of it").into())),
            },
            // The server knows no parts, or has other content by now.
            200 => (0, length),
            // There is nothing behind what is here, so what is here is wrong: begin again.
            416 if part.length > 0 => (0, None),
            _ => return (part, Err(refused(head.status.as_u16(), &head.headers, body).await)),
        };
        let again = head.status == 416;
        let tag = head.headers.get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        // Only a strong tag promises the same bytes.
        let tag = tag.filter(|tag| tag.starts_with('"') && !again);
        if from > 0 && tag.is_some() && tag != part.tag {
            let (part, dropped) = self.blocking(part, |part| part.begin(0, None)).await;
            let other = || Error::new(ErrorKind::Connect, "it became another file half-way");
            return (part, Err(dropped.map_or_else(Failed::from, |()| other().into())));
        }
        part = match self.blocking(part, move |part| part.begin(from, tag)).await {
            (part, Ok(())) => part,
            (part, Err(error)) => return (part, Err(error.into())),
        };
        if again {
            return (part, Err(Error::new(ErrorKind::Connect, "it has to begin again").into()));
        }
        told(part.length, total);
        let mut gathered = BytesMut::new();
        loop {
            let (ended, failed) = match body.next().await {
                Some(Ok(bytes)) => {
                    gathered.extend_from_slice(&bytes);
                    (false, None)
                }
                Some(Err(failure)) => (true, Some(Error::from(failure))),
                None => (true, None),
            };
            if (ended && !gathered.is_empty()) || gathered.len() >= PIECE {
                let piece = gathered.split().freeze();
                part = match self.blocking(part, move |part| part.append(&piece)).await {
                    (part, Ok(())) => part,
                    (part, Err(error)) => return (part, Err(error.into())),
                };
                told(part.length, total);
            }
            if let Some(error) = failed {
                return (part, Err(error.into()));
            }
            if ended {
                let short = total.is_some_and(|total| total != part.length);
                let cut = || Error::new(ErrorKind::Connect, "the connection broke half-way").into();
                return (part, if short { Err(cut()) } else { Ok(()) });
            }
        }
    }

    /// Works on the part where that holds up nobody, and gives it back.
    async fn blocking(
        self,
        mut part: Part,
        work: impl FnOnce(&mut Part) -> io::Result<()> + Send + 'static,
    ) -> (Part, Result<()>) {
        let place = part.place.clone();
        let done = tokio::task::spawn_blocking(move || {
            let done = work(&mut part);
            (part, done.map_err(|why| disk(&place.part, &why)))
        });
        // It neither panics nor is it aborted.
        done.await.expect("the work came to its end")
    }

    /// Sends one request and follows redirects.
    async fn ask(
        self,
        url: &Url,
        wanted: &[(HeaderName, String)],
    ) -> Result<Response<ResponseBody>> {
        let mut url = url.clone();
        for _ in 0..=MOST_REDIRECTS {
            let mut request = Request::new(Bytes::new());
            *request.uri_mut() =
                url.as_str().parse().map_err(|_| unexpected("its URL makes no sense"))?;
            let headers = request.headers_mut();
            // Sizes and parts are those of the plain file.
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            for (name, value) in wanted {
                let value = HeaderValue::from_str(value);
                headers.insert(name, value.map_err(|_| unexpected("its tag makes no sense"))?);
            }
            let reply = self.http.send_streaming(Lane::File, request, TIMEOUT).await?;
            let next = match reply.headers().get(LOCATION).and_then(|to| to.to_str().ok()) {
                Some(to) if reply.status().is_redirection() => to,
                _ => return Ok(reply),
            };
            let next = url.join(next).map_err(|_| unexpected("it was moved to nowhere"))?;
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(unexpected("it was moved from https to something less safe"));
            }
            url = next;
        }
        Err(unexpected("it was moved without end"))
    }
}

impl Part {
    fn open(place: Place) -> io::Result<Self> {
        for path in [&place.part, &place.whole, &place.tag] {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&place.part)?;
        let length = file.metadata()?.len();
        let tag = tag_of(&place);
        Ok(Self { place, file, length, tag })
    }

    /// Goes on from here: at the end, or at the beginning with new content.
    fn begin(&mut self, from: u64, tag: Option<String>) -> io::Result<()> {
        if from == 0 {
            self.file.set_len(0)?;
            self.length = 0;
            // The tag that comes now is not that of a file which is here already.
            match fs::remove_file(&self.place.whole) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
                _ => {}
            }
        }
        if from == 0 || tag.is_some() {
            match &tag {
                Some(tag) => fs::write(&self.place.tag, tag)?,
                None => drop(fs::remove_file(&self.place.tag)),
            }
            self.tag = tag;
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.file.write_all(bytes);
        if written.is_err() {
            // Some of it may be there: the length is what the file says.
            self.length = self.file.metadata().map_or(self.length, |facts| facts.len());
        } else {
            self.length += bytes.len() as u64;
        }
        written
    }

    /// It is whole: takes its real name.
    fn keep(self) -> io::Result<u64> {
        self.file.sync_all()?;
        drop(self.file);
        fs::rename(&self.place.part, &self.place.whole)?;
        Ok(self.length)
    }
}

fn tag_of(place: &Place) -> Option<String> {
    fs::read_to_string(&place.tag).ok().filter(|tag| !tag.is_empty())
}

/// Why an attempt failed, and when the server wants another.
struct Failed {
    error: Error,
    asked: Option<f64>,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { error, asked: None }
    }
}

/// The server refused, and perhaps said why.
async fn refused(status: u16, headers: &HeaderMap, mut body: ResponseBody) -> Failed {
    let mut words = BytesMut::new();
    while words.len() < MOST_WORDS
        && let Some(Ok(bytes)) = body.next().await
    {
        words.extend_from_slice(&bytes);
    }
    words.truncate(MOST_WORDS);
    let asked = delay::asked(headers, SystemTime::now());
    let mut error = Error::from_response(status, &words, delay::asked_duration(asked));
    if !is_retryable_status(status) && error.kind() == ErrorKind::Auth {
        // It was not our credential: none was sent.
        error = error.with_hint("its URL may have expired; run the download again");
    }
    Failed { error, asked }
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// The first byte and the whole size, as in `bytes 5-9/100`; the size may be unknown.
fn range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = text.split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}

fn unexpected(why: &str) -> Error {
    Error::new(ErrorKind::Decode, why)
}

/// A file could not be read or written.
pub(super) fn disk(path: &Path, why: &io::Error) -> Error {
    let why = format!("{} cannot be written: {why}", path.display());
    let hint = "check the space and the rights there, or choose another folder";
    Error::new(ErrorKind::Config, why).with_hint(hint)
}

/// Work with files, where it holds up nobody.
pub(super) async fn off_runtime<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(io::Error::other).and_then(|done| done).map_err(|why| {
        let hint = "check the space and the rights there, or choose another folder";
        Error::new(ErrorKind::Config, format!("files cannot be written: {why}")).with_hint(hint)
    })
}
