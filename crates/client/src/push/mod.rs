//! Putting files into a repository of a hub.

mod door;
mod lfs;

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Hub;

use door::{Door, JSON};

/// What a hub looks at to decide how a file is kept.
const SAMPLE: usize = 512;

impl Hub {
    /// The name of the account that the token belongs to.
    ///
    /// # Errors
    /// [`ErrorKind::Auth`] if there is no token, or the hub does not know it.
    pub async fn whoami(&self) -> Result<String> {
        #[derive(Deserialize)]
        struct Account {
            name: String,
        }
        let door = Door::new(self)?;
        let account: Account = door.json(Method::GET, "/api/whoami-v2", None).await?;
        Ok(account.name)
    }

    /// A repository for a model, made if it is not there. Without a namespace (`name` alone) it is
    /// the account's own.
    ///
    /// # Errors
    /// If the token may not make it, or it is there and may not be seen.
    pub async fn create_repo(&self, name: &str, public: bool) -> Result<HubRepo> {
        #[derive(Default, Deserialize)]
        struct Created {
            name: Option<String>,
        }
        let door = Door::new(self)?;
        let (organization, short) = match name.split_once('/') {
            Some((organization, short)) => (Some(organization), short),
            None => (None, name),
        };
        let visibility = if public { "public" } else { "private" };
        let body = json!({
            "name": short, "organization": organization, "visibility": visibility,
        });
        let made = door.json::<Created>(Method::POST, "/api/repos/create", Some(&body)).await;
        let created = match made {
            Ok(created) => created,
            // It is there already.
            Err(error) if error.status() == Some(409) => Created::default(),
            Err(error) => return Err(error),
        };
        let whole = |name: &String| name.contains('/');
        let id = match created.name.filter(whole) {
            Some(id) => id,
            None if organization.is_some() => name.to_owned(),
            None => format!("{}/{short}", self.whoami().await?),
        };
        Ok(HubRepo { door, id })
    }
}

/// A repository of a hub; made by [`Hub::create_repo`].
#[derive(Debug)]
pub struct HubRepo {
    door: Door,
    id: String,
}

/// Files that change together.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Commit {
    message: String,
    pull_request: bool,
    files: Vec<(String, PathBuf)>,
}

impl Commit {
    /// A change with this summary.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::default() }
    }

    /// Puts a file under a name.
    pub fn file(mut self, name: impl Into<String>, file: impl Into<PathBuf>) -> Self {
        self.files.push((name.into(), file.into()));
        self
    }

    /// Asks for the change in place of making it.
    pub fn pull_request(mut self, wanted: bool) -> Self {
        self.pull_request = wanted;
        self
    }
}

/// A change that was made, or asked for.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct CommitInfo {
    /// Where to look at it.
    pub commit_url: Option<String>,
    /// Where it is talked about, if it was asked for.
    pub pull_request_url: Option<String>,
}

/// How the hub wants a file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wanted {
    path: String,
    #[serde(default)]
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
}

impl HubRepo {
    /// Its name with the namespace.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// A text file as it is there now; `None` if there is none.
    ///
    /// # Errors
    /// If the hub cannot be asked.
    pub async fn text(&self, revision: &str, file: &str) -> Result<Option<String>> {
        let path = format!("/{}/resolve/{}/{file}", self.id, segment(revision));
        match self.door.head(&path).await {
            Err(error) if error.status() == Some(404) => return Ok(None),
            head => head?,
        }
        match self.door.send(Method::GET, &path, JSON, Bytes::new()).await {
            Ok(body) => Ok(Some(String::from_utf8_lossy(&body).into_owned())),
            Err(error) if error.status() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a branch, unless it is there.
    ///
    /// # Errors
    /// If the token may not.
    pub async fn create_branch(&self, name: &str) -> Result<()> {
        let path = format!("/api/models/{}/branch/{}", self.id, segment(name));
        let body = Bytes::from_static(b"{}");
        match self.door.send(Method::POST, &path, JSON, body).await {
            Err(error) if error.status() != Some(409) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether a model card is one that the hub accepts.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] with what the hub finds wrong.
    pub async fn check_card(&self, card: &str) -> Result<()> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Verdict {
            errors: Vec<Value>,
        }
        let body = json!({ "content": card, "repoType": "model" });
        let verdict: Verdict =
            self.door.json(Method::POST, "/api/validate-yaml", Some(&body)).await?;
        let words = |error: &Value| error["message"].as_str().unwrap_or("no reason").to_owned();
        match verdict.errors.first() {
            None => Ok(()),
            Some(first) => {
                let why = format!("the hub does not accept the model card: {}", words(first));
                Err(Error::new(ErrorKind::InvalidInput, why))
            }
        }
    }

    /// Uploads files, and puts them there in one change.
    ///
    /// # Errors
    /// If a file cannot be read, or the hub refuses it. Nothing changes there then.
    pub async fn commit(&self, revision: &str, commit: &Commit) -> Result<CommitInfo> {
        let mut samples = Vec::new();
        for (name, file) in &commit.files {
            let (sample, size) = sample(file).await?;
            samples.push(json!({ "path": name, "sample": sample, "size": size }));
        }
        #[derive(Deserialize)]
        struct Plan {
            files: Vec<Wanted>,
        }
        let query = if commit.pull_request { "?create_pr=1" } else { "" };
        let revision = segment(revision);
        let path = format!("/api/models/{}/preupload/{revision}{query}", self.id);
        let body = json!({ "files": samples });
        let plan: Plan = self.door.json(Method::POST, &path, Some(&body)).await?;
        let header = json!({ "summary": commit.message, "description": "" });
        let mut lines = vec![json!({ "key": "header", "value": header }).to_string()];
        for (name, file) in &commit.files {
            let wanted = plan.files.iter().find(|wanted| wanted.path == *name);
            if wanted.is_some_and(|wanted| wanted.should_ignore) {
                continue;
            }
            let large = wanted.is_some_and(|wanted| wanted.upload_mode == "lfs");
            let line = if large {
                let stored = lfs::upload(&self.door, &self.id, &revision, name, file).await?;
                json!({ "key": "lfsFile", "value": {
                    "path": name, "algo": "sha256", "oid": stored.oid, "size": stored.size,
                } })
            } else {
                let content = BASE64.encode(read(file).await?);
                json!({ "key": "file", "value": {
                    "content": content, "path": name, "encoding": "base64",
                } })
            };
            lines.push(line.to_string());
        }
        let path = format!("/api/models/{}/commit/{revision}{query}", self.id);
        let body = Bytes::from(lines.join("\n") + "\n");
        let reply = self.door.send(Method::POST, &path, "application/x-ndjson", body).await?;
        door::decode(&reply)
    }
}

/// In an address a revision is one segment.
fn segment(revision: &str) -> String {
    revision.replace('%', "%25").replace('/', "%2F").replace('?', "%3F").replace('#', "%23")
}

/// How a file begins, and how large it is.
async fn sample(file: &Path) -> Result<(String, u64)> {
    use std::io::Read as _;

    let path = file.to_owned();
    let read = move || {
        let file = std::fs::File::open(path)?;
        let size = file.metadata()?.len();
        let mut start = Vec::new();
        file.take(SAMPLE as u64).read_to_end(&mut start)?;
        Ok((BASE64.encode(start), size))
    };
    blocking(file, read).await
}

async fn read(file: &Path) -> Result<Vec<u8>> {
    let path = file.to_owned();
    blocking(file, move || std::fs::read(path)).await
}

/// Work with a file, where it holds up nobody.
async fn blocking<T: Send + 'static>(
    file: &Path,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(std::io::Error::other).and_then(|done| done).map_err(|why| {
        let why = format!("{} cannot be read: {why}", file.display());
        Error::new(ErrorKind::InvalidInput, why)
    })
}
