//! [`HubRepo`]: a repository of a Hugging Face hub, and uploads of files to it.

use std::future::IntoFuture;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::hub::Hub;
use tinkex_transport::download::resume::blocking;
use tinkex_transport::error::{Error, ErrorKind, Result};

use crate::api::{self, HubApi, JSON};
use crate::lfs;

/// Number of bytes from the start of a file that the hub inspects to choose between regular and LFS
/// storage.
const PREUPLOAD_SAMPLE: usize = 512;

impl Hub {
    /// Returns the name of the account that the token belongs to.
    ///
    /// # Errors
    /// [`ErrorKind::Auth`] without a token, or if the hub does not accept the token.
    pub async fn whoami(&self) -> Result<String> {
        #[derive(Deserialize)]
        struct Account {
            name: String,
        }
        let api = HubApi::for_writing(self)?;
        let account: Account = api.json(Method::GET, "/api/whoami-v2", None).await?;
        Ok(account.name)
    }

    /// Creates a model repository, or opens it if it exists. A `name` without a namespace belongs
    /// to the token's account. A new repository is private unless [`CreateRepo::public`] is set.
    ///
    /// ```no_run
    /// # async fn run(hub: tinkex_hub::Hub) -> tinkex_transport::Result<()> {
    /// use tinkex_hub::Commit;
    ///
    /// let repo = hub.create_repo("me/adapter").public(true).await?;
    /// let commit = Commit::new("Add weights").file("model.safetensors", "out/model.safetensors");
    /// let info = repo.commit("main", &commit).await?;
    /// println!("{:?}", info.commit_url);
    /// # Ok(()) }
    /// ```
    pub fn create_repo(&self, name: impl Into<String>) -> CreateRepo {
        CreateRepo { hub: self.clone(), name: name.into(), public: false }
    }
}

/// Builder for a repository; created by [`Hub::create_repo`] and run by `.await`.
///
/// # Errors
/// [`ErrorKind::Auth`] without a token; [`ErrorKind::Permission`] if the token may not create or
/// see the repository.
#[derive(Clone, Debug)]
#[must_use = "no repository is created until this is awaited"]
pub struct CreateRepo {
    hub: Hub,
    name: String,
    public: bool,
}

impl CreateRepo {
    /// Sets whether everyone can see a new repository. Defaults to false. An existing repository
    /// keeps its visibility.
    pub fn public(mut self, public: bool) -> Self {
        self.public = public;
        self
    }

    async fn run(self) -> Result<HubRepo> {
        #[derive(Default, Deserialize)]
        struct CreateRepoResponse {
            name: Option<String>,
        }
        let api = HubApi::for_writing(&self.hub)?;
        let (organization, short_name) = match self.name.split_once('/') {
            Some((organization, name)) => (Some(organization), name),
            None => (None, &*self.name),
        };
        let visibility = if self.public { "public" } else { "private" };
        let body = json!({
            "name": short_name, "organization": organization, "visibility": visibility,
        });
        let path = "/api/repos/create";
        let response: CreateRepoResponse = match api.json(Method::POST, path, Some(&body)).await {
            Ok(response) => response,
            // The repository exists.
            Err(error) if error.status() == Some(409) => CreateRepoResponse::default(),
            Err(error) => return Err(error),
        };
        let id = match response.name.filter(|name| name.contains('/')) {
            Some(id) => id,
            None if organization.is_some() => self.name.clone(),
            None => format!("{}/{short_name}", self.hub.whoami().await?),
        };
        Ok(HubRepo { api, id })
    }
}

impl IntoFuture for CreateRepo {
    type Output = Result<HubRepo>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// A model repository of a hub, opened for writing; created by [`Hub::create_repo`].
#[derive(Debug)]
pub struct HubRepo {
    api: HubApi,
    id: String,
}

/// Files to upload in one commit.
///
/// ```
/// use tinkex_hub::Commit;
///
/// let commit = Commit::new("Add weights")
///     .file("README.md", "out/card.md")
///     .file("adapter_model.safetensors", "out/adapter_model.safetensors")
///     .pull_request(true);
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Commit {
    message: String,
    pull_request: bool,
    files: Vec<(String, PathBuf)>,
}

impl Commit {
    /// Creates an empty commit with a message.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::default() }
    }

    /// Adds the content of a local file under a name in the repository.
    pub fn file(mut self, name: impl Into<String>, file: impl Into<PathBuf>) -> Self {
        self.files.push((name.into(), file.into()));
        self
    }

    /// Sets whether to open a pull request instead of changing the branch. Defaults to false.
    pub fn pull_request(mut self, pull_request: bool) -> Self {
        self.pull_request = pull_request;
        self
    }
}

/// A commit that the hub made.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[non_exhaustive]
pub struct CommitInfo {
    /// Web page of the commit.
    pub commit_url: Option<String>,
    /// Web page of the pull request, if one was opened.
    pub pull_request_url: Option<String>,
}

/// Upload mode that the hub chose for a file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct UploadPlan {
    path: String,
    #[serde(default)]
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
}

impl HubRepo {
    /// Returns the id of the repository with its namespace, such as `me/adapter`.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Reads a text file at a branch, tag or commit; `None` if it does not exist.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn read_text(&self, revision: &str, file: &str) -> Result<Option<String>> {
        let path = format!("/{}/resolve/{}/{file}", self.id, escape_segment(revision));
        match self.api.head(&path).await {
            Err(error) if error.status() == Some(404) => return Ok(None),
            head => head?,
        }
        match self.api.send(Method::GET, &path, JSON, Bytes::new()).await {
            Ok(body) => Ok(Some(String::from_utf8_lossy(&body).into_owned())),
            Err(error) if error.status() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates a branch, unless it exists.
    ///
    /// # Errors
    /// [`ErrorKind::Permission`] if the token may not write to the repository.
    pub async fn create_branch(&self, name: &str) -> Result<()> {
        let path = format!("/api/models/{}/branch/{}", self.id, escape_segment(name));
        let body = Bytes::from_static(b"{}");
        match self.api.send(Method::POST, &path, JSON, body).await {
            Err(error) if error.status() != Some(409) => Err(error),
            _ => Ok(()),
        }
    }

    /// Checks that the hub accepts a model card.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the hub rejects the card. The message is the first problem
    /// that the hub reports.
    pub async fn validate_model_card(&self, card: &str) -> Result<()> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct CardReport {
            errors: Vec<Value>,
        }
        let body = json!({ "content": card, "repoType": "model" });
        let report: CardReport =
            self.api.json(Method::POST, "/api/validate-yaml", Some(&body)).await?;
        match report.errors.first() {
            None => Ok(()),
            Some(first) => {
                let reason = first["message"].as_str().unwrap_or("no reason given");
                let message = format!("the hub rejected the model card: {reason}");
                Err(Error::new(ErrorKind::InvalidInput, message))
            }
        }
    }

    /// Uploads the files of `commit` and commits them to the branch `revision`.
    ///
    /// # Errors
    /// If a file cannot be read, or the hub rejects it; the branch is then unchanged. If the
    /// connection breaks during the last request, the hub may have made the commit.
    ///
    /// # Cancel safety
    /// Dropping the future may leave uploaded content in the hub's storage to which no commit
    /// refers. A later commit of the same files does not upload this content again.
    pub async fn commit(&self, revision: &str, commit: &Commit) -> Result<CommitInfo> {
        #[derive(Deserialize)]
        struct PreuploadResponse {
            files: Vec<UploadPlan>,
        }
        let mut samples = Vec::new();
        for (name, file) in &commit.files {
            let (sample, size) = read_sample(file).await?;
            samples.push(json!({ "path": name, "sample": sample, "size": size }));
        }
        let query = if commit.pull_request { "?create_pr=1" } else { "" };
        let escaped = escape_segment(revision);
        let path = format!("/api/models/{}/preupload/{escaped}{query}", self.id);
        let body = json!({ "files": samples });
        let response: PreuploadResponse = self.api.json(Method::POST, &path, Some(&body)).await?;
        let header = json!({ "summary": commit.message, "description": "" });
        let mut lines = vec![json!({ "key": "header", "value": header }).to_string()];
        for (name, file) in &commit.files {
            let plan = response.files.iter().find(|plan| plan.path == *name);
            if plan.is_some_and(|plan| plan.should_ignore) {
                continue;
            }
            let line = if plan.is_some_and(|plan| plan.upload_mode == "lfs") {
                let stored = lfs::upload(&self.api, &self.id, revision, name, file).await?;
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
        let path = format!("/api/models/{}/commit/{escaped}{query}", self.id);
        let body = Bytes::from(lines.join("\n") + "\n");
        let response = self.api.send(Method::POST, &path, "application/x-ndjson", body).await?;
        api::decode(&response)
    }
}

/// Escapes a revision, which is a single segment of a URL's path.
pub(crate) fn escape_segment(revision: &str) -> String {
    revision.replace('%', "%25").replace('/', "%2F").replace('?', "%3F").replace('#', "%23")
}

/// Reads the first bytes of a file, in base64, and its size.
async fn read_sample(file: &Path) -> Result<(String, u64)> {
    use std::io::Read as _;

    let path = file.to_owned();
    let read = move || {
        let file = std::fs::File::open(path)?;
        let size = file.metadata()?.len();
        let mut start = Vec::new();
        file.take(PREUPLOAD_SAMPLE as u64).read_to_end(&mut start)?;
        Ok((BASE64.encode(start), size))
    };
    read_blocking(file, read).await
}

async fn read(file: &Path) -> Result<Vec<u8>> {
    let path = file.to_owned();
    read_blocking(file, move || std::fs::read(path)).await
}

/// Reads from a file on the blocking thread pool.
pub(crate) async fn read_blocking<T: Send + 'static>(
    file: &Path,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    let file = file.to_owned();
    let read = move || {
        work().map_err(|error| {
            let message = format!("cannot read {}: {error}", file.display());
            Error::new(ErrorKind::InvalidInput, message)
        })
    };
    blocking(read).await
}
