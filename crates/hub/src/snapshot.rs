//! [`SnapshotDownload`]: downloads the files of one revision of a tokenizer into the cache.

use std::path::PathBuf;

use crate::api::HubApi;
use tinkex_transport::error::{Error, ErrorKind, Result};

use crate::cache::TokenizerCache;
use crate::file::{HubFileInfo, cache_io};
use tinkex_text::files;

use crate::tokenizer_id::TokenizerId;

/// Download of all files of a revision.
pub(crate) struct SnapshotDownload<'a> {
    pub(crate) api: &'a HubApi,
    pub(crate) cache: &'a TokenizerCache,
    pub(crate) id: &'a TokenizerId,
    /// Branch, tag or commit.
    pub(crate) revision: &'a str,
}

/// The file that holds the tokenizer itself.
struct MainFile {
    name: &'static str,
    info: HubFileInfo,
}

/// Revision that all files are downloaded from.
struct PinnedRevision {
    /// Revision in the URLs of the files.
    in_url: String,
    /// Name of the snapshot in the cache.
    in_cache: String,
}

impl SnapshotDownload<'_> {
    /// Downloads the files that are not in the cache. Returns the folder of the snapshot.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the repository has no tokenizer in a known format.
    pub(crate) async fn run(&self) -> Result<PathBuf> {
        let main = self.find_main_file().await?;
        let pinned = self.pin(&main.info);
        for file in [files::CONFIG, files::SPECIAL, files::TEMPLATE] {
            let info = self.file_info(&pinned.in_url, file).await?;
            self.add(&pinned, file, info.as_ref()).await?;
        }
        // Add the tokenizer last: a snapshot without a tokenizer counts as not cached, so after an
        // interruption the next call continues the download.
        self.add(&pinned, main.name, Some(&main.info)).await?;

        let folder = self.cache.snapshot_folder(&pinned.in_cache);
        let cache = self.cache.clone();
        let revision = self.revision.to_owned();
        cache_io(move || cache.set_reference(&revision, &pinned.in_cache)).await?;
        Ok(folder)
    }

    /// Finds the file of the tokenizer. If the repository has several formats, the first known one
    /// is used.
    async fn find_main_file(&self) -> Result<MainFile> {
        for name in [files::TOKENIZER, files::TIKTOKEN] {
            if let Some(info) = self.file_info(self.revision, name).await? {
                return Ok(MainFile { name, info });
            }
        }
        let id = self.id;
        let hub = &self.api.endpoint;
        let json = files::TOKENIZER;
        let tiktoken = files::TIKTOKEN;
        let message = format!("{id} has neither {json} nor {tiktoken} on {hub}");
        let hint = "Convert the tokenizer to a tokenizer.json and pass its folder; tokenizers \
                    that are Python code are not run.";
        Err(Error::new(ErrorKind::NotFound, message).with_hint(hint))
    }

    /// Pins all files to the commit of the main file, because the branch may move during the
    /// download. A plain mirror reports no commit, so its files cannot be pinned.
    fn pin(&self, main: &HubFileInfo) -> PinnedRevision {
        match &main.commit {
            Some(commit) => PinnedRevision { in_url: commit.clone(), in_cache: commit.clone() },
            None => PinnedRevision {
                in_url: self.revision.to_owned(),
                // Replace `/`, which the name of a branch may contain but the name of a folder must
                // not.
                in_cache: self.revision.replace('/', "--"),
            },
        }
    }

    /// Downloads a file into the snapshot, or records that the repository does not have it if
    /// `info` is `None`.
    async fn add(
        &self,
        pinned: &PinnedRevision,
        file: &'static str,
        info: Option<&HubFileInfo>,
    ) -> Result<()> {
        let added = async {
            let blob = match info {
                Some(info) => {
                    let in_url = &pinned.in_url;
                    Some(self.api.fetch_file(self.cache, self.id, in_url, file, info).await?)
                }
                None => None,
            };
            let cache = self.cache.clone();
            let snapshot = pinned.in_cache.clone();
            cache_io(move || match blob {
                Some(blob) => cache.add_to_snapshot(&blob, &snapshot, file),
                None => cache.mark_absent(&snapshot, file),
            })
            .await
        };
        added.await.map_err(|error| self.with_operation(error, file))
    }

    /// Requests the metadata of a file; `None` if the repository does not have it.
    async fn file_info(&self, revision: &str, file: &str) -> Result<Option<HubFileInfo>> {
        let info = self.api.file_info(self.id, revision, file).await;
        info.map_err(|error| self.with_operation(error, file))
    }

    fn with_operation(&self, error: Error, file: &str) -> Error {
        error.during(format!("downloading {file} of {} from {}", self.id, self.api.endpoint))
    }
}
